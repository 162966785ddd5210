"""The definition against itself at two precisions, and its gradients against differences."""

from __future__ import annotations

from dataclasses import replace
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from mpmath.libmp import from_float

from attncheck.oracle.case import Case
from attncheck.oracle.definition import Definition, context, define, exact, scores
from attncheck.oracle.formats import FORMATS
from attncheck.oracle.precision import working_bits
from attncheck.oracle.result import GRADIENTS, OUTPUTS

#: precision and step of the central differences: cut-off h^2 times a third derivative, 2^-180, and
#: rounding 2^-400 / h, 2^-310, are both far below 1e-20
BITS, STEP_EXPONENT = 400, -90


def draw(seed: int, *shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(FORMATS[dtype].dtype)


def plain(**changes: Any) -> Case:
    """Two batch entries, four query heads on two key heads, D != Dv."""
    fields: dict[str, Any] = {
        "q": draw(1, 2, 4, 3, 2),
        "k": draw(2, 2, 2, 4, 2),
        "v": draw(3, 2, 2, 4, 3),
        "do": draw(4, 2, 4, 3, 3),
        "dlse": draw(5, 2, 4, 3),
    }
    return Case(**{**fields, **changes})


CASES: dict[str, Case] = {
    "plain": plain(),
    "no-dlse": plain(dlse=None),
    "negative-scale": plain(scale=-0.75),
    "zero-scale": plain(scale=0.0),
    "softcap": plain(softcap=1.5),
    "causal-bottom-right": plain(causal="bottom-right"),
    "causal-top-left-window": plain(causal="top-left", window=(1, None)),
    "window-alone": plain(window=(1, 0)),
    "alibi-alone": plain(alibi_slopes=draw(18, 4)),
    "lengths": plain(q_lengths=(2, 3), k_lengths=(4, 1)),
    "empty-rows": plain(mask=np.array([[0, 0, 0, 0], [1, 0, 1, 1], [0, 1, 0, 0]], dtype=bool)),
    "bias-full": plain(bias=draw(6, 2, 4, 3, 4)),
    "bias-row": plain(bias=np.array([0.5, -np.inf, -2.0, 1.0], dtype=np.float32)),
    "bias-per-head": plain(bias=draw(7, 4, 1, 1)),
    "alibi-softcap-bias": plain(alibi_slopes=draw(8, 2, 4), softcap=2.0, bias=draw(9, 1, 3, 4), causal="bottom-right"),
    "bfloat16": Case(*(draw(n, 1, 2, 3, 2, dtype="bfloat16") for n in (10, 11, 12, 13))),
    "float64": Case(*(draw(n, 1, 1, 3, 2, dtype="float64") for n in (14, 15, 16, 17))),
}


def flat(array: np.ndarray) -> list[Any]:
    return array.ravel().tolist()  # type: ignore[no-any-return]


# -- precision -------------------------------------------------------------------------------


def agreed_bits(rough: Definition, fine: Definition) -> float:
    """The bits on which two answers agree, relative to the largest value of each output."""
    worst = float("inf")
    for name in OUTPUTS:
        a, b = getattr(rough, name), getattr(fine, name)
        if a is None or a.size == 0:
            continue
        finite = [(x, y) for x, y in zip(flat(a), flat(b), strict=True) if x != mpmath.ninf]
        assert [x == mpmath.ninf for x in flat(a)] == [y == mpmath.ninf for y in flat(b)]
        size = max([abs(y) for _, y in finite], default=0)
        gap = max([abs(y - x) for x, y in finite], default=0)
        if gap:
            worst = min(worst, float(-mpmath.log(gap / max(size, 1), 2)))
    return worst


@pytest.mark.parametrize("name", CASES)
def test_two_precisions_agree(name: str) -> None:
    rough, fine = define(CASES[name], 200), define(CASES[name], 500)
    # all but a dozen of the bits: sums of a few terms of a few units each
    assert agreed_bits(rough, fine) >= 200 - 12
    assert agreed_bits(define(CASES[name], 60), fine) < 188 or name == "zero-scale"  # and it can tell


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ([1e30], [[1.0], [1.0], [-1.0]]),
        ([1e15, 1.0], [[1e15, 1.0], [1e15, 2.0], [1e15, 0.5]]),  # scores that differ in their last digits only
        ([1.0, 1.0], [[-1e6, 0.25], [-1e6, 0.5], [-1e6, -3.0]]),  # everything shifted far down
        ([1e38], [[3e38], [3e38], [1e38]]),
    ],
)
def test_huge_scores_and_far_shifts_lose_nothing(q: list[float], k: list[list[float]]) -> None:
    case = Case(
        np.array(q, dtype=np.float32).reshape(1, 1, 1, -1),
        np.array(k, dtype=np.float32).reshape(1, 1, 3, -1),
        draw(20, 1, 1, 3, 2),
        do=draw(21, 1, 1, 1, 2),
        scale=1.0,
    )
    own, fine = define(case), define(case, working_bits(case) + 500)
    assert agreed_bits(own, fine) >= 128 + 64
    # p does not know the shift
    shifted = [mpmath.mpf(x) for x in flat(fine.p)]
    assert abs(sum(shifted) - 1) < mpmath.mpf(2) ** -40
    if len(q) == 2:
        tail = Case(case.q[..., 1:], case.k[..., 1:], case.v, do=case.do, scale=1.0)
        reference = define(tail, own.bits)
        assert max(abs(x - y) for x, y in zip(flat(own.o), flat(reference.o), strict=True)) < mpmath.mpf(2) ** -190
        shift = own.lse[0, 0, 0] - reference.lse[0, 0, 0]
        assert (
            abs(shift - exact(context(300), case.q)[0, 0, 0, 0] * exact(context(300), case.k)[0, 0, 0, 0]) < 2.0**-100
        )


def test_precision_is_nobody_elses() -> None:
    before = mpmath.mp.prec
    answer = define(CASES["plain"], 300)
    assert mpmath.mp.prec == before
    with mpmath.workprec(20):
        assert flat(define(CASES["plain"], 300).o) == flat(answer.o)
        third = answer.o[0, 0, 0, 0] / 3  # a number carries its own
        assert abs(third * 3 - answer.o[0, 0, 0, 0]) < mpmath.mpf(2) ** -290


def test_too_few_bits_to_hold_the_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="bits is 52; it must be at least 53"):
        define(CASES["plain"], 52)


@pytest.mark.parametrize("name", FORMATS)
def test_inputs_are_converted_exactly(name: str) -> None:
    form = FORMATS[name]
    values = [0.0, -0.0, form.smallest, -3 * form.smallest, form.tiny, form.max, 1 + 2 * form.unit, -1 / 3]
    array = np.array(values, dtype=np.float64).astype(form.dtype)
    for x, number in zip(array.astype(np.float64).tolist(), exact(context(53), array), strict=True):
        assert number._mpf_ == from_float(x)
        sign, man, exponent, _ = number._mpf_
        assert (-1) ** sign * Fraction(int(man)) * Fraction(2) ** exponent == Fraction(x)


def test_the_default_scale_is_not_its_float() -> None:
    case = Case(*(draw(n, 1, 1, 2, 3) for n in (30, 31, 32)))
    scale = scores(case, 300).scale
    assert abs(scale**2 * 3 - 1) < mpmath.mpf(2) ** -290
    assert abs(scale - 1 / np.sqrt(3.0)) > mpmath.mpf(2) ** -60


# -- the forward pass, a second time ---------------------------------------------------------


def by_hand(case: Case, b: int, h: int, i: int) -> tuple[list[Decimal], Decimal]:
    """o and lse of one row in decimal arithmetic, visibility and all, said anew from Case's docstring."""
    _, hq, hk, sq, sk, d, dv = case.shape
    rows, keys = (n[b] if n is not None else size for n, size in ((case.q_lengths, sq), (case.k_lengths, sk)))
    offset = keys - rows if case.causal != "top-left" else 0

    def entry(array: np.ndarray, j: int) -> Any:
        place = (b, h, i, j)[4 - array.ndim :]
        return array[tuple(0 if n == 1 else x for n, x in zip(array.shape, place, strict=True))]

    weights: dict[int, Decimal] = {}
    for j in range(keys if i < rows else 0):
        distance = i + offset - j
        if case.causal is not None and distance < 0:
            continue
        left, right = case.window or (None, None)
        if (left is not None and distance > left) or (right is not None and -distance > right):
            continue
        if case.mask is not None and not entry(case.mask, j):
            continue
        pairs = zip(case.q[b, h, i].tolist(), case.k[b, h // (hq // hk), j].tolist(), strict=True)
        s = sum(Decimal(float(x)) * Decimal(float(y)) for x, y in pairs)
        s *= 1 / Decimal(d).sqrt() if case.scale is None else Decimal(case.scale)
        if case.softcap is not None:
            doubled = (2 * s / Decimal(case.softcap)).exp()
            s = Decimal(case.softcap) * (doubled - 1) / (doubled + 1)
        if case.bias is not None:
            s += Decimal(float(entry(case.bias, j)))
        if case.alibi_slopes is not None:
            slope = case.alibi_slopes[b, h] if case.alibi_slopes.ndim == 2 else case.alibi_slopes[h]
            s -= Decimal(float(slope)) * abs(distance)
        if s != Decimal("-Infinity"):
            weights[j] = s.exp()
    total = sum(weights.values(), Decimal(0))
    o = [
        sum((w * Decimal(float(case.v[b, h // (hq // hk), j, c])) for j, w in weights.items()), Decimal(0))
        for c in range(dv)
    ]
    return [x / total if total else x for x in o], total.ln()


@pytest.mark.parametrize("name", CASES)
def test_a_second_route_gives_the_same_forward_pass(name: str) -> None:
    case = CASES[name]
    answer = define(case, 300)
    with localcontext(Context(prec=70)):
        tolerance = Decimal(10) ** -65  # 70 digits, less what a dozen operations lose
        for b, h, i in np.ndindex(*case.q.shape[:3]):
            o, lse = by_hand(case, b, h, i)
            got = [Decimal(mpmath.nstr(x, 80)) for x in (*answer.o[b, h, i], answer.lse[b, h, i]) if x != mpmath.ninf]
            want = [x for x in (*o, lse) if x.is_finite()]
            assert len(got) == len(want)
            assert all(abs(x - y) <= tolerance * max(1, abs(y)) for x, y in zip(got, want, strict=True)), (b, h, i)


# -- gradients -------------------------------------------------------------------------------


class Perturbed:
    """J = <dO, O> + <dlse, lse> of a case with one input moved by a step that no float can hold.

    Written for this test: the forward pass alone, from the scores up, with exp(s) / sum exp(s).
    """

    def __init__(self, case: Case) -> None:
        self.case, self.scores = case, scores(case, BITS)
        self.bias = None if case.bias is None else exact(self.scores.ctx, case.bias)

    def loss(self, name: str, index: tuple[int, ...], step: Any) -> Any:
        moved = self.scores
        if name == "bias":
            assert self.bias is not None and moved.added is not None
            change = np.zeros(self.bias.shape, dtype=object)
            change[index] = step
            shape = (1,) * (4 - change.ndim) + change.shape
            moved = replace(moved, added=moved.added + np.broadcast_to(change.reshape(shape), moved.added.shape))
        else:
            array = getattr(moved, name).copy()
            array[index] += step
            moved = replace(moved, **{name: array})
        return self._forward(moved)

    def _forward(self, moved: Any) -> Any:
        ctx, case, total = moved.ctx, self.case, moved.ctx.zero
        assert case.do is not None
        for b, h, i in np.ndindex(*case.q.shape[:3]):
            keys, s, _ = moved.row(b, h, i)
            if not keys:
                continue
            e = [ctx.exp(x) for x in s]
            for c in range(case.v.shape[3]):
                o = sum(x * moved.v[b, h // case.group, j, c] for x, j in zip(e, keys, strict=True)) / sum(e)
                total += float(case.do[b, h, i, c]) * o
            if case.dlse is not None:
                total += float(case.dlse[b, h, i]) * ctx.log(sum(e))
        return total


def gradient_gaps(case: Case, answer: Definition, share: float = 1.0) -> dict[str, Any]:
    """The largest difference of each gradient from the central differences of J."""
    perturbed, gaps = Perturbed(case), {}
    step = context(BITS).mpf(2) ** STEP_EXPONENT
    rng = np.random.default_rng(0)
    for gradient in GRADIENTS:
        got, name = getattr(answer, gradient), gradient[1:]
        if got is None:
            continue
        gaps[gradient] = context(BITS).zero
        for index in np.ndindex(got.shape):
            if name == "bias" and case.bias is not None and case.bias[index] == -np.inf:
                assert got[index] == 0
                continue
            if rng.random() > share:
                continue
            up, down = (perturbed.loss(name, index, sign * step) for sign in (1, -1))
            gaps[gradient] = max(gaps[gradient], abs((up - down) / (2 * step) - got[index]))
    return gaps


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_forward_pass(name: str) -> None:
    case = CASES[name]
    gaps = gradient_gaps(case, define(case, BITS), share=0.5)
    assert set(gaps) == {"dq", "dk", "dv"} | ({"dbias"} if case.bias is not None else set())
    # the differences' own error: h^2 times third derivatives of order 1e3, and 2^-BITS / h
    assert all(gap < 2.0 ** (2 * STEP_EXPONENT + 20) for gap in gaps.values()), gaps


def test_the_differences_see_a_gradient_that_is_wrong() -> None:
    case = CASES["plain"]
    answer = define(case, BITS)
    without = define(replace(case, dlse=None), BITS)
    assert gradient_gaps(case, without, share=0.1)["dq"] > 1e-3  # the log-sum-exp's part left out
    assert answer.dq is not None
    swapped = replace(answer, dq=answer.dq[:, ::-1])
    assert gradient_gaps(case, swapped, share=0.1)["dq"] > 1e-3  # heads swapped


# -- identities ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_probabilities_and_score_gradients(name: str) -> None:
    case = CASES[name]
    answer = define(replace(case, dlse=None), 300)
    assert answer.ds is not None
    seen = scores(case, 300).visible
    assert all(x == 0 for x in answer.p[~seen]) and all(x == 0 for x in answer.ds[~seen])
    assert all(x > 0 for x in answer.p[seen])
    unit = mpmath.mpf(2) ** -290  # sums of at most four numbers of 300 bits, of size at most 8
    for index in np.ndindex(answer.p.shape[:3]):
        assert abs(sum(answer.ds[index])) <= unit
        assert abs(sum(answer.p[index]) - bool(seen[index].any())) <= unit


def test_a_row_that_sees_nothing_is_zero_and_reaches_nothing() -> None:
    case = CASES["empty-rows"]
    answer = define(case)
    assert case.do is not None and case.dlse is not None
    assert all(x == 0 for x in flat(answer.o[:, :, 0])) and all(x == mpmath.ninf for x in flat(answer.lse[:, :, 0]))
    assert all(x == 0 for x in flat(answer.dq[:, :, 0]))
    others = Case(case.q[:, :, 1:], case.k, case.v, do=case.do[:, :, 1:], dlse=case.dlse[:, :, 1:], mask=case.mask[1:])
    alone = define(others, answer.bits)
    assert flat(answer.dk) == flat(alone.dk) and flat(answer.dv) == flat(alone.dv)
    assert flat(answer.o[:, :, 1:]) == flat(alone.o)


def test_padding_is_zero_and_reaches_nothing() -> None:
    case = CASES["lengths"]
    answer = define(case)
    assert all(x == 0 for x in flat(answer.o[0, :, 2])) and all(x == mpmath.ninf for x in flat(answer.lse[0, :, 2]))
    assert all(x == 0 for x in flat(answer.dq[0, :, 2]))
    assert all(x == 0 for x in flat(answer.dk[1, :, 1:])) and all(x == 0 for x in flat(answer.dv[1, :, 1:]))
    noisy = define(replace(case, do=np.where(np.arange(3)[:, None] == 2, 1e30, case.do).astype(np.float32)))
    assert flat(noisy.dv[0]) == flat(answer.dv[0])  # the padded row's upstream gradient is not used
    assert flat(noisy.dv[1]) != flat(answer.dv[1])  # a real row's is


def test_grouped_heads_are_repeated_heads_summed() -> None:
    case = CASES["plain"]
    repeated = replace(case, k=np.repeat(case.k, 2, axis=1), v=np.repeat(case.v, 2, axis=1))
    grouped, full = define(case, 300), define(repeated, 300)
    assert flat(grouped.o) == flat(full.o) and flat(grouped.dq) == flat(full.dq)
    for name in ("dk", "dv"):
        parts = getattr(full, name)
        summed = parts[:, 0::2] + parts[:, 1::2]
        gaps = [abs(x - y) for x, y in zip(flat(summed), flat(getattr(grouped, name)), strict=True)]
        assert max(gaps) < mpmath.mpf(2) ** -290


def test_one_visible_key_is_copied_without_rounding() -> None:
    case = plain(scale=0.5, mask=np.array([False, True, False, False]), dlse=None)
    answer = define(case)
    assert flat(answer.o[:, :2]) == flat(np.broadcast_to(exact(context(300), case.v)[:, :1, 1:2], (2, 2, 3, 3)))
    assert all(x == 0 for x in flat(answer.dq)) and all(x == 0 for x in flat(answer.dk))


@pytest.mark.parametrize("sizes", [(0, 2, 3), (1, 0, 3), (1, 2, 0)])
def test_zero_sizes(sizes: tuple[int, int, int]) -> None:
    b, sq, sk = sizes
    case = Case(
        draw(1, b, 2, sq, 3), draw(2, b, 1, sk, 3), draw(3, b, 1, sk, 2), do=draw(4, b, 2, sq, 2), bias=draw(5, 2, 1, 1)
    )
    answer = define(case)
    assert answer.o.shape == (b, 2, sq, 2) and answer.dk.shape == case.k.shape and answer.dbias.shape == (2, 1, 1)
    assert all(x == 0 for name in ("o", "dq", "dk", "dv", "dbias") for x in flat(getattr(answer, name)))


def test_without_an_upstream_gradient_there_are_no_gradients() -> None:
    answer = define(plain(do=None, dlse=None, bias=draw(6, 2, 4, 3, 4)))
    assert [getattr(answer, name) for name in (*GRADIENTS, "ds")] == [None] * 6
