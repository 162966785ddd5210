"""A campaign: one property of one candidate in one dtype, over many drawn cases."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np

from ..kernels.candidate import Candidate, Known
from ..oracle.case import LAYOUTS, Case, Presentation
from . import runs
from .catalogue import PROPERTIES, Property, applies
from .draws import drawn
from .reduce import reduce
from .strategies import Plan
from .systematic import Bets
from .verdict import Failure, Outcome, Tally, Verdict

#: how often a failing case is judged again, to tell a kernel that fails only sometimes
CALLS = 10
OracleError = runs.OracleError


def plan_for(candidate: Candidate, prop: Property, dtype: str, block: tuple[int, ...] | None = None) -> Plan:
    """What to draw: what the property needs, nothing that the candidate declares it lacks."""
    avoid = set(candidate.lacks) - {"backward"}
    if candidate.conventions.empty_row == "rejects":
        avoid.add("empty-row")
    needs = set(prop.needs)
    if "backward" not in candidate.lacks and candidate.offers & {"dq", "dk", "dv"}:
        needs.add("backward")  # the same cases for forward and backward properties: one oracle answer serves all
    else:
        avoid.add("backward")
    return Plan(
        dtype=dtype,
        needs=frozenset(needs),
        avoid=frozenset(avoid),
        blocks=block or candidate.blocks,
        takes_blocks=candidate.takes_blocks,
        # strided and poisoned memory only for those who promise to answer it as they answer plain memory
        takes_layouts=candidate.takes_layouts >= set(LAYOUTS)
        and candidate.promises >= {"layout-invariant", "padding-not-read"},
        takes_pages=candidate.takes_pages,
        takes_packed=candidate.takes_packed,
    )


def check(
    candidate: Candidate,
    name: str,
    dtype: str,
    *,
    examples: int,
    seed: int,
    deadline: float | None = None,
    block: tuple[int, ...] | None = None,
    tick: Callable[[int], None] | None = None,
) -> Tally:
    """Judge ``examples`` drawn cases, or as few of them as the property takes (``every``).

    Stops at the first violation that is not known, and shrinks it; or where the results of all cases
    so far lean to one side (``systematic``).
    ``deadline`` is a time.monotonic() at which to stop, after one case at least; ``tick`` is called with 1 after each
    case. Raises OracleError where the two exact engines disagree.
    """
    prop = PROPERTIES[name]
    tally = Tally(candidate.name, name, dtype)
    started = time.monotonic()
    if not applies(prop, candidate) or dtype not in candidate.dtypes:
        tally.offered = False
        return tally
    worsts: list[float] = []
    bets = Bets()
    for case, presentation in islice(drawn(plan_for(candidate, prop, dtype, block), seed), 0, examples, prop.every):
        if deadline is not None and tally.examples and time.monotonic() > deadline:
            break
        tally.checked_twice += runs.confirm(case)
        verdict = prop.judge(candidate, case, presentation)
        if not _add(tally, candidate, case, presentation, verdict, worsts):
            tally.failure = _failure(candidate, prop, case, presentation, verdict)
            break
        # a case with a declared fault tells nothing of how right results lean
        ours = verdict.leans and known_fault(candidate, name, case, presentation) is None
        if ours and bets.add(verdict.leans, of=(case, presentation)):
            tally.failure = _leaning(bets, prop)
            break
        if tick is not None:
            tick(1)
    tally.leans = bets.means()
    tally.median = float(np.median(worsts)) if worsts else None
    tally.seconds = time.monotonic() - started
    return tally


def _add(
    tally: Tally, candidate: Candidate, case: Case, presentation: Presentation, verdict: Verdict, worsts: list[float]
) -> bool:
    """Count a verdict; False where it is a violation that nobody has declared."""
    tally.examples += 1
    if verdict.outcome is Outcome.VIOLATED:
        known = known_fault(candidate, tally.property, case, presentation)
        if known is None:
            return False
        _waive(tally, known, violated=True)
        tally.known += 1
        tally.known_reasons[known.reason] = tally.known_reasons.get(known.reason, 0) + 1
        return True
    if verdict.outcome is Outcome.HOLDS:
        tally.judged += 1
        for known in candidate.known:
            if known.entry and _concerns(known, tally.property, case, presentation):
                _waive(tally, known, violated=False)
        tally.elements += verdict.judged
        tally.at_stake += verdict.at_stake
        tally.zeros += verdict.zeros
        tally.weak += 2 * verdict.zeros > verdict.at_stake
        if verdict.worst is not None:
            worsts.append(verdict.worst.ratio)
            if tally.worst is None or verdict.worst.ratio > tally.worst.ratio:
                tally.worst = verdict.worst
        return True
    tally.reasons[verdict.sentence] = tally.reasons.get(verdict.sentence, 0) + 1
    if verdict.outcome is Outcome.DECLINED:
        tally.declined += 1
    else:
        tally.vacuous += 1
    return True


def known_fault(candidate: Candidate, name: str, case: Case, presentation: Presentation) -> Known | None:
    """The declared fault that a violation belongs to, if there is one."""
    for known in candidate.known:
        if _concerns(known, name, case, presentation):
            return known
    return None


def _concerns(known: Known, name: str, case: Case, presentation: Presentation) -> bool:
    return name in known.properties and case.dtype in known.dtypes and known.when(case, presentation)


def _waive(tally: Tally, known: Known, *, violated: bool) -> None:
    """Count a case that meets the condition of a waiver."""
    if known.entry:
        held, against = tally.waived.get(known.entry, (0, 0))
        tally.waived[known.entry] = (held, against + 1) if violated else (held + 1, against)


def _failure(candidate: Candidate, prop: Property, case: Case, presentation: Presentation, verdict: Verdict) -> Failure:
    """Judge the case again, shrink it while it fails in the same way, and judge what is left."""
    # each call of a kernel that dies costs a new process, and of one that hangs the whole time limit
    calls, limit = (2, 20) if verdict.kind == "died" else (CALLS, 800)
    seen = 1
    for _ in range(calls - 1):
        runs.forget(candidate)
        seen += prop.judge(candidate, case, presentation).outcome is Outcome.VIOLATED
    first = case.digest
    if seen == calls:
        case, presentation = reduce(case, presentation, _still_fails(candidate, prop, verdict), limit=limit)
        verdict = prop.judge(candidate, case, presentation)
        runs.confirm(case, always=True)  # nobody is accused on the word of one engine
    else:
        verdict = replace(verdict, sentence=f"{verdict.sentence}, in {seen} of {calls} calls")
    return Failure(case, presentation, verdict, first=first, seen=seen, calls=calls)


def _leaning(bets: Bets, prop: Property) -> Failure:
    """A violation by all the cases together: there is none to shrink, and the one that leans the most is saved."""
    case, presentation = bets.most[bets.strongest][2]
    verdict = Verdict(Outcome.VIOLATED, bets.sentence(prop.title), "bias")
    return Failure(case, presentation, verdict, first=case.digest, seen=1, calls=1)


def _still_fails(candidate: Candidate, prop: Property, first: Verdict) -> Callable[[Case, Presentation], bool]:
    def fails(case: Case, presentation: Presentation) -> bool:
        verdict = prop.judge(candidate, case, presentation)
        if verdict.outcome is not Outcome.VIOLATED or verdict.kind != first.kind:
            return False
        # shrinking must not slip from a new fault into one that is declared
        return known_fault(candidate, prop.name, case, presentation) is None

    return fails
