"""numpy-blocked against plain attention in float64, within rounding bounds derived here."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from attncheck.kernels import numpy_blocked
from attncheck.kernels.candidate import PROMISES
from attncheck.kernels.numpy_blocked import NUMPY_BLOCKED, Arithmetic, _stored, _Tiles, attention, candidate, solve
from attncheck.kernels.presenting import buffer
from attncheck.oracle.case import ROUTES, Case, Presentation, partition
from attncheck.oracle.formats import FORMATS
from attncheck.oracle.profile import Profile
from attncheck.oracle.result import OUTPUTS, Result

from .faulty import FAULTS, RIGHT

ALL = frozenset(OUTPUTS)


# -- the reference: whole rows, one pair at a time where it matters -----------------------------


def sees(case: Case, b: int, h: int, i: int, j: int) -> bool:
    """Whether row i sees key j, read off the definition."""
    qn, kn = case.q_length[b], case.k_length[b]
    if i >= qn or j >= kn:
        return False
    shift = 0 if case.causal == "top-left" else kn - qn
    if case.causal and j > i + shift:
        return False
    if case.window is not None:
        left, right = case.window
        if left is not None and j < i + shift - left:
            return False
        if right is not None and j > i + shift + right:
            return False
    if case.mask is not None and not np.broadcast_to(case.mask, full(case))[b, h, i, j]:
        return False
    return case.bias is None or bool(np.broadcast_to(case.bias, full(case))[b, h, i, j] != -np.inf)


def full(case: Case) -> tuple[int, ...]:
    return (*case.q.shape[:3], case.k.shape[2])


@dataclass(frozen=True)
class Answer:
    """Exact values (to float64's rounding) and, per output, how far a kernel may be from them."""

    exact: dict[str, np.ndarray]
    bound: dict[str, np.ndarray]


def answer(case: Case, profile: Profile) -> Answer:
    """The formulas of attention over whole rows in float64, and a first-principles error bound.

    The bound sums, in the order of the computation, what each rounding of the profile can do to
    each element; every relative error of a probability becomes a factor exp(x) - 1. It is evaluated
    for the kernel's unit u and once more for float64's, as the reference rounds too.
    """
    b, hq, _, sq, sk, d, dv = case.shape
    g = case.group
    wide = {name: None if a is None else a.astype(np.float64) for name, a in vars(case).items() if _is_array(a)}
    q, k, v = wide["q"], np.repeat(wide["k"], g, axis=1), np.repeat(wide["v"], g, axis=1)
    do = wide.get("do", np.zeros((b, hq, sq, dv)))
    dlse = wide.get("dlse", np.zeros((b, hq, sq)))[..., None]
    sink = wide.get("sinks", np.full(hq, -np.inf)).reshape(1, hq, 1, 1)
    kept = np.broadcast_to(True if case.keep is None else case.keep, full(case))
    z = np.where(kept, 1 / (1 - (case.dropout or 0)), 0)
    seen = np.array([sees(case, *index) for index in np.ndindex(full(case))], dtype=bool).reshape(full(case))
    judged = np.array([i < n for n in case.q_length for i in range(sq)], dtype=bool).reshape(b, 1, sq, 1)
    do, dlse = np.where(judged, do, 0), np.where(judged, dlse, 0)
    scale = 1 / math.sqrt(d) if case.scale is None else case.scale
    raw = scale * q @ k.swapaxes(-1, -2)
    t = np.zeros_like(raw) if case.softcap is None else np.tanh(raw / case.softcap)
    capped = raw if case.softcap is None else case.softcap * t
    added, added_size = np.zeros_like(raw), np.zeros_like(raw)
    if case.alibi_slopes is not None:
        for bb in range(b):
            shift = 0 if case.causal == "top-left" else case.k_length[bb] - case.q_length[bb]
            slopes = np.broadcast_to(wide["alibi_slopes"], (b, hq))[bb]
            distance = np.abs(np.arange(sq)[:, None] + shift - np.arange(sk))
            added[bb] -= slopes[:, None, None] * distance
        added_size = added_size + np.abs(added)
    if case.bias is not None:
        bias = np.where(np.isinf(wide["bias"]), 0, wide["bias"])
        added, added_size = added + bias, added_size + np.abs(bias)
    s = np.where(seen, capped + added, -np.inf)
    m = np.maximum(np.max(s, axis=-1, keepdims=True, initial=-np.inf), sink)
    origin = np.where(m == -np.inf, 0, m)
    weights = np.exp(s - origin)
    total = weights.sum(-1, keepdims=True) + np.exp(sink - origin)
    p_sink = np.exp(sink - origin) / np.where(total == 0, 1, total)
    p = weights / np.where(total == 0, 1, total)
    lse = np.where(total == 0, -np.inf, origin + np.log(np.where(total == 0, 1, total)))
    o = (z * p) @ v
    dp = z * (do @ v.swapaxes(-1, -2))
    delta = (p * dp).sum(-1, keepdims=True) - dlse
    ds_bias = p * (dp - delta)
    ds = ds_bias * (1 - t * t)
    exact = {
        "o": o,
        "lse": lse[..., 0],
        "dq": scale * ds @ k,
        "dk": by_group(scale * ds.swapaxes(-1, -2) @ q, g),
        "dv": by_group((z * p).swapaxes(-1, -2) @ do, g),
        "dbias": ds_bias,
        "dsink": -(p_sink * delta).sum(axis=(0, 2, 3)),
    }

    def bounds(u: float, u_p: float, u_exp: float, u_tanh: float, u_lse: float) -> dict[str, np.ndarray]:
        lost = np.where(seen, case.format.smallest, 0) if u_p else np.zeros_like(p)  # P and dS stored as subnormals
        qk = np.abs(q) @ np.abs(k).swapaxes(-1, -2)
        e = abs(scale) * (d + 4) * u * qk  # product, scale, its rounding, the division by the cap
        e_t = 0 if case.softcap is None else e / case.softcap + u_tanh * np.abs(t)
        e_s = (e if case.softcap is None else case.softcap * e_t + u * np.abs(capped)) + 3 * u * (
            np.abs(capped) + added_size
        )
        e_s = np.where(seen, e_s, 0)
        worst = e_s.max(-1, keepdims=True, initial=0)
        depth = np.where(seen, origin - np.where(seen, s, 0), 0)
        # exp, the sums, and a rescale and its exp for each block of one key; the sink is one key more
        keys = sk + (case.sinks is not None)
        sums = (keys + 4) * u + keys * (u_exp + 2 * u)
        raised = 0 if case.keep is None else 3 * u  # 1 / (1 - p), and its product
        a = np.expm1(e_s + worst + u * depth + 2 * u_exp + sums + u_p)
        e_o = (z * (a * p + lost)) @ np.abs(v) + raised * (z * (1 + a) * p) @ np.abs(v)
        log_total = np.abs(np.where(total == 0, 0, lse - origin))
        finite = np.where(total == 0, 0, lse)
        e_lse = worst + sums + u_exp + 4 * u * log_total + u * np.abs(finite)
        e_lse = e_lse + u_lse * (np.abs(finite) + e_lse)
        r = np.expm1(e_s + e_lse + u * (np.abs(np.where(seen, s - finite, 0)) + 1) + u_exp)
        big = p * (1 + r)
        e_dp = ((dv + 1) * u + raised) * z * (np.abs(do) @ np.abs(v).swapaxes(-1, -2))
        unit = FORMATS[case.dtype].unit
        e_delta = (np.abs(do) * (e_o + unit * (np.abs(o) + e_o) + (dv + 2) * u * (np.abs(o) + e_o))).sum(
            -1, keepdims=True
        )
        spread = np.abs(dp) + np.abs(delta) + np.abs(dlse)
        e_ds_bias = r * p * np.abs(dp - delta) + big * (e_dp + e_delta + 3 * u * spread) + 2 * u * np.abs(ds_bias)
        slope = 1 - t * t
        e_slope = 0 if case.softcap is None else np.minimum(1, 2 * e_t + np.square(e_t)) + 3 * u
        e_ds = e_ds_bias * (slope + e_slope) + np.abs(ds_bias) * e_slope + u * np.abs(ds)
        e_ds = e_ds + u_p * (np.abs(ds) + e_ds) + lost
        n = g * sq + 3  # a chain over a group's rows, scale and its rounding
        most = np.abs(ds) + e_ds
        r_sink = np.expm1(e_lse + u * (np.abs(np.where(p_sink > 0, sink - finite, 0)) + 1) + u_exp)
        e_sink = e_delta + (b * sq + 2) * u * (np.abs(delta) + 2 * np.abs(dlse))
        e_sink = r_sink * np.abs(delta) + (1 + r_sink) * e_sink
        stored = 1 if case.bias is None else math.prod(full(case)) // max(1, case.bias.size)
        return {
            "o": e_o + 2 * u * np.abs(o),
            "lse": e_lse[..., 0],
            "dq": abs(scale) * (e_ds + (sk + 3) * u * most) @ np.abs(k),
            "dk": by_group(abs(scale) * (e_ds + n * u * most).swapaxes(-1, -2) @ np.abs(q), g),
            "dv": by_group((z * (r * p + lost + (u_p + n * u + raised) * big)).swapaxes(-1, -2) @ np.abs(do), g),
            "dbias": e_ds_bias + stored * u * (np.abs(ds_bias) + e_ds_bias),
            "dsink": (p_sink * e_sink).sum(axis=(0, 2, 3)),
        }

    double = FORMATS["float64"].unit
    kernel = bounds(profile.u, profile.u_p, profile.u_exp, profile.u_tanh, FORMATS[profile.lse].unit)
    ours = bounds(double, 0, 4 * double, 4 * double, 0)
    bound = {name: kernel[name] + ours[name] for name in exact}
    if case.bias is not None:
        for record in (exact, bound):
            shape = (1,) * (4 - case.bias.ndim) + case.bias.shape
            axes = tuple(n for n in range(4) if shape[n] == 1)
            record["dbias"] = record["dbias"].sum(axis=axes).reshape(case.bias.shape)
    formats = dict.fromkeys(exact, case.format) | {"lse": FORMATS[profile.lse], "dsink": case.wide_format}
    if case.bias is not None:
        formats["dbias"] = FORMATS[case.bias.dtype.name]
    for name, w in bound.items():
        finite = np.where(np.isinf(exact[name]), 0, exact[name])
        # stored last, perhaps as a subnormal; exp may lose what is below the accumulator's normal numbers
        bound[name] = w + formats[name].unit * (np.abs(finite) + w) + formats[name].smallest + 64 * sk * 2.0**-126
    if case.bias is None:
        exact.pop("dbias"), bound.pop("dbias")
    if case.sinks is None:
        exact.pop("dsink"), bound.pop("dsink")
    if case.do is None:
        for record in (exact, bound):
            for name in ("dq", "dk", "dv", "dbias", "dsink"):
                record.pop(name, None)
    return Answer(exact, bound)


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray)


def by_group(array: np.ndarray, g: int) -> np.ndarray:
    b, hq, *rest = array.shape
    return array.reshape(b, hq // g, g, *rest).sum(axis=2)


def worst_ratio(case: Case, result: Result, answer: Answer) -> float:
    """The largest |got - exact| / bound over all outputs; inf for a wrong shape, dtype or non-finite pattern."""
    worst = 0.0
    for name, exact in answer.exact.items():
        got = getattr(result, name)
        wide = case.wide_format.dtype
        dtype = {"lse": wide, "dsink": wide, "dbias": None if case.bias is None else case.bias.dtype}.get(
            name, case.q.dtype
        )
        if got is None or got.shape != exact.shape or got.dtype != dtype:
            return math.inf
        got = got.astype(np.float64)
        if not np.array_equal(np.where(np.isfinite(got), 0, got), np.where(np.isfinite(exact), 0, exact)):
            return math.inf
        finite = np.isfinite(exact)
        ratios = np.abs(got[finite] - exact[finite]) / answer.bound[name][finite]
        worst = max(worst, float(ratios.max(initial=0)))
    return worst


# -- cases -----------------------------------------------------------------------------------


def make(
    dtype: str = "float32",
    *,
    b: int = 2,
    hq: int = 2,
    hk: int = 2,
    sq: int = 6,
    sk: int = 7,
    d: int = 3,
    dv: int = 3,
    seed: int = 0,
    size: float = 1.0,
    backward: bool = True,
    dlse: bool = False,
    **fields: Any,
) -> Case:
    """Normal values of standard deviation ``size`` (queries and keys) in the given shapes."""
    rng = np.random.default_rng(seed)
    storage = FORMATS[dtype].dtype

    def normal(*shape: int, by: float = 1.0) -> np.ndarray:
        return (by * rng.standard_normal(shape)).astype(storage)

    arrays: dict[str, Any] = {
        "q": normal(b, hq, sq, d, by=size),
        "k": normal(b, hk, sk, d, by=size),
        "v": normal(b, hk, sk, dv),
    }
    if backward:
        arrays["do"] = normal(b, hq, sq, dv)
        if dlse:
            arrays["dlse"] = rng.standard_normal((b, hq, sq)).astype(wide_dtype(dtype))
    return Case(**arrays, **fields)


def wide_dtype(dtype: str) -> np.dtype:
    return FORMATS["float64" if dtype == "float64" else "float32"].dtype


def mask(*shape: int, share: float = 0.6, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < share


def bias(dtype: str, *shape: int, hidden: float = 0.0, seed: int = 2) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    return np.where(rng.random(shape) < hidden, -np.inf, values).astype(FORMATS[dtype].dtype)


def feature_cases(dtype: str) -> dict[str, Case]:
    """One case or more per feature, and some that combine many."""
    slopes = np.array([0.5, 0.0625], dtype=wide_dtype(dtype))
    empty_row = mask(6, 7)
    empty_row[2] = False
    first_block_empty = np.ones((6, 7), dtype=bool)
    first_block_empty[:, :4] = False
    return {
        "plain": make(dtype),
        "forward only": make(dtype, backward=False),
        "dlse": make(dtype, dlse=True),
        "scale": make(dtype, scale=0.75),
        "scale 0": make(dtype, scale=0.0),
        "scale below 0": make(dtype, scale=-1.5),
        "softcap": make(dtype, softcap=0.5, size=2.0),
        "causal top-left": make(dtype, causal="top-left"),
        "causal bottom-right": make(dtype, causal="bottom-right"),
        "causal, more queries": make(dtype, causal="bottom-right", sq=7, sk=4),
        "window": make(dtype, window=(2, 1)),
        "window left": make(dtype, window=(0, None), causal="top-left"),
        "window right": make(dtype, window=(None, 0)),
        "window beyond integers": make(dtype, window=(10**30, 10**30)),
        "alibi": make(dtype, alibi_slopes=slopes),
        "alibi per batch, top-left": make(dtype, alibi_slopes=np.stack([slopes, -slopes]), causal="top-left"),
        "lengths": make(dtype, q_lengths=(6, 3), k_lengths=(2, 7)),
        "lengths 0": make(dtype, q_lengths=(0, 6), k_lengths=(7, 0)),
        "lengths, causal": make(dtype, q_lengths=(4, 6), k_lengths=(7, 1), causal="bottom-right", dlse=True),
        "mask": make(dtype, mask=mask(2, 2, 6, 7)),
        "mask over keys": make(dtype, mask=mask(2, 1, 1, 7)),
        "empty row": make(dtype, mask=empty_row, dlse=True),
        "first block empty": make(dtype, mask=first_block_empty),
        "all hidden": make(dtype, mask=np.zeros(7, dtype=bool), dlse=True),
        "bias": make(dtype, bias=bias(dtype, 2, 2, 6, 7, hidden=0.4)),
        "wide bias over batch and rows": make(dtype, bias=bias(wide_dtype(dtype).name, 2, 1, 7)),
        "bias over heads and keys": make(dtype, bias=bias(dtype, 2, 1, 6, 1, hidden=0.2)),
        "gqa": make(dtype, hq=6, hk=2, dlse=True),
        "mqa, bias per head": make(dtype, hq=4, hk=1, bias=bias(dtype, 4, 6, 1)),
        "values of another width": make(dtype, d=5, dv=2),
        "one of each": make(dtype, b=1, hq=1, hk=1, sq=1, sk=1, d=1, dv=1),
        "no batch": make(dtype, b=0, dlse=True, bias=bias(dtype, 7)),
        "no queries": make(dtype, sq=0, causal="bottom-right", bias=bias(dtype, 7)),
        "no keys": make(dtype, sk=0, dlse=True, window=(1, 1), alibi_slopes=slopes),
        "large scores": make(dtype, size=8.0),
        "many": make(
            dtype,
            hq=4,
            hk=2,
            d=4,
            dv=3,
            dlse=True,
            scale=0.5,
            softcap=3.0,
            causal="bottom-right",
            window=(4, None),
            alibi_slopes=np.array([0.5, 0.25, 1.0, 0.125], dtype=wide_dtype(dtype)),
            q_lengths=(6, 4),
            k_lengths=(5, 7),
            mask=mask(2, 1, 6, 7, share=0.8),
            bias=bias(dtype, 4, 1, 7, hidden=0.2),
        ),
    }


def more_cases(dtype: str) -> dict[str, Case]:
    """Sinks and dropout, which the kernel under the faults does not take."""
    wide = wide_dtype(dtype)
    sinks = np.array([0.5, -1.5], dtype=wide)
    empty_row = mask(6, 7)
    empty_row[2] = False
    third = float(np.float32(1 / 3))
    return {
        "sinks": make(dtype, sinks=sinks, dlse=True),
        "sinks, forward only": make(dtype, sinks=sinks, backward=False),
        "sink above all scores": make(dtype, sinks=np.array([100, 30], dtype=wide), dlse=True),
        "sink far below": make(dtype, sinks=np.array([-3e38, -200], dtype=wide)),
        "sinks, empty row": make(dtype, sinks=sinks, mask=empty_row, dlse=True),
        "sinks, no keys": make(dtype, sk=0, sinks=sinks, dlse=True),
        "sinks, no queries": make(dtype, sq=0, sinks=sinks),
        "sinks, no batch": make(dtype, b=0, sinks=sinks, dlse=True),
        "sinks, gqa, lengths": make(
            dtype,
            hq=4,
            sinks=np.array([0, 1, -1, 2], dtype=wide),
            q_lengths=(6, 3),
            k_lengths=(0, 5),
            causal="bottom-right",
            dlse=True,
        ),
        "dropout": make(dtype, dropout=0.5, keep=mask(2, 2, 6, 7), dlse=True),
        "dropout, no power of two": make(dtype, dropout=third, keep=mask(6, 7)),
        "dropout 0": make(dtype, dropout=0.0, keep=np.ones(7, dtype=bool)),
        "dropout that keeps nothing": make(dtype, dropout=0.75, keep=np.zeros((6, 1), dtype=bool), dlse=True),
        "dropout near 1": make(dtype, dropout=1 - 2.0**-10, keep=mask(2, 1, 7, share=0.1)),
        "dropout, gqa": make(dtype, hq=6, hk=2, dropout=0.25, keep=mask(6, 6, 1)),
        "dropout of hidden pairs": make(dtype, dropout=0.5, keep=mask(6, 7, seed=3), mask=empty_row, softcap=1.5),
        "sinks, dropout and more": make(
            dtype,
            hq=4,
            hk=2,
            d=4,
            dv=3,
            dlse=True,
            softcap=3.0,
            window=(4, 1),
            q_lengths=(6, 4),
            k_lengths=(5, 7),
            bias=bias(dtype, 4, 1, 7, hidden=0.2),
            sinks=np.array([0, 1, -1, 2], dtype=wide),
            dropout=0.25,
            keep=mask(2, 4, 6, 7, share=0.75),
        ),
    }


NAMES = tuple(feature_cases("float32"))
MORE = tuple(more_cases("float32"))
PARTITIONS = ((None, None), ((1,), (1,)), ((2,), (3,)), ((4, 1), (1, 2, 3)), ((5,), (4,)), ((100,), (100,)))
PRESENTATIONS = [Presentation(route, *blocks) for blocks in PARTITIONS for route in ("flags", "mask")]
ARITHMETICS = [
    (dtype, accumulator, round_p)
    for dtype, accumulator, round_p in itertools.product(FORMATS, ("float32", "float64"), (False, True))
    if not (dtype == "float64" and accumulator == "float32") and not (round_p and dtype == accumulator)
]


# -- right on every feature, in every arithmetic and partition ----------------------------------


def all_cases(dtype: str) -> dict[str, Case]:
    return feature_cases(dtype) | more_cases(dtype)


@pytest.mark.parametrize(("dtype", "accumulator", "round_p"), ARITHMETICS)
@pytest.mark.parametrize("name", NAMES + MORE)
def test_within_the_bound(name: str, dtype: str, accumulator: str, round_p: bool) -> None:
    case = all_cases(dtype)[name]
    expected = answer(case, Arithmetic(accumulator, round_p).profile(dtype))
    for presentation in PRESENTATIONS:
        result = solve(case, presentation, accumulator=accumulator, round_p=round_p)
        assert worst_ratio(case, result, expected) <= 1, presentation


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_under_the_faults_is_right(name: str) -> None:
    for dtype in FORMATS:
        case = feature_cases(dtype)[name]
        expected = answer(case, RIGHT.profile(dtype))
        want = ALL if case.do is not None else frozenset({"o", "lse"})
        for presentation in PRESENTATIONS[::2]:
            assert worst_ratio(case, RIGHT.run(case, presentation, want), expected) <= 1, (dtype, presentation)


@pytest.mark.parametrize("name", NAMES + MORE)
def test_routes_agree_bit_for_bit(name: str) -> None:
    case = all_cases("float32")[name]
    for blocks in PARTITIONS:
        flags, masked = (solve(case, Presentation(route, *blocks)) for route in ("flags", "mask"))
        for output in OUTPUTS:
            left, right = getattr(flags, output), getattr(masked, output)
            assert (left is None) == (right is None)
            assert left is None or left.tobytes() == right.tobytes(), output


def test_hidden_tiles_are_skipped_in_the_flags_route() -> None:
    case = make(b=1, sq=8, sk=8, causal="bottom-right", window=(3, None), k_lengths=(6,), q_lengths=(6,))
    tiles = _Tiles(case, Presentation(), Arithmetic())
    edges = [(n, n + 2) for n in range(0, 8, 2)]
    got = {(i, j) for i, j in itertools.product(edges, edges) if tiles.skipped(*i, *j)}
    wanted = {
        (i, j)
        for i, j in itertools.product(edges, edges)
        if not any(sees(case, 0, 0, row, key) for row in range(*i) for key in range(*j))
    }
    assert got == wanted


def revealing_memory(case: Case) -> list[Presentation]:
    """Every kind of memory, with every poison, in one block or in ragged ones."""
    layouts = ("transposed", "sliced", "expanded", "sliced"), ("sliced", "transposed", "transposed", "transposed")
    out = []
    for n, poison in enumerate((None, "nan", "inf", "huge")):
        blocks = ((None, None), ((2,), (3, 1)))[n % 2]
        out.append(Presentation("flags", *blocks, layouts=layouts[n // 2], poison=poison))
        out.append(Presentation("mask", *blocks, layouts=layouts[1], poison=poison, page_size=(1, 2, 3, 8)[n]))
        if poison is not None:
            out.append(Presentation("flags", *blocks, poison=poison, poison_hidden=True))
    return out


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", NAMES + MORE)
def test_memory_does_not_show(name: str, dtype: str) -> None:
    """Strides, pages and whatever fills memory that nobody may read: not a bit of any output changes."""
    case = all_cases(dtype)[name]
    plain_ones = {route: {} for route in ROUTES}
    for presentation in revealing_memory(case):
        blocks = presentation.q_blocks, presentation.k_blocks
        if blocks not in (known := plain_ones[presentation.route]):
            known[blocks] = solve(case, Presentation(presentation.route, *blocks))
        plain, result = known[blocks], solve(case, presentation)
        for output in OUTPUTS:
            left, right = getattr(plain, output), getattr(result, output)
            assert left is None or left.tobytes() == right.tobytes(), (output, presentation)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_batch_entry_alone_gives_the_same_bits(dtype: str) -> None:
    for name, case in all_cases(dtype).items():
        for blocks in PARTITIONS[2:5]:
            together = solve(case, Presentation("flags", *blocks))
            for b in range(case.q.shape[0]):
                alone = solve(entry(case, b), Presentation("flags", *blocks))
                for output in ("o", "lse", "dq", "dk", "dv"):
                    one = getattr(alone, output)
                    assert one is None or one.tobytes() == getattr(together, output)[[b]].tobytes(), (name, output)


def entry(case: Case, b: int) -> Case:
    """One batch entry of a case."""
    fields = vars_of(case)
    for name, value in fields.items():
        axes = {"mask": 4, "bias": 4, "keep": 4, "alibi_slopes": 2}.get(name, 3)
        if name in ("q_lengths", "k_lengths") and value is not None:
            fields[name] = (value[b],)
        elif _is_array(value) and value.ndim >= axes and value.shape[0] > 1:
            fields[name] = value[[b]]
    return Case(**fields)


def test_it_promises_all_that_was_shown() -> None:
    assert NUMPY_BLOCKED.promises == PROMISES.keys()
    assert all(NUMPY_BLOCKED.refuses(presentation) is None for presentation in revealing_memory(make()))


# -- exact contracts -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FORMATS)
def test_empty_and_padded_rows_and_hidden_keys_are_exactly_zero(dtype: str) -> None:
    for name, case in feature_cases(dtype).items():
        result = solve(case, Presentation("flags", (2,), (3,)))
        seen = np.array([sees(case, *index) for index in np.ndindex(full(case))], dtype=bool).reshape(full(case))
        rows = ~seen.any(axis=-1)
        assert result.o is not None and result.lse is not None
        assert (result.o[rows] == 0).all(), name
        assert (result.lse[rows] == -np.inf).all(), name
        if result.dq is None or result.dk is None or result.dv is None:
            continue
        keys = by_group(seen.sum(axis=2), case.group) == 0
        assert (result.dq[rows] == 0).all(), name
        assert (result.dk[keys] == 0).all() and (result.dv[keys] == 0).all(), name
        if case.bias is not None and result.dbias is not None:
            assert (result.dbias[np.isneginf(case.bias.astype(np.float64))] == 0).all(), name


def test_hidden_pairs_cannot_poison() -> None:
    """Numbers near overflow where nobody looks: padded rows, padded keys, and their products."""
    usual = make(q_lengths=(4, 6), k_lengths=(7, 3), dlse=True, softcap=2.0)
    arrays = {name: getattr(usual, name).copy() for name in ("q", "k", "v", "do", "dlse")}
    huge = np.where(np.arange(3) % 2, -3e38, 3e38).astype(np.float32)
    for name in ("q", "do"):
        arrays[name][0, :, 4:] = huge
    arrays["dlse"][0, :, 4:] = 3e38
    for name in ("k", "v"):
        arrays[name][1, :, 3:] = huge
    poisoned = replace(usual, **arrays)
    for presentation in PRESENTATIONS:
        left, right = solve(usual, presentation), solve(poisoned, presentation)
        for output in ("o", "lse", "dq", "dk", "dv"):
            assert np.array_equal(getattr(left, output), getattr(right, output)), (output, presentation)


def test_scores_far_away_from_zero() -> None:
    """A constant channel moves all scores by a power of two: nothing changes but the log-sum-exp."""
    small = np.arange(4, dtype=np.float32).reshape(1, 1, 4, 1)
    v = np.array([1, -2, 3, 5], dtype=np.float32).reshape(1, 1, 4, 1)
    one = np.ones_like(small)
    do = np.ones((1, 1, 4, 1), dtype=np.float32)

    def moved(by: float) -> Result:
        case = Case(np.concatenate([one, one], -1), np.concatenate([small, by * one], -1), v, do=do, scale=1.0)
        return solve(case, Presentation(k_blocks=(1,)))

    home = moved(0.0)
    for by in (-(2.0**20), -128.0, 128.0, 2.0**20):
        away = moved(by)
        assert np.array_equal(home.o, away.o)  # type: ignore[arg-type]
        assert home.lse is not None and away.lse is not None
        assert np.array_equal(away.lse, (home.lse.astype(np.float64) + by).astype(np.float32))


def test_no_warning_leaks() -> None:
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for dtype in FORMATS:
            for case in all_cases(dtype).values():
                solve(case, Presentation("mask", (2,), (2,)), round_p=True)
            top = FORMATS[dtype].max
            overflowing = make(dtype, size=1.0)
            solve(replace(overflowing, v=np.full_like(overflowing.v, top), do=np.full_like(overflowing.do, top)))


def test_rounds_once_from_float64_to_bfloat16() -> None:
    """1 + 2^-8 is halfway between two neighbours; a trace above must go up, though float32 drops the trace."""
    half = 1 + 2.0**-8
    above, below = half + 2.0**-40, half - 2.0**-40
    values = np.array([above, below, half, -above, -below, np.inf, -np.inf, 3e38, 1e300, 0.0, 2.0**-140])
    with np.errstate(over="ignore"):
        got = _stored(values, FORMATS["bfloat16"].dtype).astype(np.float64)
    up = 1 + 2.0**-7
    largest = 3e38 / 2.0**127  # rounded to eight significand bits, by hand
    assert got.tolist() == [up, 1, 1, -up, -1, math.inf, -math.inf, round(largest * 128) * 2.0**120, math.inf, 0, 0]


def test_deterministic_and_inputs_untouched() -> None:
    case = feature_cases("float16")["many"]
    digest = case.digest
    first, second = solve(case), solve(case)
    assert Case(**vars_of(case)).digest == digest
    for output in set(OUTPUTS) - {"dsink"}:
        assert getattr(first, output).tobytes() == getattr(second, output).tobytes()


def vars_of(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in case.__dataclass_fields__}


# -- the front -------------------------------------------------------------------------------


def test_candidate_computes_what_is_wanted() -> None:
    case = make()
    forward = NUMPY_BLOCKED.run(case, Presentation(), frozenset({"o"}))
    assert forward.o is not None and forward.dq is None
    both = NUMPY_BLOCKED.run(case, Presentation(), frozenset({"dq"}))
    assert both.dq is not None


def test_attention_of_plain_arrays() -> None:
    case = make(causal="bottom-right")
    plain = attention(case.q, case.k, case.v, causal="bottom-right")
    assert np.array_equal(plain.o, solve(case).o) and plain.dq is None  # type: ignore[arg-type]


def test_profiles_follow_the_arithmetic() -> None:
    assert NUMPY_BLOCKED.profile("float16").u_p == 0
    rounding = candidate(round_p=True, name="rounding")
    assert rounding.profile("float16").u_p == FORMATS["float16"].unit
    assert rounding.profile("float32").u_p == 0
    assert candidate(accumulator="float64").profile("bfloat16").u == FORMATS["float64"].unit
    assert "float64" not in candidate(accumulator="float32").dtypes


@pytest.mark.parametrize(
    ("dtype", "accumulator", "message"),
    [
        ("float64", "float32", "accumulator is 'float32'; with float64 it must be float64"),
        ("float16", "float16", "accumulator is 'float16'; with float16 it must be float32 or float64"),
    ],
)
def test_accumulator_that_cannot_hold_the_storage_format(dtype: str, accumulator: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(make(dtype), accumulator=accumulator)


def test_backward_without_upstream_gradient() -> None:
    with pytest.raises(ValueError, match="the case holds no do"):
        solve(make(backward=False), backward=True)


# -- wrong sinks, dropout and memory are seen ----------------------------------------------------


def wrong_results(case: Case) -> dict[str, Result]:
    """What kernels that mistake sinks or dropout return for the last of more_cases."""
    right = solve(case)
    assert case.keep is not None and case.sinks is not None and right.dsink is not None and right.o is not None
    unsunk, undropped = solve(replace(case, sinks=None)), solve(replace(case, keep=None, dropout=None))
    other_keep = solve(replace(case, keep=np.roll(case.keep, 1, axis=-1)))
    unscaled = solve(replace(case, dropout=0.0))
    return {
        "sinks ignored": replace(unsunk, dsink=right.dsink),
        "sinks of the next head": solve(replace(case, sinks=np.roll(case.sinks, 1))),
        "sink left out of the log-sum-exp": replace(right, lse=unsunk.lse),
        "dsink of the other sign": replace(right, dsink=-right.dsink),
        "dsink without the log-sum-exp's gradient": replace(right, dsink=solve(replace(case, dlse=None)).dsink),
        "dsink zero": replace(right, dsink=0 * right.dsink),
        "dsink missing": replace(right, dsink=None),
        "dropout ignored": undropped,
        "dropped where kept": solve(replace(case, keep=~case.keep)),
        "not scaled by 1 / (1 - p)": unscaled,
        "another mask on the way back": replace(right, dq=other_keep.dq, dk=other_keep.dk, dv=other_keep.dv),
        "dV not dropped": replace(right, dv=undropped.dv),
        "dP not dropped": replace(right, dq=undropped.dq, dk=undropped.dk),
        "dV not scaled": replace(right, dv=unscaled.dv),
    }


@pytest.mark.parametrize("dtype", FORMATS)
def test_mistaken_sinks_and_dropout_are_rejected(dtype: str) -> None:
    case = more_cases(dtype)["sinks, dropout and more"]
    expected = answer(case, Arithmetic().profile(dtype))
    assert worst_ratio(case, solve(case), expected) <= 1
    for name, result in wrong_results(case).items():
        assert worst_ratio(case, result, expected) > 1, name


def loads_padding(tiles: _Tiles, array: np.ndarray, lengths: Any) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=tiles.dtype)


def ignores_strides(tiles: _Tiles, array: np.ndarray, lengths: Any) -> np.ndarray:
    return np.resize(buffer(array), array.shape).astype(tiles.dtype)


def reads_hidden(tiles: _Tiles, array: np.ndarray, hidden: Any, j0: int, j1: int) -> np.ndarray:
    return array[:, :, j0:j1]


def pages_in_order(pool: np.ndarray, table: np.ndarray, size: int) -> np.ndarray:
    return READ_PAGES(pool, np.arange(table.size).reshape(table.shape) % len(pool), size)


def last_block_unwritten(size: int, blocks: tuple[int, ...]) -> list[tuple[int, int]]:
    return partition(size, blocks)[:-1] if blocks == (4,) else partition(size, blocks)


READ_PAGES = numpy_blocked._read_pages
RAGGED: dict[str, Any] = {"q_lengths": (4, 6), "k_lengths": (7, 3)}


@pytest.mark.parametrize(
    ("where", "name", "fault", "presentation", "fields"),
    [
        (_Tiles, "load", loads_padding, Presentation(poison="nan"), RAGGED),
        (_Tiles, "load", loads_padding, Presentation(poison="inf"), RAGGED),
        (_Tiles, "load", ignores_strides, Presentation(layouts=("contiguous",) * 3 + ("sliced",)), {}),
        (_Tiles, "load", ignores_strides, Presentation(layouts=("contiguous", "transposed") + ("contiguous",) * 2), {}),
        (_Tiles, "seen", reads_hidden, Presentation(poison="nan", poison_hidden=True), {"mask": np.arange(7) % 3 > 0}),
        (numpy_blocked, "_read_pages", pages_in_order, Presentation(page_size=2), {}),
        (numpy_blocked, "partition", last_block_unwritten, Presentation(q_blocks=(4,), poison="nan"), {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mistaken_memory_shows(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, fault: Any, presentation: Presentation, fields: Any
) -> None:
    case = make(**fields)
    plain = solve(case, Presentation("flags", presentation.q_blocks))
    monkeypatch.setattr(where, name, fault)
    result = solve(case, presentation)
    outputs = ("o", "lse", "dq", "dk", "dv")
    assert any(not np.array_equal(getattr(plain, output), getattr(result, output)) for output in outputs)


# -- the comparison can fail -------------------------------------------------------------------


def revealing(name: str, dtype: str) -> tuple[Case, Presentation]:
    """A small case that shows the fault."""
    ones = np.ones((1, 1, 1, 1), dtype=FORMATS[dtype].dtype)
    presentation = Presentation(k_blocks=(2,))
    cases = {
        "unguarded-empty-row": lambda: make(dtype, mask=np.array([[True], [False]]), sq=2),
        "backward-always-causal": lambda: make(dtype, sq=2, sk=2),
        "finite-start": lambda: Case(256 * ones, -256 * ones, ones, scale=1.0),
        "no-rescale": lambda: Case(ones, np.concatenate([0 * ones, ones, 2 * ones], 2), np.repeat(ones, 3, 2)),
        "tail-scores-zero": lambda: Case(32 * ones, -32 * ones, ones, scale=1.0, do=ones),
        "causal-without-offset": lambda: make(dtype, sq=1, sk=2, causal="bottom-right"),
        "lse-in-base-two": lambda: make(dtype, sq=1, sk=2),
        "dlse-ignored": lambda: make(dtype, sq=1, sk=2, dlse=True),
        "group-not-summed": lambda: make(dtype, hk=1, sq=1, sk=2),
        "tanh-of-exponentials": lambda: Case(256 * ones, 256 * ones, ones, scale=1.0, softcap=2.0**-4),
        "one-element-half": lambda: Case(ones, ones, ones),
        "one-element-float32": lambda: make(dtype, sq=1, sk=1, d=1),
    }
    return cases[name](), presentation


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, f in FAULTS.items() for dtype in f.dtypes])
def test_each_fault_is_rejected_and_only_where_it_says(name: str, dtype: str) -> None:
    fault = FAULTS[name]
    case, presentation = revealing(name, dtype)
    profile = fault.candidate().profile(dtype)
    expected = answer(case, profile)
    want = ALL if case.do is not None else frozenset({"o", "lse"})
    result = fault.candidate().run(case, presentation, want)
    assert worst_ratio(case, result, expected) > 1
    # with the outputs it says it touches taken from the right kernel, nothing is wrong
    right = RIGHT.run(case, presentation, want)
    mended = replace(result, **{output: getattr(right, output) for output in fault.outputs})
    assert worst_ratio(case, mended, expected) <= 1


@pytest.mark.parametrize("dtype", FORMATS)
def test_faults_are_right_where_they_do_not_apply(dtype: str) -> None:
    """A fault breaks one thing: on a plain causal square case only those of every case may show."""
    case = make(dtype, sq=4, sk=4, causal="bottom-right", size=0.5)
    everywhere = {"lse-in-base-two", "one-element-half", "one-element-float32"}
    for name, fault in FAULTS.items():
        if dtype in fault.dtypes and name not in everywhere:
            ours = fault.candidate()
            ratio = worst_ratio(case, ours.run(case, Presentation(), ALL), answer(case, ours.profile(dtype)))
            assert ratio <= 1, name
