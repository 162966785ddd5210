"""Campaigns: wrong kernels fall and leave small cases, right ones hold, nothing is swallowed."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import numpy as np
import pytest

from attncheck.fixtures import dumps, loads
from attncheck.kernels.candidate import Candidate, Known, Unsupported
from attncheck.kernels.numpy_blocked import NUMPY_BLOCKED
from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.profile import Conventions
from attncheck.oracle.result import Result
from attncheck.properties import runs
from attncheck.properties.campaign import check, plan_for
from attncheck.properties.catalogue import PROPERTIES
from attncheck.properties.replay import make_record, replay
from attncheck.properties.verdict import Failure, Outcome, Tally

from .faulty import FAULTS, RIGHT, Fault

#: cases per property and dtype that `attncheck verify` draws by default, over four dtypes
DEFAULT = 150


def caught(fault: Fault, seed: int) -> Tally:
    """The first tally with a failure, going through dtypes and properties as verify does."""
    for dtype in fault.dtypes:
        for name in PROPERTIES:
            tally = check(fault.candidate(), name, dtype, examples=DEFAULT, seed=seed)
            if tally.failure is not None:
                return tally
    pytest.fail(f"{fault.name} passes with seed {seed}")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_wrong_kernels_fall_and_their_failures_replay(fault: Fault, seed: int) -> None:
    tally = caught(fault, seed)
    failure = tally.failure
    assert failure is not None
    shape = failure.case.shape
    assert shape[4] <= 5 and shape[5] <= 2 and shape[6] <= 2, f"the failing case is not small: {shape}"
    # saved and read back, it fails in the same way on the wrong kernel, and the right one holds
    record = loads(*dumps(make_record(fault.candidate(), tally)))
    again = replay(record, fault.candidate())
    assert (again.outcome, again.kind) == (Outcome.VIOLATED, failure.verdict.kind)
    assert again.worst == failure.verdict.worst
    assert replay(record, replace(RIGHT, profiles=fault.candidate().profiles)).outcome is Outcome.HOLDS


def test_failing_cases_are_small_in_the_median() -> None:
    shapes = [caught(fault, 0).failure.case.shape for fault in FAULTS.values()]  # type: ignore[union-attr]
    assert statistics.median(s[4] for s in shapes) <= 4
    assert statistics.median(s[5] for s in shapes) <= 2


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("candidate", [NUMPY_BLOCKED, RIGHT], ids=lambda c: c.name)
def test_right_kernels_hold(candidate: Candidate, dtype: str) -> None:
    for name, prop in PROPERTIES.items():
        if prop.every == 1:
            tally = check(candidate, name, dtype, examples=60, seed=11)
            assert tally.failure is None, tally.failure and tally.failure.verdict.sentence
            assert tally.judged > 30 and tally.examples == 60


def with_run(run: object, **changes: object) -> Candidate:
    return replace(NUMPY_BLOCKED, name="probe", run=run, **changes)  # type: ignore[arg-type]


def test_a_kernel_that_fails_only_sometimes_is_said_to() -> None:
    calls = 0

    def sometimes(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        nonlocal calls
        calls += 1
        result = NUMPY_BLOCKED.run(case, presentation, want)
        return replace(result, o=result.o + 1) if calls % 3 == 0 else result  # type: ignore[operator]

    tally = check(with_run(sometimes), "output", "float32", examples=50, seed=0)
    assert tally.failure is not None and 1 < tally.failure.seen < tally.failure.calls
    assert f"in {tally.failure.seen} of 10 calls" in tally.failure.verdict.sentence
    assert tally.failure.case.digest == tally.failure.first, "what fails only sometimes is saved as it was drawn"


def test_exceptions_are_verdicts_and_refusals_are_not() -> None:
    def raises(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        if case.shape[4] > 3:
            raise IndexError("tile 4 is out of range")
        return NUMPY_BLOCKED.run(case, presentation, want)

    def refuses(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        raise Unsupported("only on Tuesdays")

    tally = check(with_run(raises), "output", "float32", examples=50, seed=0)
    assert tally.failure is not None and tally.failure.verdict.kind == "raised"
    assert "IndexError: tile 4 is out of range" in tally.failure.verdict.sentence
    assert tally.failure.case.shape == (1, 1, 1, 1, 4, 1, 1)
    tally = check(with_run(refuses), "output", "float32", examples=20, seed=0)
    assert (tally.judged, tally.declined, tally.reasons) == (0, 20, {"only on Tuesdays": 20})


def test_a_result_that_is_none_is_missing() -> None:
    candidate = with_run(lambda case, presentation, want: Result())
    tally = check(candidate, "output", "float32", examples=5, seed=0)
    assert tally.failure is not None and tally.failure.verdict.kind == "missing"
    candidate = with_run(lambda case, presentation, want: None)
    tally = check(candidate, "output", "float32", examples=5, seed=0)
    assert tally.failure is not None and "returned a NoneType" in tally.failure.verdict.sentence


def test_mutated_inputs_and_missing_outputs_are_seen() -> None:
    def mutates(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        return replace(NUMPY_BLOCKED.run(case, presentation, want), mutated=("q",))

    tally = check(with_run(mutates), "inputs-unchanged", "float32", examples=5, seed=0)
    assert tally.failure is not None and tally.failure.verdict.sentence == "it changed its input q"


def test_what_is_not_offered_is_not_judged() -> None:
    forward = replace(
        NUMPY_BLOCKED, offers=frozenset({"o"}), lacks={"backward": "forward only", "dlse": "forward only"}
    )
    for name, offered in (("output", True), ("lse", False), ("dq", False), ("dlse", False), ("empty-rows", True)):
        tally = check(forward, name, "float32", examples=10, seed=0)
        assert tally.offered is offered and (tally.examples == 10) is offered
    assert not check(replace(forward, dtypes=("float16",)), "output", "float32", examples=5, seed=0).offered


def test_a_wrong_convention_is_a_violation() -> None:
    for conventions, name in (
        (Conventions(empty_row="nan"), "empty-rows"),
        (Conventions(empty_row="mean"), "empty-rows"),
        (Conventions(empty_lse="+inf"), "empty-rows"),
        (Conventions(lse_base="2"), "lse"),
    ):
        tally = check(replace(NUMPY_BLOCKED, conventions=conventions), name, "float32", examples=60, seed=0)
        assert tally.failure is not None, conventions


def test_a_declared_fault_is_shown_as_known_and_an_undeclared_one_still_fails() -> None:
    def wrong(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        result = NUMPY_BLOCKED.run(case, presentation, want)
        off = case.scale == 0 or case.softcap is not None
        return replace(result, o=result.o + 1) if off else result  # type: ignore[operator]

    known = Known(
        properties=("output",),
        dtypes=("float32",),
        when=lambda case, presentation: case.scale == 0,
        reason="scale 0 is taken as the default",
        versions="1.0",
        case="none",
    )
    declared = with_run(wrong, known=(known,))
    tally = check(declared, "output", "float32", examples=DEFAULT, seed=0)
    assert tally.failure is not None and tally.failure.case.softcap is not None and tally.failure.case.scale != 0
    only = with_run(
        lambda c, p, w: wrong(replace(c, softcap=None), p, w), known=(known,), lacks={"softcap": "it has none"}
    )
    tally = check(only, "output", "float32", examples=DEFAULT, seed=0)
    assert tally.failure is None and tally.known > 0
    assert tally.known_reasons == {"scale 0 is taken as the default": tally.known}


def test_a_broken_oracle_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine off by 2^-80 is an error of ours, not a verdict on anyone."""
    engine = runs.exact

    def off(case: Case, **options: object) -> object:
        found = engine(case, **options)  # type: ignore[arg-type]
        return replace(found, o=replace(found.o, lo=found.o.lo + 2.0**-80))

    monkeypatch.setattr(runs, "exact", off)
    for cache in (runs._answers, runs._bounds, runs._outcomes):
        monkeypatch.setattr(cache, "entries", type(cache.entries)())
    monkeypatch.setattr(runs, "_confirmed", set())
    with pytest.raises(runs.OracleError, match="lies outside its enclosure"):
        check(NUMPY_BLOCKED, "output", "float32", examples=200, seed=0)


def test_a_share_of_the_cases_is_computed_twice() -> None:
    tally = check(NUMPY_BLOCKED, "output", "float32", examples=300, seed=0)
    assert 15 <= tally.checked_twice <= 90


def test_a_deadline_stops_early_and_ticks_count() -> None:
    ticks: list[int] = []
    tally = check(NUMPY_BLOCKED, "output", "float32", examples=50, seed=0, tick=ticks.append)
    assert sum(ticks) == tally.examples == 50
    late = check(NUMPY_BLOCKED, "output", "float32", examples=50, seed=0, deadline=time.monotonic() - 1)
    assert late.examples == 1


def test_plans_ask_for_what_the_property_needs() -> None:
    assert plan_for(NUMPY_BLOCKED, PROPERTIES["dlse"], "float32").needs == {"backward", "dlse"}
    assert plan_for(NUMPY_BLOCKED, PROPERTIES["output"], "float32").takes_blocks
    rejects = replace(NUMPY_BLOCKED, conventions=Conventions(empty_row="rejects"))
    assert "empty-row" in plan_for(rejects, PROPERTIES["output"], "float32").avoid


def test_replay_without_a_property_judges_every_output() -> None:
    case = Case(*(np.ones((1, 1, 2, 2), np.float32) for _ in range(3)), do=np.ones((1, 1, 2, 2), np.float32))
    record = loads(*dumps(make_record(NUMPY_BLOCKED, failure_of(case))))
    named = replace(record, seen={})
    assert replay(named, NUMPY_BLOCKED).outcome is Outcome.HOLDS
    wrong = with_run(lambda c, p, w: replace(NUMPY_BLOCKED.run(c, p, w), dv=c.v * 0))
    assert replay(named, wrong).outcome is Outcome.VIOLATED


def failure_of(case: Case) -> Tally:
    wrong = with_run(lambda c, p, w: replace(NUMPY_BLOCKED.run(c, p, w), o=c.v * 0))
    verdict = PROPERTIES["output"].judge(wrong, case, Presentation())
    return Tally("probe", "output", "float32", failure=Failure(case, Presentation(), verdict, case.digest, 10, 10))
