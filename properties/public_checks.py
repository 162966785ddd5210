"""How public test suites check attention kernels, as checkers that run over the same zoo.

Each style is an input law, a plain reference and a comparison with the threshold that suites publish
for it. They are given more credit than they have: every style is run over the same problems
(sizes below, at and beside block sizes, every feature alone and causality with several), forward and
backward, and every output that a kernel returns is compared, the log-sum-exp included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..kernels.candidate import Candidate
from ..oracle.case import Case, Presentation
from ..oracle.formats import FORMATS
from ..oracle.result import GRADIENTS
from ..oracle.visibility import rows_judged
from .asking import all_outputs, ask
from .judge import check_form
from .public_inputs import case_of, problems, references
from .verdict import Outcome, Verdict

Array = np.ndarray
#: (what the kernel returned, the float64 reference, the same-precision run): whether the style is content
Comparison = Callable[[Array, Array, Array], bool]


@dataclass(frozen=True)
class Style:
    """A public habit: ``law`` names the inputs (of LAWS), ``about`` says law and threshold in words.

    ``spares`` are (dtype, output) where its threshold would reject right kernels.
    """

    name: str
    title: str
    about: str
    dtypes: tuple[str, ...]
    law: str
    accepts: Comparison
    spares: frozenset[tuple[str, str]] = frozenset()


def within(absolute: float, relative: float = 0.0) -> Comparison:
    """torch.allclose: |got - right| <= absolute + relative |right|, and no NaN."""

    def accepts(got: Array, right: Array, plain: Array) -> bool:
        return bool((np.abs(got - right) <= absolute + relative * np.abs(right)).all())

    return accepts


def twice_the_error(got: Array, right: Array, plain: Array) -> bool:
    """The largest error is at most twice that of a run in the same precision, and two roundings at 0.3."""
    if not got.size:
        return True
    floor = 2 * np.abs(right.astype(np.float32) + np.float32(0.3) - np.float32(0.3) - right).max()
    return bool(np.abs(got - right).max() <= 2 * np.abs(plain - right).max() + floor)


def cosine(got: Array, right: Array, plain: Array) -> bool:
    """The cosine of the angle between the two outputs, taken as vectors, is above 0.99."""
    if not right.any():
        return not got.any()
    size = math.sqrt(float((got * got).sum())) * math.sqrt(float((right * right).sum()))
    return bool((got * right).sum() > 0.99 * max(size, 1e-8))


def symmetric_difference(got: Array, right: Array, plain: Array) -> bool:
    """1 - 2 x·y / (x·x + y·y) is below 1e-5."""
    size = max(float((got * got + right * right).sum()), 1e-12)
    return bool(1 - 2 * (got * right).sum() / size < 1e-5)


_HALF = ("float16", "bfloat16")

STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        Style(
            "allclose-1e-2",
            "1e-2",
            "randn inputs; float16 and bfloat16; |got - ref| <= 1e-2 + 1e-2 |ref|",
            _HALF,
            "randn",
            within(1e-2, 1e-2),
        ),
        Style(
            "allclose-1e-3",
            "1e-3",
            "randn inputs; float16 and float32; |got - ref| <= 1e-3 + 1e-3 |ref| (gradients in float32 only)",
            ("float16", "float32"),
            "randn",
            within(1e-3, 1e-3),
            frozenset(("float16", name) for name in GRADIENTS),
        ),
        Style(
            "half-randn",
            "tutorial",
            "inputs of standard deviation 0.5; float16; |got - ref| <= 1e-2",
            ("float16",),
            "randn / 2",
            within(1e-2),
        ),
        Style(
            "tenth-randn",
            "0.1 randn",
            "0.1 randn inputs; float16 and bfloat16; |got - ref| <= 1.5e-2",
            _HALF,
            "randn / 10",
            within(1.5e-2),
        ),
        Style(
            "uniform",
            "U[0, 1)",
            "inputs uniform in [0, 1); float16 and float32; |got - ref| <= 1e-2 + 1e-2 |ref|",
            ("float16", "float32"),
            "uniform",
            within(1e-2, 1e-2),
        ),
        Style(
            "twice-the-error",
            "2x error",
            "randn inputs; float16 and bfloat16; largest error <= twice that of a plain run in the same precision, "
            "plus twice the rounding of ref + 0.3 in float32",
            _HALF,
            "randn",
            twice_the_error,
        ),
        Style(
            "cosine", "cosine", "randn inputs; float16 and bfloat16; cosine similarity > 0.99", _HALF, "randn", cosine
        ),
        Style(
            "symmetric-difference",
            "1 - cos",
            "randn inputs; float16 and bfloat16; 1 - 2 x.y / (x.x + y.y) < 1e-5",
            _HALF,
            "randn",
            symmetric_difference,
        ),
        Style(
            "gradcheck",
            "gradcheck",
            "tiny randn inputs in float64; gradients against central differences of the kernel's own output, "
            "step 1e-6, |got - ref| <= 1e-5 + 1e-3 |ref|",
            ("float64",),
            "tiny",
            within(1e-5, 1e-3),
        ),
    )
}


# -- the checks ------------------------------------------------------------------------------------


def caught_by(candidate: Candidate) -> dict[str, str | None]:
    """Style -> the first problem and output that it rejects, None where it is content with the kernel."""
    found: dict[str, str | None] = dict.fromkeys(STYLES)
    for law in dict.fromkeys(style.law for style in STYLES.values()):
        for dtype in FORMATS:
            styles = [s for s in STYLES.values() if s.law == law and dtype in s.dtypes and dtype in candidate.dtypes]
            check = _gradcheck if law == "tiny" else _against_reference
            for problem in range(len(problems(law))):
                undecided = [s for s in styles if found[s.name] is None]
                if undecided:
                    found.update(check(candidate, undecided, problem, law, dtype))
    return found


def _outputs(candidate: Candidate, case: Case, presentation: Presentation) -> dict[str, Array] | str | None:
    """What it returned; why a test would fail before it compares; None where the kernel declines."""
    names = all_outputs(candidate, case)
    outcome = ask(candidate, case, presentation, names, again=True)
    if isinstance(outcome, Verdict):
        return outcome.sentence if outcome.outcome is Outcome.VIOLATED else None
    profile = candidate.profile(case.dtype, presentation)
    for name in names:
        wrong = check_form(case, name, getattr(outcome.result, name), profile)
        if wrong is not None:
            return wrong.sentence
    return {name: getattr(outcome.result, name).astype(np.float64) for name in names}


def _against_reference(
    candidate: Candidate, styles: list[Style], problem: int, law: str, dtype: str
) -> Iterator[tuple[str, str]]:
    case, spec = case_of(problem, law, dtype), problems(law)[problem]
    got = _outputs(candidate, case, spec.presentation)
    if got is None:
        return
    if isinstance(got, str):
        yield from ((style.name, f"{spec.name}, {dtype}: {got}") for style in styles)
        return
    right, plain = references(problem, law, dtype)
    for style in styles:
        for name, x in got.items():
            if (dtype, name) in style.spares:
                continue
            if not _content(style, case, name, x, right[name], plain[name]):
                yield style.name, f"{spec.name}, {dtype}: {name}"
                break


def _content(style: Style, case: Case, name: str, got: Array, right: Array, plain: Array) -> bool:
    """Whether a style accepts an output: rows of padding left out, infinities where the reference has them."""
    if name in ("o", "lse", "dq"):
        rows = np.broadcast_to(rows_judged(case)[:, None], case.q.shape[:3])
        got, right, plain = got[rows], right[rows], plain[rows]
    infinite = np.isinf(right)
    if (got[infinite] != right[infinite]).any():
        return False
    with np.errstate(all="ignore"):
        return style.accepts(got[~infinite], right[~infinite], plain[~infinite])


#: the step of the differences, as torch.autograd.gradcheck has it
STEP = 1e-6


def _gradcheck(
    candidate: Candidate, styles: list[Style], problem: int, law: str, dtype: str
) -> Iterator[tuple[str, str]]:
    case, spec = case_of(problem, law, dtype), problems(law)[problem]
    got = _outputs(candidate, case, spec.presentation)
    if got is None:
        return
    for style in styles:
        if isinstance(got, str):
            yield style.name, f"{spec.name}: {got}"
            continue
        for name in ("q", "k", "v", "bias"):
            if f"d{name}" in got:
                numeric = _differences(candidate, case, spec.presentation, name)
                if not style.accepts(got[f"d{name}"], numeric, numeric):
                    yield style.name, f"{spec.name}: d{name}"
                    break


def _differences(candidate: Candidate, case: Case, presentation: Presentation, name: str) -> Array:
    """Central differences of sum(dO * O) by the elements of an input, from the kernel's forward pass."""
    x: Array = getattr(case, name)
    assert case.do is not None
    do = np.where(rows_judged(case)[:, None, :, None], case.do, 0)
    gradient = np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        ends = []
        for step in (STEP, -STEP):
            moved = x.copy()
            moved[at] += step
            changes: dict[str, Any] = {"do": None, name: moved}
            o = _outputs(candidate, replace(case, **changes), presentation)
            if not isinstance(o, dict) or "o" not in o:
                return np.full(x.shape, np.nan)
            ends.append(float((o["o"] * do).sum()))
        gradient[at] = (ends[0] - ends[1]) / (2 * STEP)
    return gradient
