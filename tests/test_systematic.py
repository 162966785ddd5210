"""Systematic error: the rate of false alarms, right kernels that pass, and leaning ones that fall."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import ml_dtypes
import numpy as np
import pytest

from attncheck.fixtures import dumps, loads
from attncheck.kernels import numpy_blocked
from attncheck.kernels.candidate import Candidate, Known
from attncheck.kernels.numpy_blocked import NUMPY_BLOCKED, candidate
from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.enclosure import Enclosed
from attncheck.oracle.formats import FORMATS
from attncheck.oracle.profile import default_profile
from attncheck.oracle.result import GRADIENTS, Result
from attncheck.properties.campaign import check, plan_for
from attncheck.properties.catalogue import PROPERTIES
from attncheck.properties.draws import drawn
from attncheck.properties.replay import make_record, replay
from attncheck.properties.systematic import DIRECTIONS, MARGIN, RATE, STAKES, Bets, leaning_profile, rounded
from attncheck.properties.verdict import Lean, Outcome

from .faulty import RIGHT

Array = np.ndarray

ROUNDS_P = candidate(round_p=True, name="rounds P")
WIDE = candidate(accumulator="float64", round_p=True, name="float64 inside")


# -- the bets -------------------------------------------------------------------------------------


def alarms(rate: float, runs: int, cases: int, share: Callable[[np.random.Generator, list[float]], float]) -> int:
    """How many of the runs accuse a kernel whose cases lean as ``share`` of the past ones says."""
    found = 0
    for run in range(runs):
        rng, past, bets = np.random.default_rng(run), [0.0], Bets(rate=rate * len(DIRECTIONS))
        for _ in range(cases):
            past.append(share(rng, past))
            # one direction of all: the wealth that the others would hold is given back through the rate
            if bets.add((Lean("up", past[-1], 0.05, 1),)):
                found += 1
                break
    return found


def as_far_as_allowed(rng: np.random.Generator, past: list[float]) -> float:
    """All elements of a case on one side, and the mean exactly where the hypothesis ends."""
    return 1.0 if rng.random() < (1 + MARGIN + 0.05) / 2 else -1.0


def wilder_after_a_win(rng: np.random.Generator, past: list[float]) -> float:
    """The same mean, by another law after each win: the cases are not independent."""
    fair = MARGIN + 0.05
    if past[-1] <= 0:
        return fair
    return 1.0 if rng.random() < (1 + fair) / 2 else -1.0


@pytest.mark.parametrize("share", [as_far_as_allowed, wilder_after_a_win])
def test_false_alarms_stay_below_the_stated_rate_where_it_is_large_enough_to_be_measured(
    share: Callable[[np.random.Generator, list[float]], float],
) -> None:
    runs, rate = 400, 0.1
    # five standard deviations of a count above it
    most = rate * runs + 5 * math.sqrt(rate * (1 - rate) * runs)
    assert alarms(rate, runs, 60, share) <= most
    # the count can pass the limit: the same runs at twice the share of the outcomes that are allowed
    assert alarms(rate, runs, 60, lambda rng, past: 1.0 if rng.random() < (1 + 0.5) / 2 else -1.0) > most


def test_no_bet_can_lose_more_than_it_has_and_a_fair_one_wins_nothing() -> None:
    for allowed in (0.0, 0.3, 1.0):
        fair = MARGIN + allowed
        for stake in STAKES:
            up, down = (1 + stake * (z - fair) / (1 + fair) for z in (1.0, -1.0))
            assert up > 0 and down > 0
            chance = (1 + min(fair, 1.0)) / 2  # of +1, so that the mean is what is allowed
            assert chance * up + (1 - chance) * down <= 1 + 2.0**-50


def test_the_wealth_is_the_mean_of_its_bets() -> None:
    bets = Bets()
    assert not bets.add((Lean("out", -0.6, 0.1, 3),)) and not bets.add((Lean("out", -0.2, 0.0, 5),))
    expected = (2 * len(DIRECTIONS) - 2) * len(STAKES)  # those without a case hold 1
    for side in (1, -1):
        for stake in STAKES:
            first = 1 + stake * (side * -0.6 - MARGIN - 0.1) / (1 + MARGIN + 0.1)
            expected += first * (1 + stake * (side * -0.2 - MARGIN) / (1 + MARGIN))
    assert math.exp(bets.log_wealth) == pytest.approx(expected / (2 * len(DIRECTIONS) * len(STAKES)), rel=2.0**-40)
    assert bets.strongest == ("out", -1) and bets.means()["out"] == (2, pytest.approx(-0.4))


# -- the pieces -----------------------------------------------------------------------------------


def enclosed(hi: Array, lo: float = 0.0, rad: float = 0.0) -> Enclosed:
    return Enclosed(hi, np.full_like(hi, lo), np.full_like(hi, rad))


@pytest.mark.parametrize("name", FORMATS)
def test_exact_values_are_rounded_as_the_format_rounds(name: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(4000) * 2.0 ** rng.integers(0, 8, 4000)
    x = x[np.abs(x) > 2.0**-8]  # normal numbers of every format
    if name == "bfloat16":  # its cast from float64 goes through float32
        x = x.astype(np.float32).astype(np.float64)
    ties = 1 + np.arange(1, 40) * FORMATS[name].unit
    for values in (x, ties, -ties):
        expected = values.astype(FORMATS[name].dtype).astype(np.float64)
        assert np.array_equal(rounded(enclosed(values), FORMATS[name]), expected)


def test_what_is_left_of_an_exact_value_decides_a_tie_and_its_radius_does_not() -> None:
    tie, fmt = np.array([1 + 2.0**-8]), FORMATS["bfloat16"]
    up = float(np.asarray(1.0, ml_dtypes.bfloat16)) + 2.0**-7
    assert rounded(enclosed(tie), fmt)[0] == 1.0
    assert rounded(enclosed(tie, lo=2.0**-70, rad=2.0**-100), fmt)[0] == up
    assert rounded(enclosed(tie, lo=2.0**-100, rad=2.0**-70), fmt)[0] == 1.0


def test_what_may_lean_is_the_profile_without_its_roundings_to_nearest() -> None:
    half, wide = default_profile("bfloat16"), FORMATS["float32"]
    leaning = leaning_profile(half, FORMATS["bfloat16"])
    assert leaning is not None and (leaning.storage, leaning.u_p, leaning.u_exp) == ("float32", 0.0, half.u_exp)
    cut = leaning_profile(replace(half, u_p=2 * half.u_p), FORMATS["bfloat16"])
    assert cut is not None and cut.u_p == 2 * half.u_p  # declared: P may be truncated
    assert leaning_profile(half, wide) is None and leaning_profile(default_profile("float32"), wide) is None


# -- kernels --------------------------------------------------------------------------------------


def hunt(candidate: Candidate, name: str, dtype: str, examples: int, seed: int = 0) -> tuple[int | None, Bets]:
    """The case at which the results that hold are seen to lean (None: they are not), and the bets."""
    prop, bets = PROPERTIES[name], Bets()
    for n, (case, presentation) in enumerate(islice(drawn(plan_for(candidate, prop, dtype), seed), examples)):
        verdict = prop.judge(candidate, case, presentation)
        if verdict.leans and bets.add(verdict.leans, of=n):
            return n + 1, bets
    return None, bets


RIGHT_ONES = (
    (ROUNDS_P, ("output", "dq", "dk", "dv"), "bfloat16"),
    (ROUNDS_P, ("dv",), "float16"),
    (NUMPY_BLOCKED, ("output", "dq"), "bfloat16"),
    (WIDE, ("output", "lse"), "float32"),
    (RIGHT, ("output", "dk"), "float16"),
)


@pytest.mark.parametrize(("right", "names", "dtype"), RIGHT_ONES, ids=lambda x: getattr(x, "name", None))
def test_right_kernels_do_not_lean(right: Candidate, names: tuple[str, ...], dtype: str) -> None:
    for name in names:
        found, bets = hunt(right, name, dtype, 120, seed=1)
        assert found is None
        assert bets.means()["out"][0] >= 15  # and something was looked at
        # far from an alarm: a tenth of the way, on the scale of logarithms
        assert bets.log_wealth < -0.1 * math.log(RATE)


def test_torch_does_not_lean() -> None:
    pytest.importorskip("torch")
    from attncheck.kernels.torch_sdpa import FLASH, MATH

    for right, names in ((FLASH, ("output", "dv")), (MATH, ("output",))):
        for name in names:
            found, bets = hunt(right, name, "bfloat16", 80)
            assert found is None and bets.means()["out"][0] >= 15


def towards_0(x: Array, dtype: np.dtype) -> Array:
    """``x`` truncated to a format."""
    stored = x.astype(dtype)
    past = np.abs(stored.astype(np.float64)) > np.abs(x.astype(np.float64))
    return np.where(past, np.nextafter(stored, np.zeros_like(stored)), stored)


def in_wide(case: Case, presentation: Presentation, want: frozenset[str], wide: str) -> Result:
    """The outputs in a wider format, not rounded to storage."""
    dtype = FORMATS[wide].dtype
    names = ("q", "k", "v", "do", "bias") + (("dlse", "alibi_slopes", "sinks") if wide == "float64" else ())
    raised = {name: getattr(case, name).astype(dtype) for name in names if getattr(case, name) is not None}
    plain = Presentation(q_blocks=presentation.q_blocks, k_blocks=presentation.k_blocks)
    return numpy_blocked.solve(replace(case, **raised), plain, backward=not want.isdisjoint(GRADIENTS))


def stored_otherwise(
    base: Candidate, outputs: tuple[str, ...], store: Callable[[Array, np.dtype], Array], wide: str
) -> Candidate:
    def run(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        right, unrounded = base.run(case, presentation, want), in_wide(case, presentation, want, wide)
        named = [x for x in outputs if getattr(right, x) is not None]
        return replace(right, **{x: store(getattr(unrounded, x), getattr(right, x).dtype) for x in named})

    return replace(base, name="stored otherwise", run=run)


def test_each_output_stored_by_truncation_is_seen() -> None:
    cut = stored_otherwise(ROUNDS_P, ("o", "dq", "dk", "dv", "dbias"), towards_0, "float32")
    for name in ("output", "dq", "dk", "dv", "dbias"):
        found, bets = hunt(cut, name, "bfloat16", 800)
        assert found is not None, name
        assert bets.strongest == ("out", -1)
    assert hunt(cut, "lse", "bfloat16", 100)[1].means() == {}  # float32 in, float32 out: nothing to see


def test_a_truncated_log_sum_exp_needs_no_statistic() -> None:
    """Its bound is a single rounding where sums are wider, and no one element of a few gets by."""
    cut = stored_otherwise(WIDE, ("lse",), towards_0, "float64")
    tally = check(cut, "lse", "float32", examples=30, seed=0)
    assert tally.failure is not None and tally.failure.verdict.kind == "bound"


def test_a_gradient_that_is_a_unit_too_large_is_seen() -> None:
    def larger(x: Array, dtype: np.dtype) -> Array:
        return (x * np.float32(1 + FORMATS[dtype.name].unit)).astype(dtype)

    scaled = stored_otherwise(ROUNDS_P, ("dq", "dk"), larger, "float32")
    for name in ("dq", "dk"):
        found, bets = hunt(scaled, name, "bfloat16", 300)
        assert found is not None and bets.strongest == ("out", 1)


def test_a_truncated_p_is_seen_in_o_and_in_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(tiles: numpy_blocked._Tiles, array: Array) -> Array:
        return towards_0(array, tiles.storage).astype(tiles.dtype) if tiles.rounds_p else array

    monkeypatch.setattr(numpy_blocked._Tiles, "rounded", cut)
    truncates = candidate(round_p=True, name="truncates P")
    found, bets = hunt(truncates, "output", "bfloat16", 600)
    assert found is not None and bets.strongest == ("rest", -1)
    for name in ("dk", "dv"):
        found, bets = hunt(truncates, name, "bfloat16", 600)
        assert found is not None and bets.strongest == ("out", -1)
    # declared as truncation, it is what the kernel says of itself
    profiles = {"bfloat16": replace(truncates.profile("bfloat16"), u_p=2 * FORMATS["bfloat16"].unit)}
    assert hunt(replace(truncates, profiles=profiles), "output", "bfloat16", 600)[0] is None


def test_probabilities_that_are_too_large_where_maxima_repeat_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numpy_blocked._Tiles.rounded

    def raised(tiles: numpy_blocked._Tiles, array: Array) -> Array:
        largest = array == 1
        repeated = largest & (largest.sum(axis=-1, keepdims=True) > 1)
        above = 1 + 2 * FORMATS["bfloat16"].unit
        return np.where(repeated, array.dtype.type(above), right(tiles, array))

    monkeypatch.setattr(numpy_blocked._Tiles, "rounded", raised)
    found, bets = hunt(candidate(round_p=True), "output", "bfloat16", 600)
    assert found is not None and bets.strongest == ("tied", 1)


# -- campaigns ------------------------------------------------------------------------------------


def test_a_lean_is_a_violation_with_a_case_that_is_saved_and_replays() -> None:
    cut = stored_otherwise(ROUNDS_P, ("dv",), towards_0, "float32")
    tally = check(cut, "dv", "bfloat16", examples=400, seed=0)
    assert tally.failure is not None and tally.failure.verdict.kind == "bias"
    cases, mean = tally.leans["out"]
    assert tally.judged < 400 and mean < -0.3
    sentence = tally.failure.verdict.sentence
    assert sentence.startswith(f"dV: leans towards 0, although no element is outside its bound: in the mean of {cases}")
    assert f"{-mean:.0%} more" in sentence and "once in 1,000,000 campaigns" in sentence
    record = loads(*dumps(make_record(cut, tally)))
    assert record.seen["violated"] == "by many cases together"
    again = replay(record, cut)
    assert again.outcome is Outcome.HOLDS  # by itself
    (lean,) = (x for x in again.leans if x.direction == "out")
    assert lean.share == -1.0  # and all of it on one side


def test_cases_with_a_declared_fault_tell_nothing_of_a_lean() -> None:
    cut = stored_otherwise(ROUNDS_P, ("dv",), towards_0, "float32")
    known = Known(("dv",), ("bfloat16",), lambda case, presentation: True, "it truncates", "1.0", "none")
    tally = check(replace(cut, known=(known,)), "dv", "bfloat16", examples=150, seed=0)
    assert tally.failure is None and tally.leans == {}


def test_kernels_whose_sums_are_as_narrow_as_their_results_have_no_lean() -> None:
    tally = check(NUMPY_BLOCKED, "output", "float32", examples=40, seed=0)
    assert tally.failure is None and tally.judged > 0 and tally.leans == {}
