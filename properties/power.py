"""Detection power: which property catches a planted fault, after how many examples, and how small the case is.

Faults are judged in step: the cases of a plan and a seed are the same for all of them, so a case is
drawn once, and its exact answer and bounds are computed once. Nothing else is shared, and no property
or case is chosen by what a fault is known to break.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..kernels.candidate import Candidate
from ..kernels.faulty import Fault
from ..oracle.case import Case, Presentation
from ..oracle.formats import FORMATS
from .campaign import check, plan_for
from .catalogue import PROPERTIES, Property, applies
from .draws import drawn
from .strategies import Plan
from .systematic import Bets
from .verdict import Outcome

Pair = tuple[Case, Presentation]


@dataclass(frozen=True)
class Shrunk:
    """A failing case after shrinking, by ``reduce`` as `attncheck verify` does it."""

    batch: int
    heads: int
    queries: int
    keys: int
    d: int
    dv: int
    sentence: str

    @property
    def width(self) -> int:
        """The wider of the two head dimensions."""
        return max(self.d, self.dv)


@dataclass(frozen=True)
class Detection:
    """What came of hunting one fault under one seed.

    ``property`` is the first in the catalogue's order that is violated, None where the fault was
    missed. ``examples`` is the least N at which `attncheck verify --examples N` catches it (where
    missed: N itself): cases of one property, dealt out over the dtypes. ``cases`` counts all cases
    judged by then: some properties need cases of their own, with a bias, sinks or an empty row.
    ``seconds`` are of the processor, with the exact answers that other faults then share.
    ``shrunk`` is None where shrinking was not asked for, or where no single case fails again.
    """

    fault: str
    seed: int
    property: str | None
    dtype: str | None
    kind: str | None
    examples: int
    cases: int
    seconds: float
    shrunk: Shrunk | None = None


def hunt(faults: Sequence[Fault], seed: int, *, examples: int, shrink: bool = False) -> Iterator[Detection]:
    """Hunt each fault until its first violation, for at most ``examples`` examples; yields as they are settled.

    Every example is judged by all properties that apply, as `attncheck verify` judges them.
    """
    hunted = [_Hunted.of(fault) for fault in faults]
    stream = Stream(seed)
    number = 0
    while hunted:
        for dtype in FORMATS:
            for one in list(hunted):
                count = one.count(number, dtype)
                if count is None:
                    continue
                if count > examples:
                    hunted.remove(one)
                    yield Detection(one.fault.id, seed, None, None, None, examples, one.cases, one.seconds)
                    continue
                started = time.process_time()
                found = one.judge(stream, number, dtype)
                one.seconds += time.process_time() - started
                if found is None:
                    continue
                hunted.remove(one)
                prop, kind = found
                caught = Detection(one.fault.id, seed, prop, dtype, kind, count, one.cases, one.seconds)
                yield shrunk(one.fault, caught) if shrink else caught
        number += 1


def plans(candidate: Candidate, dtype: str) -> dict[Plan, list[Property]]:
    """What is drawn for a candidate in a dtype, and the properties that judge it, in the catalogue's order."""
    found: dict[Plan, list[Property]] = {}
    for prop in PROPERTIES.values():
        if applies(prop, candidate):
            found.setdefault(plan_for(candidate, prop, dtype), []).append(prop)
    return found


@dataclass
class Stream:
    """The cases of a seed, each plan's in order; only the last of each is kept."""

    seed: int
    drawing: dict[Plan, Iterator[Pair]] = field(default_factory=dict)
    at: dict[Plan, tuple[int, Pair]] = field(default_factory=dict)

    def pair(self, plan: Plan, number: int) -> Pair:
        """Case ``number`` of a plan; no number is asked for after a larger one."""
        stream = self.drawing.setdefault(plan, drawn(plan, self.seed))
        last = self.at[plan][0] if plan in self.at else -1
        for n in range(last + 1, number + 1):
            self.at[plan] = (n, next(stream))
        assert self.at[plan][0] == number
        return self.at[plan][1]


@dataclass(eq=False)
class _Hunted:
    """A fault under one seed: its kernel, what was judged of it and how long that took."""

    fault: Fault
    candidate: Candidate
    plans: dict[str, dict[Plan, list[Property]]]  # by dtype
    bets: dict[tuple[str, str], Bets] = field(default_factory=dict)  # by dtype and property
    cases: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, fault: Fault) -> _Hunted:
        candidate = fault.candidate()
        return cls(fault, candidate, {dtype: plans(candidate, dtype) for dtype in candidate.dtypes})

    def count(self, number: int, dtype: str) -> int | None:
        """The --examples that reach case ``number`` of a dtype; None where the kernel has no such dtype."""
        dtypes = self.candidate.dtypes
        return number * len(dtypes) + dtypes.index(dtype) + 1 if dtype in dtypes else None

    def judge(self, stream: Stream, number: int, dtype: str) -> tuple[str, str | None] | None:
        """The first property that is violated, and how; None where all hold, decline or say nothing."""
        for plan, properties in self.plans[dtype].items():
            due = [prop for prop in properties if number % prop.every == 0]
            if not due:
                continue
            case, presentation = stream.pair(plan, number)
            self.cases += 1
            for prop in due:
                verdict = prop.judge(self.candidate, case, presentation)
                if verdict.outcome is Outcome.VIOLATED:
                    return prop.name, verdict.kind
                if verdict.leans and self.bets.setdefault((dtype, prop.name), Bets()).add(verdict.leans):
                    return prop.name, "bias"
        return None


def shrunk(fault: Fault, caught: Detection) -> Detection:
    """The detection with its failing case shrunk, by the very campaign that `attncheck verify` runs.

    A kernel that fails only sometimes, or after other calls, may pass here: then nothing is shrunk, nor
    where it took many cases together.
    """
    assert caught.property is not None and caught.dtype is not None
    candidate, started = fault.candidate(), time.process_time()
    cases = (caught.examples - 1) // len(candidate.dtypes) + 1
    failure = check(candidate, caught.property, caught.dtype, examples=cases, seed=caught.seed).failure
    seconds = caught.seconds + time.process_time() - started
    if failure is None or failure.seen < failure.calls or failure.verdict.kind == "bias":
        return replace(caught, seconds=seconds)
    b, hq, _, sq, sk, d, dv = failure.case.shape
    return replace(caught, seconds=seconds, shrunk=Shrunk(b, hq, sq, sk, d, dv, failure.verdict.sentence))
