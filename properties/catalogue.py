"""The properties: what must hold of a candidate on every case that it supports.

Each is a plain function of (candidate, case, presentation) that returns a Verdict. It knows
nothing of pytest or Hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..kernels.candidate import Candidate
from ..oracle.case import Case, Presentation
from ..oracle.features import FEATURES, features
from ..oracle.precision import TARGET_BITS
from ..oracle.visibility import empty_rows
from . import runs
from .judge import TITLES, Undecided, check_form, empty_elements, judge, violated
from .verdict import Outcome, Verdict, Worst

FORWARD = ("o", "lse")
BACKWARD = ("dq", "dk", "dv")

#: violations that leave nothing to judge
NO_RESULT = ("raised", "missing", "died")


@dataclass(frozen=True)
class Property:
    """A statement that must hold.

    ``outputs`` are those it judges; it says nothing of a candidate that offers none of them.
    ``needs`` are what a case must hold for it: "backward" (do), "dlse", "bias", "empty-row".
    """

    name: str
    title: str
    about: str
    outputs: tuple[str, ...]
    judge: Callable[[Candidate, Case, Presentation], Verdict]
    needs: frozenset[str] = frozenset()


def declined(candidate: Candidate, case: Case, want: frozenset[str]) -> str | None:
    """Why a candidate declines a case by what it declares; None where it does not."""
    if case.dtype not in candidate.dtypes:
        return f"it does not take {case.dtype}"
    used = features(case)
    if not want & {"dq", "dk", "dv", "dbias"}:
        used = used - {"backward", "dlse"}
    if "empty-row" in used and candidate.conventions.empty_row == "rejects":
        return "it rejects rows that see no key"
    for feature in FEATURES:
        if feature in used and feature in candidate.lacks:
            return candidate.lacks[feature]
    return None


def wanted(candidate: Candidate, case: Case, outputs: tuple[str, ...]) -> frozenset[str]:
    """What to ask for: the forward pass, or all gradients together, as users call kernels."""
    offers = set(candidate.offers)
    want: set[str] = set()
    if "dbias" in outputs and case.do is not None and case.bias is not None:
        want |= {"dbias", *FORWARD, *BACKWARD}
    if case.do is not None and set(outputs) & set(BACKWARD):
        want |= {*FORWARD, *BACKWARD}
    if set(outputs) & set(FORWARD):
        want |= set(FORWARD)
    return frozenset(want & offers)


def _outcome(
    candidate: Candidate, case: Case, presentation: Presentation, outputs: tuple[str, ...]
) -> runs.Outcome | Verdict:
    """The candidate's outcome, or the verdict where there is no result to judge."""
    want = wanted(candidate, case, outputs)
    if not want:
        return Verdict(Outcome.DECLINED, f"it offers no {' or '.join(TITLES[x] for x in outputs)}")
    reason = declined(candidate, case, want)
    if reason is not None:
        return Verdict(Outcome.DECLINED, reason)
    # without gradients to compute, the upstream ones are not part of the call
    asked = case if want & {*BACKWARD, "dbias"} else replace(case, do=None, dlse=None)
    outcome = runs.call(candidate, asked, presentation, want)
    if outcome.declined is not None:
        return Verdict(Outcome.DECLINED, outcome.declined)
    if outcome.raised is not None:
        return violated("raised", f"it raised {outcome.raised}")
    if outcome.died is not None:
        return violated("died", f"it {outcome.died}")
    return outcome


def judge_output(candidate: Candidate, case: Case, presentation: Presentation, output: str) -> Verdict:
    """One output of one call against the exact answer and its bound."""
    outcome = _outcome(candidate, case, presentation, (output,))
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
        return judge_output(candidate, case, presentation, output)

    judged.__name__ = f"judge_{output}"
    return judged


def lse_gradient(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """dQ, dK and dV where a gradient flows in through the log-sum-exp; the first that is wrong, or the worst."""
    return _first_or_worst([judge_output(candidate, case, presentation, output) for output in BACKWARD])


def _first_or_worst(verdicts: list[Verdict]) -> Verdict:
    """One verdict for several: a violation first, then what was judged, then what was not."""
    for outcome in (Outcome.VIOLATED, Outcome.HOLDS, Outcome.VACUOUS, Outcome.DECLINED):
        found = [v for v in verdicts if v.outcome is outcome]
        if not found:
            continue
        if outcome is not Outcome.HOLDS:
            return found[0]
        worst: Worst | None = None
        for verdict in found:
            if verdict.worst is not None and (worst is None or verdict.worst.ratio > worst.ratio):
                worst = verdict.worst
        return Verdict(
            Outcome.HOLDS,
            worst=worst,
            judged=sum(v.judged for v in found),
            median=max((v.median for v in found if v.median is not None), default=None),
            at_stake=sum(v.at_stake for v in found),
            zeros=sum(v.zeros for v in found),
        )
    raise ValueError("no verdicts to choose from")


def _all_outputs(candidate: Candidate, case: Case) -> tuple[str, ...]:
    names = [*FORWARD, *(BACKWARD if case.do is not None else ())]
    if case.do is not None and case.bias is not None:
        names.append("dbias")
    return tuple(name for name in names if name in candidate.offers)


def empty_row_contract(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """Rows that see no key: O and log-sum-exp as declared, their dQ exactly 0, and no NaN anywhere else."""
    empty = empty_rows(case)
    if not empty.any():
        return Verdict(Outcome.VACUOUS, "no row of the case is empty")
    judged = 0
    for output in _all_outputs(candidate, case):
        verdict = judge_output(candidate, case, presentation, output)
        if verdict.outcome is Outcome.DECLINED:
            return verdict
        if verdict.outcome is Outcome.VIOLATED and verdict.kind in ("contract", "non-finite", *NO_RESULT):
            return verdict
        if output in ("o", "lse", "dq"):
            judged += int(empty_elements(case, output).sum())
    return Verdict(Outcome.HOLDS, judged=judged) if judged else Verdict(Outcome.VACUOUS, "no element of it is judged")


def shape_and_dtype(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """Every output offered is there, in the right shape and dtype."""
    outputs, profile = _all_outputs(candidate, case), candidate.profile(case.dtype, presentation)
    for output in outputs:
        outcome = _outcome(candidate, case, presentation, (output,))
        if isinstance(outcome, Verdict):
            return outcome
        wrong = check_form(case, output, getattr(outcome.result, output), profile)
        if wrong is not None:
            return wrong
    return Verdict(Outcome.HOLDS, judged=len(outputs)) if outputs else Verdict(Outcome.DECLINED, "it offers no output")


def nan_pattern(candidate: Candidate, case: Case, presentation: Presentation) -> Verdict:
    """NaN and infinity only where the exact answer, rounded, has them."""
    judged = 0
    for output in _all_outputs(candidate, case):
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
        outcome = _outcome(candidate, case, presentation, outputs)
        if isinstance(outcome, Verdict):
            return outcome
        assert outcome.result is not None
        if outcome.result.mutated:
            return violated("mutated", f"it changed its input {', '.join(outcome.result.mutated)}")
    return Verdict(Outcome.HOLDS, judged=1)


_BACK = frozenset({"backward"})

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
    )
}


def applies(prop: Property, candidate: Candidate) -> bool:
    """Whether a candidate offers what a property judges; what it does not offer is shown, not judged."""
    if not set(prop.outputs) & candidate.offers:
        return False
    return not any(need in candidate.lacks for need in prop.needs)
