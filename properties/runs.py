"""Answers and results, computed once per case and shared by the properties."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import mpmath

from ..kernels.candidate import Candidate, Unsupported
from ..kernels.isolated import Died
from ..oracle.bounds import Bound, bounds
from ..oracle.case import Case, Presentation
from ..oracle.definition import EXTRA_BITS, Definition, define
from ..oracle.enclosure import Enclosed, Exact, exact
from ..oracle.precision import TARGET_BITS, working_bits
from ..oracle.profile import Profile
from ..oracle.result import OUTPUTS, Result

T = TypeVar("T")

#: entries kept of each kind; a case of the default draws holds some 50 KB with its bounds
CACHED = 2048


class OracleError(Exception):
    """The two exact engines disagree: an error of ours, never of a candidate."""


@dataclass(frozen=True)
class Outcome:
    """What came of calling a candidate: a result, or why it declined, what it raised, how it died."""

    result: Result | None = None
    declined: str | None = None
    raised: str | None = None
    died: str | None = None


class _Cache:
    """The most recently used answers."""

    def __init__(self) -> None:
        self.entries: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key in self.entries:
            self.entries.move_to_end(key)
        else:
            self.entries[key] = compute()
            if len(self.entries) > CACHED:
                self.entries.popitem(last=False)
        found: T = self.entries[key]
        return found


_answers, _bounds, _outcomes = _Cache(), _Cache(), _Cache()
_confirmed: set[str] = set()  # digests whose answer the definition has confirmed


def answer(case: Case, target: int = TARGET_BITS) -> Exact:
    """The exact answer of a case, from the certified engine."""
    return _answers.get((case.digest, target), lambda: exact(case, target=target))


def allowed(case: Case, profile: Profile, target: int = TARGET_BITS) -> dict[str, Bound]:
    """The bounds of a case under a profile."""
    return _bounds.get((case.digest, profile, target), lambda: bounds(case, answer(case, target), profile))


def call(candidate: Candidate, case: Case, presentation: Presentation, want: frozenset[str]) -> Outcome:
    """Run a candidate, once per (case, presentation, want). Whatever it does, no exception leaves here."""
    # the candidate is part of the entry, so that its id stays its own
    key = (id(candidate), case.digest, presentation, want)
    return _outcomes.get(key, lambda: (_call(candidate, case, presentation, want), candidate))[0]


def call_again(candidate: Candidate, case: Case, presentation: Presentation, want: frozenset[str]) -> Outcome:
    """Run a candidate now, whatever it returned before."""
    return _call(candidate, case, presentation, want)


def forget(candidate: Candidate) -> None:
    """Drop what a candidate returned, so that the next judgement calls it again."""
    for key in [k for k in _outcomes.entries if k[0] == id(candidate)]:  # type: ignore[index]
        del _outcomes.entries[key]


def _call(candidate: Candidate, case: Case, presentation: Presentation, want: frozenset[str]) -> Outcome:
    try:
        result = candidate.run(case, presentation, want)
    except (Unsupported, NotImplementedError) as refusal:
        return Outcome(declined=str(refusal) or type(refusal).__name__)
    except Died as death:
        return Outcome(died=str(death))
    except Exception as error:  # a kernel's exception is a verdict, not ours to raise
        lines = str(error).strip().splitlines() or [""]
        return Outcome(raised=f"{type(error).__name__}: {lines[0][:300]}")
    if not isinstance(result, Result):
        return Outcome(raised=f"it returned a {type(result).__name__} where a Result is wanted")
    return Outcome(result=result)


# -- the second engine --------------------------------------------------------------------------

#: one case in this many of the small ones is also computed by the definition
SHARE = 8
#: what "small" is: pairs times channels, about 10 ms of mpmath
SMALL = 600


def confirm(case: Case, *, always: bool = False) -> bool:
    """Compute a share of the small cases by the definition too; True where this case was one.

    The share is chosen by the case's digest, so it does not depend on the order of the draws;
    ``always``: every case that the definition can do in a second or two. Raises OracleError where
    the definition lies outside the enclosure.
    """
    b, hq, _, sq, sk, d, dv = case.shape
    work = b * hq * sq * sk * (d + dv)
    if work > (SMALL * 200 if always else SMALL) or (not always and int(case.digest[:8], 16) % SHARE):
        return False
    if case.digest not in _confirmed:
        compare_engines(case)
        _confirmed.add(case.digest)
    return True


def compare_engines(case: Case) -> None:
    """Raise OracleError, naming output and element, unless the definition lies in the enclosure.

    The definition carries no radius. Where values cancel, a ball can be narrower than the
    definition's own rounding, so one that lies outside is computed again with more bits.
    """
    bits = working_bits(case) + EXTRA_BITS
    for more in (1, 2, 4):
        outside = _outside(answer(case), define(case, more * bits))
        if outside is None:
            return
    raise OracleError(f"{outside} of case {case.digest[:12]} lies outside its enclosure")


def _outside(enclosed: Exact, defined: Definition) -> str | None:
    """The first output and element of the definition that lies outside the enclosure."""
    for name in OUTPUTS:
        balls, numbers = getattr(enclosed, name), getattr(defined, name)
        if (balls is None) != (numbers is None):
            return f"{name} is there in one engine only, which"
        if balls is None:
            continue
        for at in range(numbers.size):
            if not _inside(balls, numbers.ravel()[at], at):
                return f"{name}: element {at}"
    return None


def _inside(balls: Enclosed, number: Any, at: int) -> bool:
    hi, lo, rad = (float(x.ravel()[at]) for x in (balls.hi, balls.lo, balls.rad))
    if mpmath.isinf(number):
        return hi == float(number)
    if not mpmath.isfinite(hi):
        return bool(abs(number) >= mpmath.mpf(2) ** 1023 and (number > 0) == (hi > 0))
    # exact: the context of this comparison holds every bit of the four numbers
    with mpmath.workprec(6000):
        return bool(abs(mpmath.mpf(number) - hi - lo) <= rad)
