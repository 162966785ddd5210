"""Comparing a candidate with itself: what a metamorphic property claims, and its verdict.

A claim says of one output that what one call returned is what another call leads one to expect. A
right kernel is within its bound on either call, so the two may differ by the sum of both bounds
(and the rounding of what is expected, where it was computed); where exactness is owed, by nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..kernels.candidate import Candidate
from ..oracle.bounds import Bound
from ..oracle.case import Case, Presentation
from ..oracle.formats import format_of
from ..oracle.visibility import empty_rows
from . import runs
from .asking import all_outputs, ask
from .judge import (
    FORMING,
    GRADIENTS_OVER_ROWS,
    TITLES,
    check_form,
    judged_elements,
    reached_by_empty_rows,
    violated,
)
from .verdict import Outcome, Verdict, Worst

Array = np.ndarray
Move = Callable[[Array], Array]

LOG_2 = float(np.log(2.0))


@dataclass(frozen=True, eq=False)
class Side:
    """What a candidate returned for a case: ``arrays`` by output, and what may be expected of them."""

    candidate: Candidate
    case: Case
    presentation: Presentation
    arrays: dict[str, Array]

    def __contains__(self, output: str) -> bool:
        return output in self.arrays

    def got(self, output: str) -> Array:
        """An output as float64, the log-sum-exp as a natural logarithm."""
        wide = self.arrays[output].astype(np.float64)
        return wide * LOG_2 if output == "lse" and self.candidate.conventions.lse_base == "2" else wide

    @cached_property
    def bounds(self) -> dict[str, Bound]:
        return runs.allowed(self.case, self.candidate.profile(self.case.dtype, self.presentation))

    def allowed(self, output: str) -> Array:
        return self.bounds[output].allowed

    @cached_property
    def empty(self) -> Array:
        """Judged rows that see no key, [B, Hq, Sq]."""
        return empty_rows(self.case)

    def judged(self, output: str) -> Array:
        """Where an output is judged: not in padding, nor in empty rows and what their declared value reaches."""
        elements = judged_elements(self.case, output)
        if not self.empty.any():
            return elements
        if output in ("o", "lse", "dq"):
            elements = elements & ~(self.empty if output == "lse" else self.empty[..., None])
        if output in GRADIENTS_OVER_ROWS and self.candidate.conventions.empty_row != "zero":
            elements = elements & ~reached_by_empty_rows(self.case, output)
        return np.asarray(elements)

    def vacuous(self, output: str) -> Array:
        return self.bounds[output].vacuous

    def overflow(self, output: str) -> Array:
        return self.bounds[output].overflow


def call(
    candidate: Candidate,
    case: Case,
    presentation: Presentation,
    outputs: tuple[str, ...] | None = None,
    *,
    again: bool = False,
) -> Side | Verdict:
    """Call a candidate for ``outputs`` (None: all it offers), or the verdict where there is nothing to compare."""
    outputs = all_outputs(candidate, case) if outputs is None else outputs
    outputs = tuple(x for x in outputs if x in all_outputs(candidate, case))
    if not outputs:
        return Verdict(Outcome.DECLINED, "it offers none of the outputs that are compared")
    for known in candidate.known:
        # a waiver is for the properties that it names, these among them; it takes no case from any
        if not known.entry and case.dtype in known.dtypes and known.when(case, presentation):
            return Verdict(Outcome.VACUOUS, f"a declared fault is in the way: {known.reason}")
    found = ask(candidate, case, presentation, outputs, again=again)
    if isinstance(found, Verdict):
        return found
    profile = candidate.profile(case.dtype, presentation)
    for output in outputs:
        wrong = check_form(case, output, getattr(found.result, output), profile)
        if wrong is not None:
            return wrong
    return Side(candidate, case, presentation, {x: getattr(found.result, x) for x in outputs})


@dataclass(frozen=True, eq=False)
class Claim:
    """``got`` is ``expected`` (float64 arrays of one shape) where ``judged``, up to ``allowed()``.

    ``allowed`` gives the largest difference and where the comparison says nothing. It is only
    evaluated where the two differ: bounds cost more than calls.
    """

    output: str
    got: Array
    expected: Array
    judged: Array
    allowed: Callable[[], tuple[Array, Array]]
    largest: float = field(default=np.inf)  # of the output's format


def same(
    output: str, a: Side, b: Side, *, move: Move = np.asarray, factor: float = 1.0, shift: Array | float = 0.0
) -> Claim:
    """b's output is ``move`` (a selection, reordering or sum of elements) of a's, times ``factor``, plus ``shift``."""
    with np.errstate(all="ignore"):
        expected = move(a.got(output)) * factor + shift

    def allowed() -> tuple[Array, Array]:
        forming = FORMING * (abs(factor) * move(np.abs(a.got(output))) + np.abs(shift))
        most = b.allowed(output) + abs(factor) * move(a.allowed(output)) + forming
        return most, b.vacuous(output) | any_of(move, a.vacuous(output))

    judged = b.judged(output) & ~any_of(move, ~a.judged(output))
    return Claim(output, b.got(output), expected, judged, allowed, _largest(b, output))


def identical(output: str, a: Side, b: Side, *, move: Move = np.asarray) -> Claim:
    """b's output holds the very numbers of a's (NaN equal to itself, -0 to 0), overflow or not."""

    def allowed() -> tuple[Array, Array]:
        return np.zeros(np.shape(b.arrays[output])), np.zeros(np.shape(b.arrays[output]), dtype=bool)

    judged = b.judged(output) & ~any_of(move, ~a.judged(output))
    return Claim(output, b.got(output), move(a.got(output)), judged, allowed, _largest(b, output))


def to(output: str, b: Side, expected: Array | float, where: Array | None = None) -> Claim:
    """b's output is ``expected``, the exact answer there, up to its own bound."""
    got, judged = b.got(output), b.judged(output)
    return Claim(
        output,
        got,
        np.broadcast_to(np.asarray(expected, dtype=np.float64), got.shape),
        judged if where is None else judged & where,
        lambda: (b.allowed(output), b.vacuous(output)),
        _largest(b, output),
    )


def any_of(move: Move, flags: Array) -> Array:
    """Where a moved element comes from one that is flagged."""
    return np.asarray(move(flags.astype(np.float64)) > 0)


def _largest(side: Side, output: str) -> float:
    fmt = format_of(side.arrays[output].dtype)
    return fmt.max * (1 + fmt.unit / 2)


def agree(what: str, claims: Iterable[Claim], than: str = "expected") -> Verdict:
    """The verdict on claims: the first that fails, or all that was compared.

    ``what`` says what was done to the case, ``than`` what the expected value is; both are printed.
    """
    count, worst, medians = 0, None, []
    for claim in claims:
        verdict = _judge(what, than, claim)
        if isinstance(verdict, Verdict):
            return verdict
        judged, found, median = verdict
        count += judged
        if found is not None:
            medians.append(median)
            worst = found if worst is None or found.ratio > worst.ratio else worst
    if not count:
        return Verdict(Outcome.VACUOUS, "no element is compared: the bounds say nothing or there is none")
    return Verdict(Outcome.HOLDS, worst=worst, judged=count, median=max(medians, default=None))


def _judge(what: str, than: str, claim: Claim) -> Verdict | tuple[int, Worst | None, float]:
    """A violation, or how many elements were compared, the worst of them and the median ratio."""
    got, expected, live = claim.got, claim.expected, claim.judged
    alike = (got == expected) | (np.isnan(got) & np.isnan(expected))
    if (alike | ~live).all():
        return int(live.sum()), None, 0.0
    with np.errstate(all="ignore"):
        allowed, vacuous = claim.allowed()
        live = live & ~vacuous & ~np.isnan(allowed)
        # an infinity is right where the other side comes within its bound of the largest number
        reaches = np.minimum(np.abs(got), np.abs(expected)) + allowed >= claim.largest
        live = live & (alike | ~((np.isinf(got) | np.isinf(expected)) & reaches))
        off = np.where(alike, 0.0, np.abs(got - expected))
        ratio = np.where(off == 0, 0.0, off * (1 - FORMING) / allowed)
    bad = live & ~alike & ~np.isfinite(off)
    if bad.any():
        at = tuple(int(n) for n in np.argwhere(bad)[0])
        return violated("non-finite", _sentence(what, than, claim, at))
    ratio = np.where(live, ratio, 0.0)
    if not live.any():
        return 0, None, 0.0
    at = tuple(int(n) for n in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    most = float(allowed[at])
    if ratio[at] > 1 and most == 0:
        return violated("contract", _sentence(what, than, claim, at))
    worst = Worst(
        claim.output, at, str(got[at]), str(expected[at]), most, float(ratio[at]), (("bounds of both sides", most),)
    )
    median = float(np.median(ratio[live]))
    if worst.ratio <= 1:
        return int(live.sum()), worst if most > 0 else None, median
    sentence = f"{_sentence(what, than, claim, at)} (allowed ±{most:.2g}, ratio {worst.ratio:.2g})"
    return violated("bound", sentence, worst=worst, judged=int(live.sum()), median=median)


def _sentence(what: str, than: str, claim: Claim, at: tuple[int, ...]) -> str:
    return f"{what}: {TITLES[claim.output]}: got {claim.got[at]}, {than} {claim.expected[at]}, at {list(at)}"
