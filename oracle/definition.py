"""The definition: attention and its gradients in mpmath, to be read beside the formulas.

Slow on purpose. Every other way to the exact values is checked against this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mpmath
import numpy as np
from mpmath.libmp import from_float

from .case import Case
from .precision import working_bits
from .visibility import broadcast_mask, distances, visible

#: bits the definition works with beyond those of the certified engine that must contain it
EXTRA_BITS = 64


@dataclass(frozen=True, eq=False)
class Definition:
    """The exact answer, as object arrays of mpf.

    ``o [B, Hq, Sq, Dv]``, ``lse [B, Hq, Sq]`` (natural log); ``p [B, Hq, Sq, Sk]`` the
    probabilities, exactly 0 where a key is hidden. Where the case holds ``do`` also ``dq``, ``dk``,
    ``dv`` (shaped as q, k, v), ``ds`` (shaped as p: the gradient of the score as it enters the
    softmax, exactly 0 where hidden) and, where it holds a bias, ``dbias`` (shaped as the bias);
    None otherwise; ``dsink [Hq]`` likewise with sinks. A row that sees neither a key nor a sink, and a
    padded row, has o = 0 and lse = -inf and contributes 0 to every gradient.

    Computed with ``bits`` of working precision. Each number carries that precision with it:
    arithmetic on it runs at ``bits`` too, whatever mpmath's global context is set to.
    """

    o: np.ndarray
    lse: np.ndarray
    p: np.ndarray
    dq: np.ndarray | None
    dk: np.ndarray | None
    dv: np.ndarray | None
    ds: np.ndarray | None
    dbias: np.ndarray | None
    dsink: np.ndarray | None
    bits: int


@lru_cache(maxsize=32)
def context(bits: int) -> Any:
    """An mpmath context of its own, never changed after. Raises ValueError below 53 bits."""
    if bits < 53:
        raise ValueError(f"bits is {bits}; it must be at least 53, to hold the inputs exactly")
    ctx = mpmath.MPContext()
    ctx.prec = bits
    return ctx


def exact(ctx: Any, array: np.ndarray) -> np.ndarray:
    """The same numbers as mpf, without rounding, whatever the precision of ``ctx``.

    Every storage format is a subset of float64, and from_float takes all 53 bits as they are.
    """
    numbers = [ctx.make_mpf(from_float(x)) for x in array.astype(np.float64).ravel().tolist()]
    return np.array(numbers, dtype=object).reshape(array.shape)


def filled(shape: tuple[int, ...], value: Any) -> np.ndarray:
    """An object array that holds ``value`` everywhere."""
    out = np.empty(shape, dtype=object)
    out.fill(value)
    return out


@dataclass(frozen=True)
class Scores:
    """A case's inputs as mpf, and its scores row by row, without those that are hidden."""

    case: Case
    ctx: Any
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: Any
    softcap: Any  # mpf, or None
    added: np.ndarray | None  # bias - slope * distance, [B, Hq, Sq, Sk], read only where visible
    visible: np.ndarray

    def row(self, b: int, h: int, i: int) -> tuple[list[int], list[Any], list[Any]]:
        """J(i), the keys that row i of head h sees, ascending; the score s_ij of each; and its
        derivative ds_ij / draw_ij, which is 1 without a softcap."""
        ctx, hk = self.ctx, h // self.case.group
        keys = np.flatnonzero(self.visible[b, h, i]).tolist()
        s = [self.scale * ctx.fdot(self.q[b, h, i], self.k[b, hk, j]) for j in keys]
        slope = [ctx.one] * len(keys)
        if self.softcap is not None:
            ratio = [x / self.softcap for x in s]
            s = [self.softcap * ctx.tanh(x) for x in ratio]
            slope = [1 / ctx.cosh(x) ** 2 for x in ratio]  # 1 - tanh^2, without its cancellation
        if self.added is not None:
            s = [x + self.added[b, h, i, j] for x, j in zip(s, keys, strict=True)]
        return keys, s, slope


def scores(case: Case, bits: int) -> Scores:
    """The scores of a case at ``bits`` of working precision."""
    ctx = context(bits)
    return Scores(
        case=case,
        ctx=ctx,
        q=exact(ctx, case.q),
        k=exact(ctx, case.k),
        v=exact(ctx, case.v),
        scale=1 / ctx.sqrt(case.q.shape[3]) if case.scale is None else ctx.mpf(case.scale),
        softcap=None if case.softcap is None else ctx.mpf(case.softcap),
        added=_added(case, ctx),
        visible=visible(case),
    )


def _added(case: Case, ctx: Any) -> np.ndarray | None:
    """bias_ij - slope_h |i + offset - j|; None where the case has neither."""
    if case.bias is None and case.alibi_slopes is None:
        return None
    b, hq, _, sq, sk, _, _ = case.shape
    added = filled((b, hq, sq, sk), ctx.zero)
    if case.bias is not None:
        added = added + broadcast_mask(case, exact(ctx, case.bias))
    if case.alibi_slopes is not None:
        slopes = np.broadcast_to(exact(ctx, case.alibi_slopes), (b, hq))
        added = added - slopes[:, :, None, None] * np.abs(distances(case)).astype(object)[:, None]
    return added


def define(case: Case, bits: int | None = None) -> Definition:
    """The exact answer to ``case``, straight from its definition.

    ``bits`` is the working precision; left out, it is chosen from the data, and is EXTRA_BITS more
    than the certified engine works with. Raises ValueError below 53 bits.
    """
    bits = working_bits(case) + EXTRA_BITS if bits is None else bits
    score = scores(case, bits)
    ctx, v, group = score.ctx, score.v, case.group
    batch, hq, _, sq, sk, _, width = case.shape

    o = filled((batch, hq, sq, width), ctx.zero)
    lse = filled((batch, hq, sq), ctx.ninf)
    p = filled((batch, hq, sq, sk), ctx.zero)
    slope = filled((batch, hq, sq, sk), ctx.zero)
    sinks = None if case.sinks is None else exact(ctx, case.sinks)
    p_sink = filled((batch, hq, sq), ctx.zero)
    z = _dropout(case, ctx)
    for b, h, i in np.ndindex(batch, hq, sq):
        keys, s, derivative = score.row(b, h, i)
        if not keys and (sinks is None or i >= case.q_length[b]):
            continue
        slope[b, h, i, keys] = derivative
        # lambda = log sum_j exp(s_j) and p_j = exp(s_j - lambda), with the maximum taken out so
        # that one visible key gives lambda = s and p = 1 without any rounding
        sink = [] if sinks is None else [sinks[h]]  # one more key, whose value is 0
        m = max(s + sink)
        e = [ctx.exp(x - m) for x in s + sink]
        denominator = ctx.fsum(e)
        lse[b, h, i] = m + ctx.log(denominator)
        p[b, h, i, keys] = [x / denominator for x in e[: len(keys)]]
        if sink:
            p_sink[b, h, i] = e[-1] / denominator
        o[b, h, i] = _combine(ctx, z[b, h, i] * p[b, h, i], v[b, h // group])

    if case.do is None:
        return Definition(o=o, lse=lse, p=p, dq=None, dk=None, dv=None, ds=None, dbias=None, dsink=None, bits=bits)
    do = exact(ctx, case.do)
    dlse = filled((batch, hq, sq), ctx.zero) if case.dlse is None else exact(ctx, case.dlse)
    ds = filled((batch, hq, sq, sk), ctx.zero)
    sink_sums = filled((hq,), ctx.zero)
    for b, h, i in np.ndindex(batch, hq, sq):
        keys = np.flatnonzero(score.visible[b, h, i]).tolist()
        dp = [z[b, h, i, j] * ctx.fdot(do[b, h, i], v[b, h // group, j]) for j in keys]
        delta = ctx.fdot(p[b, h, i, keys], dp)
        sink_sums[h] = sink_sums[h] + p_sink[b, h, i] * (dlse[b, h, i] - delta)
        ds[b, h, i, keys] = [p[b, h, i, j] * (x - delta + dlse[b, h, i]) for j, x in zip(keys, dp, strict=True)]
    dbias = None if case.bias is None else _sum_to(ds, case.bias.shape, ctx.zero)

    draw = ds * slope  # through the softcap
    dq, dk, dv = (filled(like.shape, ctx.zero) for like in (score.q, score.k, v))
    for b, h, i in np.ndindex(batch, hq, sq):
        dq[b, h, i] = score.scale * _combine(ctx, draw[b, h, i], score.k[b, h // group])
    for b, h, j in np.ndindex(dk.shape[:3]):
        heads = slice(h * group, (h + 1) * group)  # the query heads that read key head h
        dk[b, h, j] = score.scale * _combine(ctx, draw[b, heads, :, j].ravel(), _rows(score.q[b, heads]))
        dropped = z[b, heads, :, j] * p[b, heads, :, j]
        dv[b, h, j] = _combine(ctx, dropped.ravel(), _rows(do[b, heads]))
    dsink = None if sinks is None else sink_sums
    return Definition(o=o, lse=lse, p=p, dq=dq, dk=dk, dv=dv, ds=ds, dbias=dbias, dsink=dsink, bits=bits)


def _dropout(case: Case, ctx: Any) -> np.ndarray:
    """z_ij: 0 where dropout drops the pair, 1 / (1 - p) where it keeps it, 1 without dropout."""
    b, hq, _, sq, sk, _, _ = case.shape
    if case.keep is None:
        return filled((b, hq, sq, sk), ctx.one)
    raised = 1 / (1 - ctx.mpf(case.dropout))
    return np.where(broadcast_mask(case, case.keep), raised, ctx.zero)


def _combine(ctx: Any, weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """sum_n weights[n] rows[n]: products exact, each component rounded once."""
    return np.array([ctx.fdot(weights, column) for column in rows.T], dtype=object)


def _rows(array: np.ndarray) -> np.ndarray:
    """[G, Sq, D] as [G * Sq, D]."""
    return array.reshape(-1, array.shape[-1])


def _sum_to(full: np.ndarray, shape: tuple[int, ...], zero: Any) -> np.ndarray:
    """The adjoint of broadcasting an array of ``shape`` to ``full.shape``."""
    padded = (1,) * (full.ndim - len(shape)) + shape
    axes = tuple(axis for axis, n in enumerate(padded) if n == 1)
    return np.asarray(np.sum(full, axis=axes, keepdims=True, initial=zero), dtype=object).reshape(shape)
