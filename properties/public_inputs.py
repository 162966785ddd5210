"""What public test suites feed attention kernels, and the plain reference that they compare with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ..oracle.case import Case, Presentation
from ..oracle.formats import FORMATS
from ..oracle.visibility import broadcast_mask, distances, kept, rows_judged, visible

Array = np.ndarray

#: "tiny": randn, over TINY instead of PROBLEMS
LAWS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "randn": lambda rng, shape: rng.standard_normal(shape),
    "randn / 10": lambda rng, shape: 0.1 * rng.standard_normal(shape),
    "randn / 2": lambda rng, shape: 0.5 * rng.standard_normal(shape),
    "tiny": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.random(shape),
}


@dataclass(frozen=True)
class Problem:
    """One test of a public suite: ``shape`` (B, Hq, Hk, Sq, Sk, D, Dv), the features it has, and how
    it is presented. ``masks`` draws what random arrays there are beside q, k, v and dO."""

    name: str
    shape: tuple[int, int, int, int, int, int, int]
    fields: dict[str, Any] = field(default_factory=dict)
    masks: Callable[[np.random.Generator, tuple[int, ...], np.dtype], dict[str, Any]] | None = None
    presentation: Presentation = field(default_factory=lambda: Presentation(q_blocks=(16,), k_blocks=(16,)))


def _mask(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    b, _, _, sq, sk, _, _ = shape
    seen = rng.random((b, 1, sq, sk)) < 0.7
    seen[..., 0] = True  # no row without a key
    return {"mask": seen}


def _bias(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    b, hq, _, sq, sk = shape[:5]
    return {"bias": rng.standard_normal((b, hq, sq, sk)).astype(dtype)}


def _bias_of_heads(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    return {"bias": rng.standard_normal((1, shape[1], shape[3], shape[4])).astype(dtype)}


def _slopes(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    wide = np.float64 if dtype == np.float64 else np.float32
    return {"alibi_slopes": (2.0 ** -np.arange(1, shape[1] + 1)).astype(wide)}


def _sinks(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    wide = np.float64 if dtype == np.float64 else np.float32
    return {"sinks": rng.standard_normal(shape[1]).astype(wide)}


def _keep(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    b, hq, _, sq, sk = shape[:5]
    return {"dropout": 0.25, "keep": rng.random((b, hq, sq, sk)) >= 0.25}


def _ones(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    b, hq, _, sq, _, _, dv = shape
    return {"do": np.ones((b, hq, sq, dv), dtype)}


def _shown(**fields: Any) -> Presentation:
    return Presentation(q_blocks=(16,), k_blocks=(16,), **fields)


_OWN = Presentation()  # the kernel's own, small blocks
_STRIDED = ("transposed",) * 4
_SUMMED = ("contiguous", "contiguous", "contiguous", "expanded")

PROBLEMS: tuple[Problem, ...] = (
    Problem("5 keys", (1, 1, 1, 5, 5, 4, 4), presentation=_OWN),
    Problem("17 keys, causal", (1, 2, 2, 17, 17, 8, 8), {"causal": "top-left"}, presentation=_OWN),
    Problem("3 queries, 11 keys, causal", (1, 1, 1, 3, 11, 8, 8), {"causal": "bottom-right"}, presentation=_OWN),
    Problem("64 keys", (1, 2, 2, 64, 64, 32, 32)),
    Problem("128 keys", (1, 1, 1, 128, 128, 64, 64)),
    Problem("128 keys, causal", (2, 1, 1, 128, 128, 64, 64), {"causal": "top-left"}),
    Problem("97 keys", (1, 1, 1, 97, 97, 64, 64)),
    Problem("97 keys, causal", (1, 1, 1, 97, 97, 64, 64), {"causal": "bottom-right"}),
    Problem("64 queries, 113 keys, causal", (1, 1, 1, 64, 113, 32, 32), {"causal": "bottom-right"}),
    Problem("113 queries, 64 keys, causal", (1, 1, 1, 113, 64, 32, 32), {"causal": "bottom-right"}),
    Problem("1 query, 113 keys", (2, 2, 2, 1, 113, 64, 64)),
    Problem("grouped heads", (2, 4, 2, 64, 64, 32, 32)),
    Problem("one key head, causal", (1, 4, 1, 64, 64, 32, 32), {"causal": "top-left"}),
    Problem("ragged lengths", (3, 2, 2, 64, 64, 32, 32), {"q_lengths": (64, 33, 7), "k_lengths": (64, 47, 20)}),
    Problem("ragged lengths, causal", (2, 2, 1, 48, 64, 32, 32),
            {"causal": "bottom-right", "q_lengths": (48, 30), "k_lengths": (64, 41)}),
    Problem("a mask", (2, 2, 2, 64, 64, 32, 32), masks=_mask),
    Problem("a bias", (1, 2, 2, 64, 64, 32, 32), masks=_bias),
    Problem("a bias for all entries, causal", (2, 2, 2, 48, 48, 32, 32), {"causal": "top-left"}, _bias_of_heads),
    Problem("a window", (1, 2, 2, 96, 96, 32, 32), {"causal": "bottom-right", "window": (24, 0)}),
    Problem("a window on both sides", (1, 1, 1, 64, 96, 32, 32), {"window": (16, 8)}),
    Problem("softcap", (1, 2, 2, 64, 64, 32, 32), {"softcap": 15.0, "causal": "top-left"}),
    Problem("ALiBi", (1, 4, 4, 64, 64, 32, 32), {"causal": "bottom-right"}, _slopes),
    Problem("another scale", (1, 1, 1, 64, 64, 32, 32), {"scale": 0.25}),
    Problem("40 channels", (1, 1, 1, 64, 64, 40, 40)),
    Problem("wide values", (1, 2, 2, 64, 64, 48, 32), {"causal": "top-left"}),
    Problem("sinks", (1, 2, 2, 64, 64, 32, 32), {"causal": "top-left"}, _sinks),
    Problem("dropout", (1, 2, 2, 64, 64, 32, 32), masks=_keep),
    Problem("transposed inputs", (1, 2, 2, 64, 64, 32, 32), presentation=_shown(layouts=_STRIDED)),
    Problem("gradient of the sum", (1, 2, 2, 64, 64, 32, 32), masks=_ones, presentation=_shown(layouts=_SUMMED)),
    Problem("pages of 16 keys", (2, 2, 2, 16, 64, 32, 32), {"k_lengths": (64, 37)}, presentation=_shown(page_size=16)),
)  # fmt: skip

TINY: tuple[Problem, ...] = (
    Problem("5 keys", (1, 1, 1, 4, 5, 3, 3), presentation=_OWN),
    Problem("9 keys, causal", (1, 1, 1, 9, 9, 2, 2), {"causal": "top-left"}, presentation=_OWN),
    Problem("grouped heads", (1, 2, 1, 3, 4, 3, 3), presentation=_OWN),
    Problem("a mask", (1, 1, 1, 4, 5, 3, 3), masks=_mask, presentation=_OWN),
    Problem("a bias", (1, 2, 2, 3, 4, 2, 2), masks=_bias, presentation=_OWN),
    Problem("ragged lengths", (2, 1, 1, 4, 5, 2, 2), {"q_lengths": (4, 2), "k_lengths": (5, 3)}, presentation=_OWN),
    Problem("softcap", (1, 1, 1, 4, 4, 3, 3), {"softcap": 2.0}, presentation=_OWN),
    Problem("sinks", (1, 2, 2, 4, 4, 2, 2), {}, _sinks, presentation=_OWN),
    Problem("dropout", (1, 1, 1, 4, 6, 2, 2), {}, _keep, presentation=_OWN),
)


def problems(law: str) -> tuple[Problem, ...]:
    """The problems that a law is drawn for."""
    return TINY if law == "tiny" else PROBLEMS


@cache
def case_of(problem: int, law: str, dtype: str) -> Case:
    """The inputs of a problem under a law, the same for every kernel."""
    spec = problems(law)[problem]
    b, hq, hk, sq, sk, d, dv = spec.shape
    rng = np.random.default_rng([problem, list(FORMATS).index(dtype)])
    draw = LAWS[law]
    stored = FORMATS[dtype].dtype
    arrays = {
        name: draw(rng, shape).astype(stored)
        for name, shape in (
            ("q", (b, hq, sq, d)),
            ("k", (b, hk, sk, d)),
            ("v", (b, hk, sk, dv)),
            ("do", (b, hq, sq, dv)),
        )
    }
    more = spec.masks(rng, spec.shape, stored) if spec.masks is not None else {}
    return Case(**{**arrays, **spec.fields, **more})


# -- the plain reference ---------------------------------------------------------------------------


def plain_attention(case: Case, rounded: Callable[[Array], Array], wide: type) -> dict[str, Array]:
    """Attention as a textbook has it, whole matrices at a time, with ``rounded`` after every product and
    softmax: nothing in float64 for a reference, rounding to storage for a run in the same precision."""
    b, hq, hk, sq, sk, d, dv = case.shape
    assert case.do is not None
    q: Array = case.q.astype(wide)
    do: Array = case.do.astype(wide)
    k: Array = np.repeat(case.k.astype(wide), hq // hk, axis=1)
    v: Array = np.repeat(case.v.astype(wide), hq // hk, axis=1)
    seen, scale = visible(case), wide(1 / math.sqrt(d) if case.scale is None else case.scale)
    s = rounded(rounded(q @ k.swapaxes(2, 3)) * scale)
    slope = np.ones_like(s)
    if case.softcap is not None:
        tanh = rounded(np.tanh(s / wide(case.softcap)))
        s, slope = rounded(tanh * wide(case.softcap)), 1 - tanh * tanh
    if case.alibi_slopes is not None:
        slopes: Array = np.broadcast_to(case.alibi_slopes, (b, hq)).astype(wide)
        s = s - slopes[..., None, None] * np.abs(distances(case))[:, None].astype(wide)
    if case.bias is not None:
        s = rounded(s + broadcast_mask(case, case.bias).astype(wide))
    s = np.where(seen, s, -np.inf).astype(wide)
    sinks = np.full(hq, -np.inf) if case.sinks is None else case.sinks
    sink: Array = np.broadcast_to(sinks.astype(wide)[:, None, None], (b, hq, sq, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.maximum(s.max(axis=3, keepdims=True, initial=-np.inf), sink)
        top = np.where(np.isneginf(top), 0, top)
        w, of_sink = np.exp(s - top), np.exp(sink - top)
        total = w.sum(axis=3, keepdims=True) + of_sink
        lse = (top + np.log(total))[..., 0]
        p = rounded(np.where(total == 0, 0, w / total))
        p_sink = np.where(total == 0, 0, of_sink / total)
    factor = wide(1)
    if case.keep is not None and case.dropout is not None:
        factor = kept(case).astype(wide) / wide(1 - case.dropout)
    o = rounded(rounded(p * factor) @ v)
    do = np.where(rows_judged(case)[:, None, :, None], do, 0)
    dp = rounded(rounded(do @ v.swapaxes(2, 3)) * factor)
    delta = (p * dp).sum(axis=3, keepdims=True)
    ds = rounded(p * (dp - delta))
    raw = rounded(ds * slope) * scale

    def of_key_heads(x: Array) -> Array:
        return rounded(x.reshape(b, hk, hq // hk, *x.shape[2:]).sum(axis=2))

    found = {
        "o": o,
        "lse": lse,
        "dq": rounded(raw @ k),
        "dk": of_key_heads(raw.swapaxes(2, 3) @ q),
        "dv": of_key_heads(rounded(p * factor).swapaxes(2, 3) @ do),
    }
    if case.bias is not None:
        stored = (1,) * (4 - case.bias.ndim) + case.bias.shape
        axes = tuple(n for n in range(4) if stored[n] == 1)
        found["dbias"] = rounded(ds.sum(axis=axes, keepdims=True)).reshape(case.bias.shape)
    if case.sinks is not None:
        found["dsink"] = (-p_sink * delta).sum(axis=(0, 2, 3))
    return found


@lru_cache(maxsize=512)
def references(problem: int, law: str, dtype: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """The float64 reference and the run in the same precision, both as float64."""
    case, stored = case_of(problem, law, dtype), FORMATS[dtype].dtype
    right = plain_attention(case, lambda x: x, np.float64)
    wide = np.float64 if dtype == "float64" else np.float32
    plain = plain_attention(case, lambda x: x.astype(stored).astype(wide), wide)
    return right, {name: x.astype(np.float64) for name, x in plain.items()}
