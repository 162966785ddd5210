"""Hypothesis strategies for cases: small and nasty first.

Hypothesis chooses the structure: shapes around block edges, masks by structure, score patterns,
value laws, features, presentation; every axis combines with every other. The numbers themselves
come from a generator seeded by one drawn integer, so that large arrays stay cheap; a failing case
is then made small on the case itself (``reduce``), where every number can be simplified.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st

from ..oracle.case import LAYOUTS, POISONS, Case, Presentation
from ..oracle.formats import FORMATS, Format

Array = np.ndarray
Draw = Callable[..., Any]
T = TypeVar("T")

#: pairs (times batch and heads) of a case, by size class, small ones far more often
SIZES: tuple[int, ...] = (12, 12, 12, 12, 40, 40, 40, 160, 160, 600)


@dataclass(frozen=True)
class Plan:
    """What the draws are for.

    ``needs`` must be in every case ("backward", "dlse", "bias", "empty-row"), ``avoid`` are
    FEATURES that must not be; ``blocks`` are kernel block sizes around whose multiples lengths are
    drawn, in addition to small ones; ``takes_blocks``, ``takes_layouts``, ``takes_pages``,
    ``takes_packed``: draw block sizes, memory layouts with poison, pages, and packed batches for the
    presentation.
    """

    dtype: str
    needs: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()
    blocks: tuple[int, ...] = ()
    takes_blocks: bool = False
    takes_layouts: bool = False
    takes_pages: bool = False
    takes_packed: bool = False


#: features that a third of the cases do without
MANY = frozenset({"mask", "bias", "alibi", "softcap", "lengths", "window"})

_SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def cases(draw: Draw, plan: Plan) -> tuple[Case, Presentation]:
    """A case and a presentation for ``plan``.

    Shrinks towards one batch entry, one head, one query, one key, D = Dv = 1, no features.
    """
    rng = np.random.default_rng(draw(_SEEDS, label="seed of the numbers"))
    fmt = FORMATS[plan.dtype]
    if "empty-row" not in plan.needs and _one_in(draw, 3, "few features"):
        # kernels have fast paths that any mask or bias turns off
        plan = replace(plan, avoid=plan.avoid | (MANY - plan.needs))
    b, hq, hk, sq, sk, d, dv = shapes(draw, plan)
    lengths = _lengths(draw, plan, b, sq, sk)
    scale = _scales(draw, plan, d)
    q, k = _queries_and_keys(draw, fmt, rng, (b, hq, hk, sq, sk, d), scale)
    v = _values(draw, fmt, rng, (b, hk, sk, dv))
    alike = None
    if plan.takes_layouts and _one_in(draw, 10, "alike along an axis"):
        # what torch.expand makes, and what the layout "expanded" keeps
        alike, axis = _pick(draw, ["k", "v", "q"], "what is alike"), _pick(draw, [2, 1, 0], "axis")
        q, k, v = (_alike(x, axis) if name == alike else x for name, x in (("q", q), ("k", k), ("v", v)))
    wide = FORMATS["float64" if plan.dtype == "float64" else "float32"]
    backward = "backward" in plan.needs or ("backward" not in plan.avoid and _one_in(draw, 2, "backward"))
    do = _upstream(draw, fmt, rng, (b, hq, sq, dv)) if backward else None
    dlse = _upstream(draw, wide, rng, (b, hq, sq)) if "dlse" in plan.needs else None
    causal, window = _causal_and_window(draw, plan, sq, sk, lengths)
    visibility = _masks(draw, plan, rng, fmt, wide, (b, hq, hk, sq, sk))
    slopes = None
    if "alibi" not in plan.avoid and _one_in(draw, 8, "alibi"):
        shape = _pick(draw, [(hq,), (b, hq)], "shape of the slopes")
        slopes = (rng.integers(1, 9, size=shape) / 8.0 * rng.choice([1.0, 1.0, -1.0], size=shape)).astype(wide.dtype)
    softcap = None
    if "softcap" not in plan.avoid and _one_in(draw, 5, "softcap"):
        softcap = _pick(draw, [2.0, 0.5, 10.0, 30.0], "cap")
    sinks = None
    if "sinks" in plan.needs or (
        "sinks" not in plan.avoid and "empty-row" not in plan.needs and _one_in(draw, 8, "sinks")
    ):
        sinks = _to(wide, _pick(draw, [1.0, 4.0, 100.0], "size of the sinks") * rng.standard_normal((hq,)))
    dropout, keep = None, None
    if "dropout" in plan.needs or ("dropout" not in plan.avoid and _one_in(draw, 10, "dropout")):
        dropout = _pick(draw, [0.5, 0.125, 0.75, 0.0], "dropout probability")
        keep = rng.random((b, hq, sq, sk)) >= dropout
    case = Case(
        q=q,
        k=k,
        v=v,
        do=do,
        dlse=dlse,
        scale=scale,
        softcap=softcap,
        causal=causal,
        window=window,
        alibi_slopes=slopes,
        q_lengths=lengths[0],
        k_lengths=lengths[1],
        sinks=sinks,
        dropout=dropout,
        keep=keep,
        **visibility,
    )
    return case, presentations(draw, plan, case, alike)


def shapes(draw: Draw, plan: Plan) -> tuple[int, int, int, int, int, int, int]:
    """(B, Hq, Hk, Sq, Sk, D, Dv) within a size class. Shrinks towards all ones."""
    budget = _pick(draw, SIZES, "size class")
    b = _pick(draw, [1, 1, 1, 2], "B")
    hk = _pick(draw, [1, 1, 1, 2, 3], "Hk")
    group = 1 if "gqa" in plan.avoid else _pick(draw, [1, 1, 2, 3], "query heads per key head")
    grouped = False
    if budget <= 12:
        # the smallest cases spend their pairs on keys, not on heads
        b, hk, group = _pick(draw, [(1, 1, 1), (b, hk, group)], "heads")
    elif _one_in(draw, 6, "as many entries as key heads"):
        b, hk, group = 2, 2, min(group, 2)  # a mask per entry that is read as one per head fits here
    elif "gqa" not in plan.avoid and _one_in(draw, 6, "several groups"):
        b, hk, group = 1, max(hk, 2), max(group, 2)  # which of the two maps of heads it is shows only here
        grouped = True
    edges = _edges(plan, budget)
    sq = 1 if _one_in(draw, 8, "decoding") else _pick(draw, edges, "Sq")
    sk = _pick(draw, edges, "Sk")
    while b * hk * group * sq * sk > 2 * budget and max(b * hk * group, sq) > 1:
        # too many pairs: give up queries down to a few, then heads, batch and the rest
        if sq > 3:
            sq = max(2, sq // 4)
        elif group > 1 and hk > 1 and b == 1 and not grouped:
            hk = 1
        elif grouped:
            sq, grouped = 1, False
        elif b > 1 and hk == 1:
            b = 1
        elif hk > 1 and b > 1:
            b = hk = 1
        elif group > 1:
            group = 1
        elif hk > 1:
            hk = 1
        else:
            sq = 1
    if "zero-size" not in plan.avoid and "empty-row" not in plan.needs and _one_in(draw, 30, "zero size"):
        axis = _pick(draw, ["Sk", "Sq", "B"], "axis")
        b, sq, sk = (0 if axis == "B" else b), (0 if axis == "Sq" else sq), (0 if axis == "Sk" else sk)
    d = _pick(draw, [1, 1, 2, 3, 4, 5, 8, 16] if budget < 600 else [4, 16, 33, 64], "D")
    dv = d
    if "dv!=d" not in plan.avoid:
        dv = _pick(draw, [d, d, 1, 2, 3, 5], "Dv")
    return b, hk * group, hk, sq, sk, d, dv


def _edges(plan: Plan, budget: int) -> list[int]:
    """Lengths at and beside block edges that fit the size class."""
    edges: list[int] = [2, 3, 4, 5, 1]
    for block in (4, 8, 16, *plan.blocks):
        edges += [n for n in (block - 1, block, block + 1, 2 * block - 1, 2 * block + 1, 3 * block) if n > 0]
    # one axis may be as long as the budget, with a single query or key on the other
    longest = max(5, budget // 2, *(n for n in (block + block // 2 for block in plan.blocks) if budget >= 600))
    return [n for n in edges if n <= longest]


@cache
def _index(n: int) -> st.SearchStrategy[int]:
    # built once: making a strategy costs more than drawing from it
    return st.sampled_from(range(n))


def _pick(draw: Draw, options: Sequence[T], label: str) -> T:
    """One of the options; shrinks towards the first."""
    return options[draw(_index(len(options)), label=label)]


def _one_in(draw: Draw, n: int, label: str) -> bool:
    """True once in n draws; shrinks towards False."""
    return bool(draw(_index(n), label=label) == n - 1)


def _lengths(draw: Draw, plan: Plan, b: int, sq: int, sk: int) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    if "lengths" in plan.avoid or b == 0 or not _one_in(draw, 5, "ragged lengths"):
        return None, None
    least = 0 if "empty-row" not in plan.avoid else min(1, sk)
    queries = tuple(_pick(draw, range(sq + 1), "query length") for _ in range(b))
    keys = tuple(_pick(draw, range(least, sk + 1), "key length") for _ in range(b))
    which = _pick(draw, ["keys", "queries", "both"], "ragged")
    return (None if which == "keys" else queries), (None if which == "queries" else keys)


def _scales(draw: Draw, plan: Plan, d: int) -> float | None:
    if "scale" in plan.avoid:
        return None
    choices: list[float | None] = [None, None, None, 1.0, 0.5, 0.125, float(np.float32(d**-0.5)), 2.0]
    if "scale<=0" not in plan.avoid:
        choices += [0.0, -1.0]
    return _pick(draw, choices, "scale")


# -- numbers --------------------------------------------------------------------------------------

SCORE_LAWS: tuple[str, ...] = (
    "normal",
    "small integers",
    "normal",
    "ascending",
    "descending",
    "one large, last",
    "repeated maxima",
    "all equal",
    "outlier channels",
    "correlated keys",
    "zero",
)


def _queries_and_keys(
    draw: Draw, fmt: Format, rng: np.random.Generator, shape: tuple[int, ...], scale: float | None
) -> tuple[Array, Array]:
    """Queries and keys with designed scores: channel 0 carries the design, the others noise.

    A shift far down or up is added to all scores of a row through the same channel.
    """
    b, hq, hk, sq, sk, d = shape
    law = _pick(draw, SCORE_LAWS, "scores")
    q, k = rng.standard_normal((b, hq, sq, d)), rng.standard_normal((b, hk, sk, d))
    # scores of the order of 1 whatever the scale: a saturated softmax hides most faults
    q = q / max(abs(_factor(scale, d)) * math.sqrt(d), 0.5)
    if law == "small integers":
        q, k = np.round(2 * q), np.round(1.5 * k)
    elif law == "outlier channels":
        channel = rng.integers(0, d)
        q[..., channel] *= 6
        k[..., channel] *= 2
    elif law == "correlated keys":
        k = k[:, :, :1] + 0.1 * k
    elif law == "zero":
        q = np.zeros_like(q)
    elif law != "normal":
        noise = _pick(draw, [0.0, 0.25], "noise in the other channels")
        q, k = q * noise, k * noise
        step = _pick(draw, [1.0, 0.5, 1.0, 2.0, 3.0, 20.0], "step between scores")
        q[..., 0] = 1.0
        k[..., 0] = _pattern(law, sk, step, rng) / _factor(scale, d)
    shift = _pick(draw, [0.0] * 15 + [-100.0, -6e4, 100.0, -1e5], "shift of all scores")
    if shift and (law not in ("normal", "zero") or d > 1):
        # a channel that is the same for all keys moves every score of a row by the shift
        at = 0 if d == 1 else d - 1
        size = math.sqrt(abs(shift) / abs(_factor(scale, d)))
        if d == 1:
            k = k + (math.copysign(abs(shift), shift) / _factor(scale, d))
        else:
            q[..., at], k[..., at] = size, math.copysign(size, shift * _factor(scale, d))
    magnitude = _pick(draw, [1.0] * 20 + [1e-3, 30.0, 1e15, 1e-20], "magnitude")
    return _to(fmt, q * magnitude), _to(fmt, k * (magnitude if magnitude < 1e10 else 1.0))


def _factor(scale: float | None, d: int) -> float:
    """What a product must be divided by to become the wanted score; 1 where the scale is 0."""
    return d**-0.5 if scale is None else (scale or 1.0)


def _pattern(law: str, n: int, step: float, rng: np.random.Generator) -> Array:
    ramp = np.arange(n) * step
    if law == "ascending":
        return ramp
    if law == "descending":
        return ramp[::-1].copy()
    if law == "one large, last":
        return np.where(np.arange(n) == n - 1, 4 * step, 0.0)
    if law == "repeated maxima":
        return step * rng.integers(0, 2, size=n).astype(np.float64)
    return np.full(n, step)


VALUE_LAWS: tuple[str, ...] = (
    "normal",
    "small integers",
    "one per key",
    "all one",
    "cancelling",
    "large",
    "tiny",
    "outlier",
    "one key",
)


def _values(draw: Draw, fmt: Format, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Values. "one per key" tells keys apart, "cancelling" makes sums small beside their terms."""
    law = _pick(draw, VALUE_LAWS[:4] * 3 + VALUE_LAWS, "values")
    x = rng.standard_normal(shape)
    if law == "small integers":
        x = np.round(2 * x)
    elif law == "one per key":
        x = np.broadcast_to(np.arange(1.0, shape[2] + 1)[:, None], shape) + np.zeros(shape)
    elif law == "all one":
        x = np.ones(shape)
    elif law == "cancelling":
        x = np.where(np.arange(shape[2])[:, None] % 2 == 0, 1.0, -1.0) * (4 + 0.1 * x)
    elif law == "large":
        x = x * min(1e4, fmt.max / 100)
    elif law == "tiny":
        x = x * fmt.tiny * 4
    elif law == "one key" and shape[2]:
        # what the others' probabilities lose is not hidden by the largest one's rounding
        x = np.where(np.arange(shape[2])[:, None] == rng.integers(0, shape[2]), 1.0 + np.abs(x), 0.0)
    elif law == "outlier":
        x = np.where(rng.random(shape) < 0.1, 100 * x, x)
    return _to(fmt, x)


def _upstream(draw: Draw, fmt: Format, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Upstream gradients: dense, integers, one-hot, with rows of zeros, large."""
    law = _pick(
        draw, ["normal", "normal", "small integers", "ones", "one-hot", "zero rows", "large"], "upstream gradient"
    )
    x = rng.standard_normal(shape)
    if law == "small integers":
        x = np.round(2 * x)
    elif law == "ones":
        x = np.ones(shape)
    elif law == "one-hot" and x.size:
        flat = np.zeros(x.size)
        flat[rng.integers(0, x.size)] = 1
        x = flat.reshape(shape)
    elif law == "zero rows":
        rows = rng.random(shape[:3]) < 0.5
        x = np.where(rows.reshape(rows.shape + (1,) * (len(shape) - 3)), 0.0, x)
    elif law == "large":
        x = x * 100
    return _to(fmt, x)


def _to(fmt: Format, x: Array) -> Array:
    """Rounded to the format. Numbers beyond its range become numbers near its end, with their sign:
    an input must be finite, and the end of the range is worth drawing."""
    with np.errstate(over="ignore"):
        stored = x.astype(fmt.dtype)
    beyond = ~np.isfinite(stored.astype(np.float64))
    if beyond.any():
        stored = np.where(beyond, np.copysign(fmt.max / 4, x).astype(fmt.dtype), stored)
    return stored


# -- what hides ------------------------------------------------------------------------------------


def _causal_and_window(
    draw: Draw, plan: Plan, sq: int, sk: int, lengths: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
) -> tuple[Any, tuple[int | None, int | None] | None]:
    square = sq == sk and lengths == (None, None)
    choices: list[str | None] = [None] * (2 if sq == 1 else 4)
    for alignment in ("top-left", "bottom-right"):
        # a ragged batch may hold square and other entries alike
        if ("causal-square" if square else f"causal-{alignment}") in plan.avoid:
            continue
        if not square and "causal-square" in plan.avoid:
            continue
        if "empty-row" in plan.avoid and alignment == "bottom-right" and (sq > sk or lengths != (None, None)):
            continue
        choices.append(alignment)
    causal = _pick(draw, choices, "causal")
    window = None
    if "window" not in plan.avoid and "empty-row" not in plan.avoid and _one_in(draw, 6, "window"):
        sides = [None, 0, 1, 2, 3, max(sk // 2, 1)]
        window = (_pick(draw, sides, "left"), _pick(draw, sides, "right"))
    return causal, window


MASKS: tuple[str, ...] = (
    "random",
    "first keys hidden",
    "last keys hidden",
    "one visible key",
    "tail only",
    "rows empty",
    "all hidden",
    "key padding",
)


def _masks(
    draw: Draw, plan: Plan, rng: np.random.Generator, fmt: Format, wide: Format, shape: tuple[int, ...]
) -> dict[str, Array | None]:
    """mask and bias: broadcast shapes on purpose, hidden keys by structure."""
    b, hq, _, sq, sk = shape
    kinds = ["none"] * 4
    if "mask" not in plan.avoid:
        kinds.append("mask")
    if "bias" not in plan.avoid:
        kinds += ["bias", "bias with -inf"]
        if "mask" not in plan.avoid:
            kinds.append("both")
    if "bias" in plan.needs:
        kinds = [k for k in kinds if k not in ("none", "mask")]
    if "empty-row" in plan.needs:
        kinds = [k for k in kinds if k in ("mask", "bias with -inf", "both")] or kinds
    kind = _pick(draw, kinds, "mask or bias")
    out: dict[str, Array | None] = {"mask": None, "bias": None}
    if kind in ("mask", "both"):
        out["mask"] = _visible(draw, plan, rng, _broadcast(draw, (b, hq, sq, sk)))
    if kind in ("bias", "bias with -inf", "both"):
        full = _broadcast(draw, (b, hq, sq, sk))
        stored = _pick(draw, [fmt, wide, fmt], "bias format")
        law = _pick(draw, ["normal", "integers", "normal", "large", "zeros and ones", "least", "least"], "bias")
        x = rng.standard_normal(full) * {"integers": 2.0, "large": 50.0}.get(law, 1.0)
        if law == "integers":
            x = np.round(x)
        elif law == "zeros and ones":
            x = np.where(x > 0, 1.0, 0.0)  # a mask in the eyes of who takes numbers for truth values
        elif law == "least":
            # the other way to say "hidden", but for rows in which it is said of all keys; where sums have no wider
            # range than the bias, a quarter of it, or they overflow and nothing can be judged
            x = np.where(rng.random(full) < rng.choice([0.5, 0.9]), -min(stored.max, wide.max / 4), 0.0)
        bias = _to(stored, x)
        if kind == "bias with -inf":
            seen = _visible(draw, plan, rng, full)
            bias = np.where(seen, bias, np.array(-np.inf, dtype=bias.dtype))
        out["bias"] = bias
    return out


def _broadcast(draw: Draw, full: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to [B, Hq, Sq, Sk]: some axes 1, leading ones perhaps left out."""
    axes = _pick(draw, ["1111", "0011", "1011", "0111", "1001", "0001", "0010", "1010"], "axes of the mask")
    shape = tuple(n if keep == "1" else 1 for n, keep in zip(full, axes, strict=True))
    if _one_in(draw, 2, "leave out leading ones"):
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
    return shape


def _visible(draw: Draw, plan: Plan, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    structures = list(MASKS)
    if "empty-row" in plan.needs:
        structures = ["rows empty", "rows empty", "all hidden"]
    elif "empty-row" in plan.avoid:
        structures = [m for m in structures if m not in ("rows empty", "all hidden", "random")]
    structure = _pick(draw, structures, "hidden keys")
    sk = shape[-1]
    column = np.arange(sk)
    cut = int(rng.integers(0, max(sk, 1)))
    seen = np.ones(shape, dtype=bool)
    if structure == "random":
        seen = rng.random(shape) < rng.choice([0.3, 0.7, 0.9])
    elif structure == "first keys hidden":
        seen &= column >= cut
    elif structure in ("last keys hidden", "key padding"):
        seen &= column <= cut
    elif structure == "one visible key":
        seen &= column == cut
    elif structure == "tail only":
        seen &= column >= sk - 1
    elif structure == "all hidden":
        seen &= False
    elif len(shape) > 1 and shape[-2] > 1:
        seen &= (rng.random((*shape[:-1], 1)) < 0.6) & (rng.random(shape) < 0.9)
    else:
        seen &= False
    return seen


def _alike(array: Array, axis: int) -> Array:
    """The first along an axis, as often as there were any."""
    return (
        np.repeat(array[(slice(None),) * axis + (slice(0, 1),)], array.shape[axis], axis=axis) if array.size else array
    )


def presentations(draw: Draw, plan: Plan, case: Case, alike: str | None) -> Presentation:
    """Route, and what the kernel takes of block sizes (ragged, smaller and larger than the axis),
    layouts, poison, pages and packing. ``alike``: which of q, k and v has an axis of stride 0 in it."""
    route = "flags"
    if case.causal is not None or case.window is not None:
        route = _pick(draw, ["flags", "flags", "mask"], "route")
    more: dict[str, Any] = {}
    if plan.takes_blocks:
        more = {"q_blocks": _blocks(draw, "query blocks"), "k_blocks": _blocks(draw, "key blocks")}
    if alike is not None:
        more["layouts"] = tuple("expanded" if name == alike else "contiguous" for name in ("q", "k", "v", "dO"))
    elif plan.takes_layouts and _one_in(draw, 4, "layouts"):
        more["layouts"] = tuple(_pick(draw, LAYOUTS, f"layout of {name}") for name in ("q", "k", "v", "dO"))
    if plan.takes_layouts and _one_in(draw, 4, "poison"):
        more["poison"] = _pick(draw, POISONS, "poison")
    if plan.takes_pages and _one_in(draw, 6 if case.k_lengths is None else 2, "pages"):
        more["page_size"] = _pick(draw, (1, 2, 4, max(1, case.k.shape[2] // 3), 16, 256), "page size")
    if plan.takes_packed and case.mask is None and case.bias is None and case.keep is None and route == "flags":
        more["packed"] = _one_in(draw, 8 if (case.q_lengths, case.k_lengths) == (None, None) else 2, "packed")
    return Presentation(route=route, **more)


def _blocks(draw: Draw, label: str) -> tuple[int, ...] | None:
    """None, one size, or a ragged partition of two or three sizes."""
    count = _pick(draw, (0, 0, 1, 2, 3), label)
    return tuple(_pick(draw, (1, 2, 3, 4, 5, 8, 16), label) for _ in range(count)) or None
