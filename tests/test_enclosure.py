"""The certified engine against the definition, against itself, and against its own promises."""

from __future__ import annotations

from itertools import islice
from unittest.mock import patch

import mpmath
import numpy as np
import pytest

from attncheck.oracle import enclosure
from attncheck.oracle.case import Case
from attncheck.oracle.definition import define
from attncheck.oracle.enclosure import exact
from attncheck.properties import runs
from attncheck.properties.draws import drawn
from attncheck.properties.runs import OracleError, compare_engines
from attncheck.properties.strategies import Plan

OUTPUTS = ("o", "lse", "dq", "dk", "dv", "dbias")
EVERYTHING = frozenset({"backward", "dlse", "bias"})


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def plain(sq: int, sk: int, d: int, **fields: object) -> Case:
    q, k, v = normal(1, 1, sq, d, seed=1), normal(1, 1, sk, d, seed=2), normal(1, 1, sk, d, seed=3)
    return Case(q=q, k=k, v=v, do=normal(1, 1, sq, d, seed=4), **fields)  # type: ignore[arg-type]


def small(case: Case) -> bool:
    b, hq, _, sq, sk, d, dv = case.shape
    return b * hq * sq * sk * (d + dv) < 800


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_definition_lies_in_the_enclosure_on_drawn_cases(dtype: str) -> None:
    plan = Plan(dtype, needs=EVERYTHING)
    compared = 0
    for case, _ in islice(drawn(plan, seed=3), 90):
        if small(case):
            compare_engines(case)
            compared += 1
    assert compared > 40


@pytest.mark.parametrize("size", [1e30, -1e30, 3e37])
def test_huge_scores(size: float) -> None:
    f = np.float32
    q = np.array([[[[1.0, 1e30], [-1.0, 1e-30]]]], f)
    k = np.array([[[[size, 1.0], [size, -1.0], [0.0, 1.0]]]], f)
    case = Case(q=q, k=k, v=normal(1, 1, 3, 2), do=normal(1, 1, 2, 2), scale=1.0)
    compare_engines(case)
    assert exact(case).bits > 228  # a score of 1e30 needs 100 bits more than one of 1


def test_scores_shifted_far_down_move_lse_and_nothing_else() -> None:
    """A constant channel adds -1e6 to every score exactly; O and the gradients of V do not move."""
    base = plain(3, 5, 2, scale=1.0)
    ones, low = np.ones((1, 1, 3, 1), np.float32), np.full((1, 1, 5, 1), -1e6, np.float32)
    shifted = Case(
        q=np.concatenate([base.q, ones], axis=3),
        k=np.concatenate([base.k, low], axis=3),
        v=base.v,
        do=base.do,
        scale=1.0,
    )
    compare_engines(shifted)
    a, b = exact(base), exact(shifted)
    for name in ("o", "dv"):
        x, y = getattr(a, name), getattr(b, name)
        assert (np.abs((x.hi - y.hi) + (x.lo - y.lo)) <= x.rad + y.rad).all()
    apart = (a.lse.hi - b.lse.hi) + (a.lse.lo - b.lse.lo) - 1e6
    # three roundings to float64 of numbers up to 1e6, besides the radii
    assert (np.abs(apart) <= a.lse.rad + b.lse.rad + 3 * 2.0**-53 * 1e6).all()


def test_two_precisions_agree() -> None:
    case = plain(4, 6, 3, causal="bottom-right", softcap=1.5)
    coarse, fine = exact(case, target=128), exact(case, target=400)
    for name in OUTPUTS[:5]:
        x, y = getattr(coarse, name), getattr(fine, name)
        assert (np.abs((x.hi - y.hi) + (x.lo - y.lo)) <= x.rad + y.rad).all(), name


def test_relative_radius_is_small() -> None:
    """Below 1e-25 for every value of an ordinary case: hi + lo holds 106 bits."""
    case = plain(16, 16, 8)
    found = exact(case)
    for name in OUTPUTS[:5]:
        balls = getattr(found, name)
        assert (balls.rad <= 1e-25 * np.abs(balls.hi)).all(), name


def test_streaming_in_small_blocks_gives_the_same_values() -> None:
    case = plain(9, 7, 3, causal="top-left", bias=normal(9, 7, seed=5))
    whole = exact(case)
    with patch.object(enclosure, "BLOCK_PAIRS", 14):
        pieces = exact(case)
    for name in OUTPUTS:
        x, y = getattr(whole, name), getattr(pieces, name)
        assert (np.abs((x.hi - y.hi) + (x.lo - y.lo)) <= x.rad + y.rad).all(), name


def test_values_beyond_float64_are_marked() -> None:
    x = np.array([[[[1e300], [-1e300]]]])
    case = Case(q=x, k=x, v=np.ones((1, 1, 2, 1)), scale=1.0)
    compare_engines(case)
    assert np.isposinf(exact(case).lse.hi).all()


def test_values_below_float64_keep_a_radius() -> None:
    """exp(-1e16) is not 0: the enclosure says so."""
    case = Case(
        q=np.full((1, 1, 1, 1), 1e16),
        k=np.array([[[[0.0], [1.0]]]]),
        v=np.array([[[[1.0], [0.0]]]]),
        scale=1.0,
    )
    compare_engines(case)
    o = exact(case).o
    assert o.hi[0, 0, 0, 0] == 0 and o.rad[0, 0, 0, 0] > 0


def test_empty_rows_padding_and_zero_sizes() -> None:
    mask = np.array([[True, False], [False, False]])
    case = plain(2, 2, 2, mask=mask)
    found = exact(case)
    assert np.isneginf(found.lse.hi[0, 0, 1]) and (found.o.hi[0, 0, 1] == 0).all()
    assert found.dq is not None and (found.dq.hi[0, 0, 1] == 0).all()
    padded = plain(3, 4, 2, q_lengths=(2,), k_lengths=(0,))
    assert np.isneginf(exact(padded).lse.hi).all()
    for shape in ((0, 1, 2, 2), (1, 1, 0, 2)):
        empty = np.zeros(shape, np.float32)
        assert exact(Case(q=empty, k=empty, v=empty, do=empty)).o.hi.shape == shape


def test_decimal_prints_certain_digits() -> None:
    case = Case(*(np.array([[[[x]]]], np.float32) for x in (1.0, 1.0, 0.1)))
    text = exact(case).o.decimal((0, 0, 0, 0), 30)
    assert text.startswith("0.100000001490116119384765625")


def test_a_wrong_engine_is_an_error_of_ours() -> None:
    """The comparison of the engines can fail: shift one value by far less than float64 can show."""
    case = plain(2, 3, 2)
    runs._answers.entries.clear()
    truth = exact(case)
    lo = truth.o.lo.copy()
    lo[0, 0, 0, 0] += 2.0**-80
    wrong = enclosure.Enclosed(truth.o.hi, lo, truth.o.rad)
    with (
        patch.object(runs, "answer", lambda c: enclosure.Exact(**{**vars(truth), "o": wrong})),
        pytest.raises(OracleError, match="o: element 0 of case .* lies outside its enclosure"),
    ):
        compare_engines(case)


def test_definition_and_engine_agree_on_missing_outputs() -> None:
    case = Case(normal(1, 1, 2, 2), normal(1, 1, 2, 2), normal(1, 1, 2, 2))
    assert exact(case).dq is None and define(case).dq is None
    assert mpmath.isfinite(define(case).o[0, 0, 0, 0])


def test_a_ball_that_is_narrower_than_the_definition_rounds_is_no_disagreement() -> None:
    """Scores of 1e-40 and values that cancel: 1 + x is exact in the ball, the definition rounds it."""
    bits = np.array([[[[2.0**-67]]]])
    k = np.array([[[[2.0**-66], [-(2.0**-67)], [2.0**-68]]]])
    case = Case(q=bits, k=k, v=np.array([[[[-2.0], [4.0], [-2.0]]]]), scale=2.0)
    found = exact(case)
    assert found.o.rad[0, 0, 0, 0] < 2.0 ** -(found.bits + 64)
    compare_engines(case)
