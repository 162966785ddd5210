"""Cases made from cases: parts of them, keys in another order, heads repeated, positions as masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..oracle.case import Case
from ..oracle.visibility import broadcast_mask, distances, visible

Array = np.ndarray


def _along(array: Array | None, axis: int, indices: Sequence[int]) -> Array | None:
    return None if array is None else np.take(array, indices, axis=axis)


def _of_pairs(case: Case, axis: int, indices: Sequence[int]) -> dict[str, Any]:
    """mask, bias and keep with ``indices`` taken of one of their four axes."""
    out: dict[str, Any] = {}
    for name in ("mask", "bias", "keep"):
        array = getattr(case, name)
        at = axis - (4 - array.ndim) if array is not None else -1
        if at >= 0 and array.shape[at] > 1:
            out[name] = np.take(array, indices, axis=at)
    return out


def entries(case: Case, indices: Sequence[int]) -> Case:
    """These batch entries, in this order; an index may come twice."""
    changes: dict[str, Any] = {
        name: _along(getattr(case, name), 0, indices) for name in ("q", "k", "v", "do", "dlse")
    } | _of_pairs(case, 0, indices)
    for name in ("q_lengths", "k_lengths"):
        lengths = getattr(case, name)
        changes[name] = None if lengths is None else tuple(lengths[n] for n in indices)
    if case.alibi_slopes is not None and case.alibi_slopes.ndim == 2:
        changes["alibi_slopes"] = case.alibi_slopes[list(indices)]
    return replace(case, **changes)


def keys(case: Case, indices: Sequence[int]) -> Case:
    """These keys, in this order. Positions and lengths mean what they mean in the new case."""
    changes: dict[str, Any] = {name: _along(getattr(case, name), 2, indices) for name in ("k", "v")}
    if case.k_lengths is not None:
        changes["k_lengths"] = tuple(sum(j < n for j in indices) for n in case.k_lengths)
    return replace(case, **changes, **_of_pairs(case, 3, indices))


def queries(case: Case, indices: Sequence[int]) -> Case:
    """These query rows, in this order. Positions and lengths mean what they mean in the new case."""
    changes: dict[str, Any] = {name: _along(getattr(case, name), 2, indices) for name in ("q", "do", "dlse")}
    if case.q_lengths is not None:
        changes["q_lengths"] = tuple(sum(i < n for i in indices) for n in case.q_lengths)
    return replace(case, **changes, **_of_pairs(case, 2, indices))


def heads(case: Case, of_queries: Sequence[int], of_keys: Sequence[int]) -> Case:
    """These query heads over these key heads, in this order: as many of the former for each of the latter."""
    changes: dict[str, Any] = {name: _along(getattr(case, name), 1, of_queries) for name in ("q", "do", "dlse")}
    changes |= {name: _along(getattr(case, name), 1, of_keys) for name in ("k", "v")}
    changes |= {name: _along(getattr(case, name), -1, of_queries) for name in ("alibi_slopes", "sinks")}
    return replace(case, **changes, **_of_pairs(case, 1, of_queries))


def alone(case: Case, entry: int) -> Case:
    """A batch entry by itself, cut to its lengths. The alignments are the same as in the batch."""
    one = entries(case, [entry])
    rows, seen = one.q_length[0], one.k_length[0]
    return replace(queries(keys(one, range(seen)), range(rows)), q_lengths=None, k_lengths=None)


def repeated_heads(case: Case) -> Case:
    """Every query head with a key head of its own, a copy of the one it shares."""
    return replace(case, k=np.repeat(case.k, case.group, axis=1), v=np.repeat(case.v, case.group, axis=1))


def key_heads(case: Case, indices: Sequence[int]) -> Case:
    """Other key heads under the same query heads."""
    return replace(case, k=case.k[:, list(indices)], v=case.v[:, list(indices)])


def second_head(case: Case) -> Case:
    """A case of one query head with a second one, of the first one's rows in reverse order."""
    changes: dict[str, Any] = {}
    for name in ("q", "do", "dlse"):
        array = getattr(case, name)
        changes[name] = None if array is None else np.concatenate([array, array[:, :, ::-1]], axis=1)
    for name in ("alibi_slopes", "sinks"):
        changes[name] = _along(getattr(case, name), -1, [0, 0])
    return replace(case, **changes)


def without_positions(case: Case) -> Case | None:
    """The same problem with causal, window and key lengths as a mask, and ALiBi as a bias.

    None where the format of the bias cannot hold ALiBi's numbers exactly.
    """
    changes: dict[str, Any] = {}
    if case.causal is not None or case.window is not None or case.k_lengths is not None:
        changes |= {"mask": visible(case), "causal": None, "window": None, "k_lengths": None}
    if case.alibi_slopes is not None:
        slopes = np.broadcast_to(case.alibi_slopes.astype(np.float64), case.q.shape[:2])
        added = -slopes[..., None, None] * np.abs(distances(case)[:, None]).astype(np.float64)
        if case.bias is not None:
            total = exact_sum(broadcast_mask(case, case.bias).astype(np.float64), added)
            if total is None:
                return None
            added = total
        bias = exactly(added, case.wide_format.dtype)
        if bias is None:
            return None
        changes |= {"alibi_slopes": None, "bias": bias}
    return replace(case, **changes) if changes else case


def exactly(numbers: Array, dtype: np.dtype) -> Array | None:
    """The same numbers in a format; None where it does not hold them all."""
    with np.errstate(over="ignore", under="ignore"):
        stored = numbers.astype(dtype)
    return stored if np.array_equal(stored.astype(np.float64), numbers.astype(np.float64)) else None


def exact_sum(a: Array, b: Array) -> Array | None:
    """a + b in float64, -inf staying -inf; None where a sum of finite numbers is not exact (by TwoSum)."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = a + b
        of_b = total - a
        error = (a - (total - of_b)) + (b - of_b)
    return total if (error == 0)[np.isfinite(a + np.zeros_like(b))].all() else None


def in_full(case: Case) -> Case:
    """The same problem with a bias of every pair's own (zeros where it had none), [B, Hq, Sq, Sk]."""
    b, hq, _, sq, sk, _, _ = case.shape
    bias = np.zeros((1, 1, 1, 1), case.wide_format.dtype) if case.bias is None else case.bias
    return replace(case, bias=np.array(np.broadcast_to(bias, (b, hq, sq, sk))))


def times(case: Case, factor: float, names: Sequence[str]) -> Case | None:
    """Arrays multiplied by a power of two; None where their format does not hold the products."""
    changes: dict[str, Any] = {}
    for name in names:
        array = getattr(case, name)
        if array is not None:
            with np.errstate(over="ignore"):
                product = array.astype(np.float64) * factor
            changes[name] = exactly(product, array.dtype) if np.isfinite(product).all() else None
            if changes[name] is None:
                return None
    return replace(case, **changes)
