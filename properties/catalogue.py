"""The properties: what must hold of a candidate on every case that it supports.

Each is a plain function of (candidate, case, presentation) that returns a Verdict. It knows
nothing of pytest or Hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..kernels.candidate import Candidate
from ..oracle.case import Case, Presentation
from ..oracle.formats import format_of
from ..oracle.precision import TARGET_BITS
from ..oracle.visibility import empty_rows
from . import contracts, metamorphic_backward, metamorphic_forward, runs
from .asking import BACKWARD, FORWARD, NO_RESULT, all_outputs, ask
from .judge import Undecided, check_form, empty_elements, judge, judged_elements, violated
from .systematic import leaning_profile, leans
from .verdict import Lean, Outcome, Verdict, first_or_worst


@dataclass(frozen=True)
class Property:
    """A statement that must hold.

    ``outputs`` are those it judges; it says nothing of a candidate that offers none of them.
    ``needs`` are what a case must hold for it: "backward" (do), "dlse", "bias", "empty-row".
    ``every``: it is judged on one in this many of the drawn cases, as it takes calls and answers of its own.
    """

    name: str
    title: str
    about: str
    outputs: tuple[str, ...]
    judge: Callable[[Candidate, Case, Presentation], Verdict]
    needs: frozenset[str] = frozenset()
    every: int = 1


def judge_output(candidate: Candidate, case: Case, presentation: Presentation, output: str) -> Verdict:
    """One output of one call against the exact answer and its bound."""
    outcome = ask(candidate, case, presentation, (output,))
    if isinstance(outcome, Verdict):
        return outcome
    got, profile = getattr(outcome.result, output), candidate.profile(case.dtype, presentation)
    target = TARGET_BITS
    while True:
        try:
            return judge(
                case,
                output,
                got,
                runs.answer(case, target),
                runs.allowed(case, profile, target)[output],
                candidate.conventions,
                profile,
            )
        except Undecided:
            target *= 2
            if target > 16 * TARGET_BITS:
                raise


def _against_oracle(output: str) -> Callable[[Candidate, Case, Presentation], Verdict]:
    def judged(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
        verdict = judge_output(candidate, case, presentation, output)
        if verdict.worst is None or verdict.outcome is not Outcome.HOLDS:
            return verdict
        return replace(verdict, leans=_leans(candidate, case, presentation, output))

    judged.__name__ = f"judge_{output}"
    return judged


def _leans(candidate: Candidate, case: Case, presentation: Presentation, output: str) -> tuple[Lean, ...]:
    """How an output that holds leans; nothing where its roundings to storage cannot be told from others."""
    outcome = ask(candidate, case, presentation, (output,))
    assert not isinstance(outcome, Verdict)
    got, conventions = getattr(outcome.result, output), candidate.conventions
    profile = candidate.profile(case.dtype, presentation)
    leaning = leaning_profile(profile, format_of(got.dtype))
    # a NaN or a mean in an empty row may reach every gradient; a log-sum-exp in base 2 is rounded in base 2
    other = conventions.empty_row != "zero" and bool(empty_rows(case).any())
    if leaning is None or other or (output == "lse" and conventions.lse_base == "2"):
        return ()
    elements = judged_elements(case, output)
    if output in ("o", "lse", "dq"):
        elements = elements & ~empty_elements(case, output)
    bound, allowed = runs.allowed(case, profile)[output], runs.allowed(case, leaning)[output]
    return leans(case, output, got, runs.answer(case), bound, allowed, elements)


def lse_gradient(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """dQ, dK and dV where a gradient flows in through the log-sum-exp; the first that is wrong, or the worst."""
    return first_or_worst([judge_output(candidate, case, presentation, output) for output in BACKWARD])


def empty_row_contract(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """Rows that see no key: O and log-sum-exp as declared, their dQ exactly 0, and no NaN anywhere else."""
    empty = empty_rows(case)
    if not empty.any():
        return Verdict(Outcome.VACUOUS, "no row of the case is empty")
    judged = 0
    for output in all_outputs(candidate, case):
        verdict = judge_output(candidate, case, presentation, output)
        if verdict.outcome is Outcome.DECLINED:
            return verdict
        if verdict.outcome is Outcome.VIOLATED and verdict.kind in ("contract", "non-finite", *NO_RESULT):
            return verdict
        if output in ("o", "lse", "dq") and verdict.outcome is not Outcome.VACUOUS:
            judged += int(empty_elements(case, output).sum())
    return Verdict(Outcome.HOLDS, judged=judged) if judged else Verdict(Outcome.VACUOUS, "no element of it is judged")


def shape_and_dtype(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """Every output offered is there, in the right shape and dtype."""
    outputs, profile = all_outputs(candidate, case), candidate.profile(case.dtype, presentation)
    for output in outputs:
        outcome = ask(candidate, case, presentation, (output,))
        if isinstance(outcome, Verdict):
            return outcome
        wrong = check_form(case, output, getattr(outcome.result, output), profile)
        if wrong is not None:
            return wrong
    return Verdict(Outcome.HOLDS, judged=len(outputs)) if outputs else Verdict(Outcome.DECLINED, "it offers no output")


def nan_pattern(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """NaN and infinity only where the exact answer, rounded, has them."""
    judged = 0
    for output in all_outputs(candidate, case):
        verdict = judge_output(candidate, case, presentation, output)
        if verdict.outcome is Outcome.DECLINED:
            return verdict
        if verdict.outcome is Outcome.VIOLATED and verdict.kind in ("non-finite", *NO_RESULT):
            return verdict
        judged += verdict.judged
    return Verdict(Outcome.HOLDS, judged=judged) if judged else Verdict(Outcome.VACUOUS, "no element of it is judged")


def inputs_unchanged(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """The call leaves every bit of its inputs as it was."""
    for outputs in (FORWARD, BACKWARD):
        if case.do is None and outputs is BACKWARD:
            continue
        outcome = ask(candidate, case, presentation, outputs)
        if isinstance(outcome, Verdict):
            return outcome
        assert outcome.result is not None
        if outcome.result.mutated:
            return violated("mutated", f"it changed its input {', '.join(outcome.result.mutated)}")
    return Verdict(Outcome.HOLDS, judged=1)


#: one in this many of the drawn cases is judged by the properties that compare a kernel with itself
EVERY = 6

_BACK = frozenset({"backward"})

_ANY = (*FORWARD, *BACKWARD)

#: a kernel compared with itself: each takes calls and exact answers of its own
_SELF_COMPARED: tuple[Property, ...] = (
    Property("ones", "V = 1 gives 1", "values that are all 1 give 1", ("o",), metamorphic_forward.ones),
    Property(
        "one-key",
        "one visible key",
        "a row that sees one key returns its value, without gradient of Q or K",
        ("o", "dq", "dk"),
        metamorphic_forward.one_key,
    ),
    Property("hull", "hull of V", "O lies within the visible values", ("o",), metamorphic_forward.hull),
    Property(
        "shift",
        "shifted scores",
        "a constant added to a row's scores leaves O and moves LSE by it",
        _ANY,
        metamorphic_forward.shift,
    ),
    Property(
        "key-order",
        "order of the keys",
        "keys in reverse order, with masks and biases, give the same",
        _ANY,
        metamorphic_forward.permutation,
    ),
    Property(
        "block-sizes",
        "block sizes",
        "other block sizes give the same",
        _ANY,
        metamorphic_forward.blocks,
    ),
    Property(
        "split-keys",
        "split over keys",
        "two halves of the keys, merged by their LSE, give the same as one pass",
        ("lse",),
        metamorphic_forward.split_merge,
    ),
    Property(
        "grouped-heads",
        "grouped heads",
        "heads that share a key head give the same as with a copy each",
        _ANY,
        metamorphic_forward.grouped_heads,
    ),
    Property(
        "ragged",
        "ragged batch",
        "a sequence in a ragged batch gives the same alone",
        _ANY,
        metamorphic_forward.ragged,
    ),
    Property(
        "scaled-v",
        "V times 16",
        "V times a power of two multiplies O, dQ and dK by it, exactly",
        _ANY,
        metamorphic_backward.scaled_v,
    ),
    Property(
        "scaled-do",
        "dO times 16",
        "dO times a power of two multiplies all gradients by it, exactly",
        BACKWARD,
        metamorphic_backward.scaled_do,
        _BACK,
    ),
    Property("zero-do", "dO = 0", "dO = 0 gives exactly 0", BACKWARD, metamorphic_backward.zero_do, _BACK),
    Property(
        "ds-sum",
        "sum of dS",
        "dS, seen through dbias, sums to 0 over the keys",
        ("dbias",),
        metamorphic_backward.ds_sum,
        _BACK,
    ),
    Property("dk-sum", "sum of dK", "dK sums to 0 over the keys", ("dk",), metamorphic_backward.dk_sum, _BACK),
    Property(
        "dropout-mask",
        "dropout mask",
        "the keep mask, read off the outputs, is the given one in both passes",
        ("o",),
        metamorphic_backward.dropout_mask,
        frozenset({"dropout"}),
    ),
    Property("twice", "called twice", "calling twice is calling once", _ANY, contracts.twice),
    Property(
        "company",
        "batch company",
        "a batch entry alone gives the same as in company",
        _ANY,
        contracts.company,
    ),
    Property(
        "layouts",
        "strided memory",
        "transposed, sliced and expanded arrays give the same as contiguous ones",
        _ANY,
        contracts.layouts,
    ),
    Property(
        "packed",
        "packed batch",
        "a ragged batch without padding gives the same as a padded one",
        _ANY,
        contracts.packed,
    ),
    Property(
        "with-gradients",
        "with gradients",
        "O and LSE are the same whether gradients are asked for or not",
        FORWARD,
        contracts.with_gradients,
        _BACK,
    ),
    Property("padding", "padding unread", "NaN in padding changes nothing", ("o",), contracts.padding),
    Property(
        "masked", "masked keys", "other numbers in keys that no row sees change nothing", ("o",), contracts.masked
    ),
    Property(
        "masked-poison",
        "NaN in masked keys",
        "NaN in keys that no row sees changes nothing",
        ("o",),
        contracts.masked_poison,
    ),
    Property(
        "outputs-written", "outputs written", "every element of every output is written", ("o",), contracts.written
    ),
)

PROPERTIES: dict[str, Property] = {
    p.name: p
    for p in (
        Property("output", "output", "O against its bound", ("o",), _against_oracle("o")),
        Property("lse", "log-sum-exp", "the log-sum-exp against its bound", ("lse",), _against_oracle("lse")),
        Property("dq", "dQ", "the gradient of the queries", ("dq",), _against_oracle("dq"), _BACK),
        Property("dk", "dK", "the gradient of the keys", ("dk",), _against_oracle("dk"), _BACK),
        Property("dv", "dV", "the gradient of the values", ("dv",), _against_oracle("dv"), _BACK),
        Property(
            "dbias",
            "dbias",
            "the gradient of the bias, summed over the axes it broadcasts",
            ("dbias",),
            _against_oracle("dbias"),
            _BACK | {"bias"},
        ),
        Property(
            "dsink",
            "dsink",
            "the gradient of the attention sinks, summed over batch and rows",
            ("dsink",),
            _against_oracle("dsink"),
            _BACK | {"sinks"},
        ),
        Property(
            "dlse",
            "gradient through LSE",
            "dQ, dK and dV where a gradient flows in through the log-sum-exp",
            BACKWARD,
            lse_gradient,
            _BACK | {"dlse"},
        ),
        Property(
            "empty-rows",
            "empty rows",
            "rows that see no key: O and LSE as declared, no gradient, nothing leaks",
            ("o",),
            empty_row_contract,
            frozenset({"empty-row"}),
        ),
        Property(
            "shape-dtype", "shape and dtype", "every output in the right shape and dtype", ("o",), shape_and_dtype
        ),
        Property(
            "nan-pattern", "NaN pattern", "NaN and infinity only where the exact answer has them", ("o",), nan_pattern
        ),
        Property("inputs-unchanged", "inputs unchanged", "no input's bits change", ("o",), inputs_unchanged),
        *(replace(prop, every=EVERY) for prop in _SELF_COMPARED),
    )
}


def applies(prop: Property, candidate: Candidate) -> bool:
    """Whether a candidate offers what a property judges; what it does not offer is shown, not judged."""
    if not set(prop.outputs) & candidate.offers:
        return False
    return not any(need in candidate.lacks for need in prop.needs)
