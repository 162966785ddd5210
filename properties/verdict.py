"""Verdict: what a property says of a candidate on one case. Tally: what it says over many."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ..oracle.case import Case, Presentation


class Outcome(Enum):
    HOLDS = "holds"
    VIOLATED = "violated"
    DECLINED = "declined"
    VACUOUS = "vacuous"


@dataclass(frozen=True)
class Worst:
    """The element that came nearest to its bound, or passed it.

    ``ratio`` is |got - exact| / allowed; ``parts`` are the named terms whose sum is ``allowed``.
    ``got`` and ``exact`` are decimal strings (a double cannot hold the exact value).
    """

    output: str
    index: tuple[int, ...]
    got: str
    exact: str
    allowed: float
    ratio: float
    parts: tuple[tuple[str, float], ...] = ()


#: what a violation is about: the same word must survive shrinking
KINDS: tuple[str, ...] = (
    *("shape", "dtype", "non-finite", "contract", "bound", "raised", "mutated", "missing", "died"),
    "bias",  # of many cases together: there is nothing to shrink
)


@dataclass(frozen=True)
class Lean:
    """How a case's results lean in one direction: see ``systematic``.

    ``share`` is the share of its ``elements`` on one side of the correctly rounded exact value minus
    the share on the other, ``allowed`` how much of that the accumulator alone may make.
    """

    direction: str
    share: float
    allowed: float
    elements: int


@dataclass(frozen=True)
class Verdict:
    """One property, one candidate, one case.

    ``sentence`` is what a person reads: the violation, or why it was declined or vacuous; "" where
    it holds. ``judged`` counts elements compared, ``worst`` is the worst of them (None for exact
    contracts), ``median`` the median ratio. ``at_stake`` counts the judged elements whose exact value
    is not 0 (nor below what the format resolves), ``zeros`` those of them where 0 would have passed.
    ``leans`` is how the elements lean, where a rounding to storage can be told.
    """

    outcome: Outcome
    sentence: str = ""
    kind: str | None = None
    worst: Worst | None = None
    judged: int = 0
    median: float | None = None
    at_stake: int = 0
    zeros: int = 0
    leans: tuple[Lean, ...] = ()

    def __post_init__(self) -> None:
        violated = self.outcome is Outcome.VIOLATED
        if violated != (self.kind is not None) or (self.kind is not None and self.kind not in KINDS):
            raise ValueError(f"a verdict that is {self.outcome.value} cannot have kind {self.kind!r}")
        if (self.outcome is Outcome.HOLDS) == bool(self.sentence):
            raise ValueError(f"a verdict that is {self.outcome.value} cannot have the sentence {self.sentence!r}")
        if self.outcome is Outcome.HOLDS and self.judged == 0:
            raise ValueError("a verdict cannot hold with nothing judged; it is vacuous")
        if self.worst is not None and self.outcome is Outcome.HOLDS and not self.worst.ratio <= 1:
            raise ValueError(f"a verdict cannot hold with a worst ratio of {self.worst.ratio}")
        if self.outcome in (Outcome.DECLINED, Outcome.VACUOUS) and self.worst is not None:
            raise ValueError(f"a verdict that is {self.outcome.value} judged nothing and has no worst element")


def first_or_worst(verdicts: list[Verdict]) -> Verdict:
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


@dataclass(frozen=True)
class Failure:
    """A violation, shrunk: the smallest case found, how it was presented, and its verdict.

    ``first`` is the digest of the case that was drawn, ``seen`` how many of ``calls`` repeated
    calls violated (a kernel may fail only sometimes).
    """

    case: Case
    presentation: Presentation
    verdict: Verdict
    first: str
    seen: int
    calls: int


@dataclass
class Tally:
    """A property of a candidate in one dtype, over all the cases drawn for it.

    ``judged``, ``declined``, ``vacuous`` and ``known`` count cases; ``elements``, ``at_stake`` and
    ``zeros`` add up the verdicts' counts; ``weak`` counts the cases judged in which 0 would have passed
    in more than half of what is at stake. ``offered`` is False where the candidate has no such
    output at all. ``leans``: direction -> cases that showed how they lean, and their mean.
    ``waived``: entry of a waiver file -> cases that met its condition and hold, and that are violated.
    """

    candidate: str
    property: str
    dtype: str
    examples: int = 0
    judged: int = 0
    declined: int = 0
    vacuous: int = 0
    known: int = 0
    elements: int = 0
    at_stake: int = 0
    zeros: int = 0
    weak: int = 0
    checked_twice: int = 0  # cases whose oracle answer was also computed by the definition
    worst: Worst | None = None
    median: float | None = None  # of the worst ratio per case
    offered: bool = True
    reasons: dict[str, int] = field(default_factory=dict)  # declined or vacuous, by sentence
    known_reasons: dict[str, int] = field(default_factory=dict)
    leans: dict[str, tuple[int, float]] = field(default_factory=dict)
    waived: dict[str, tuple[int, int]] = field(default_factory=dict)
    failure: Failure | None = None
    seconds: float = 0.0
