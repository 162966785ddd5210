"""Judge one piece of work and put what came of it into plain data."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attncheck.describe import candidate_as_data, case_as_data, number, worst_as_data
from attncheck.document import placeholder

if TYPE_CHECKING:
    from attncheck.properties.verdict import Tally
    from attncheck.selection import Selection, Work


def judge(
    work: Work, selection: Selection, deadline: float | None = None, tick: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Draw and judge the cases of ``work``; a failing case is saved. Returns a row of the report.

    A disagreement of the two exact engines is no verdict: it is the row's ``error``.
    """
    from attncheck.properties.campaign import check
    from attncheck.properties.runs import OracleError

    facts = candidate_as_data(work.target, work.candidate)
    if not work.property:
        return placeholder(facts)
    row: dict[str, Any] = {"candidate": facts, "property": work.property, "dtype": work.dtype, "error": None}
    try:
        tally = check(
            work.candidate,
            work.property,
            work.dtype,
            examples=work.examples,
            seed=selection.seed,
            deadline=deadline,
            block=selection.block,
            tick=tick,
        )
    except OracleError as error:
        return {**row, "error": f"the two exact engines disagree, which is a fault of attncheck: {error}"}
    return {**row, **tally_as_data(tally), "failure": _failure(tally, work, selection)}


def tally_as_data(tally: Tally) -> dict[str, Any]:
    return {
        "examples": tally.examples,
        "judged": tally.judged,
        "declined": tally.declined,
        "vacuous": tally.vacuous,
        "known": tally.known,
        "elements": tally.elements,
        "at_stake": tally.at_stake,
        "zeros": tally.zeros,
        "weak": tally.weak,
        "checked_twice": tally.checked_twice,
        "worst": worst_as_data(tally.worst),
        "median": number(tally.median),
        "offered": tally.offered,
        "reasons": dict(tally.reasons),
        "known_reasons": dict(tally.known_reasons),
        "leans": {name: {"cases": cases, "mean": mean} for name, (cases, mean) in tally.leans.items()},
        "waived": {entry: list(counts) for entry, counts in tally.waived.items()},
        "seconds": tally.seconds,
    }


def _failure(tally: Tally, work: Work, selection: Selection) -> dict[str, Any] | None:
    failure = tally.failure
    if failure is None:
        return None
    saved, not_saved = _save(tally, work, selection)
    replay = None
    if saved is not None:
        replay = shlex.join(["attncheck", "replay", saved, "--candidate", work.target, *selection.loading_arguments()])
    return {
        "kind": failure.verdict.kind,
        "sentence": failure.verdict.sentence,
        "worst": worst_as_data(failure.verdict.worst),
        "case": case_as_data(failure.case, failure.presentation),
        "first": failure.first,
        "seen": failure.seen,
        "calls": failure.calls,
        "saved": saved,
        "not_saved": not_saved,
        "replay": replay,
    }


def _save(tally: Tally, work: Work, selection: Selection) -> tuple[str | None, str | None]:
    """(path, None), or (None, why the failing case could not be saved)."""
    from attncheck.fixtures import FixtureError, write
    from attncheck.properties.replay import make_record

    try:
        return str(write(make_record(work.candidate, tally), selection.save)), None
    except FixtureError as error:
        return None, str(error)
