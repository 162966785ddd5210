"""The certified engine: output, log-sum-exp and gradients in ball arithmetic.

Every number here is a ball (python-flint's ``arb``): a midpoint and a radius that holds all
rounding of the computation so far. The formulas are those of ``definition.py``; this engine is
another program, in other arithmetic, and some fifty times faster. It streams over blocks of query
rows, so that memory stays bounded by the block and the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import flint
import numpy as np
from flint import arb, arb_mat

from .case import Case
from .precision import TARGET_BITS, working_bits
from .visibility import broadcast_mask, distances, kept, visible

#: pairs held at a time while streaming: some 60 MB of balls
BLOCK_PAIRS = 1 << 16


@dataclass(frozen=True)
class Enclosed:
    """Exact values known to lie in hi + lo ± rad, elementwise; float64 arrays of one shape.

    ``hi`` is the value rounded to float64, so ``hi + lo`` carries about 106 bits. Where the value
    passes float64's range hi is ±inf and lo, rad are 0. ``lse`` of an empty row is -inf, exactly.
    """

    hi: np.ndarray
    lo: np.ndarray
    rad: np.ndarray

    def decimal(self, index: tuple[int, ...], digits: int = 20) -> str:
        """One value in decimal, at most ``digits`` significant digits, only digits that are certain."""
        hi = float(self.hi[index])
        if not math.isfinite(hi):
            return repr(hi)
        with flint.ctx.workprec(256):
            ball = arb(hi) + arb(float(self.lo[index])) + arb(0, float(self.rad[index]))
            if ball == 0:
                return "0"
            return str(ball.str(digits, radius=False))


@dataclass(frozen=True)
class Exact:
    """The exact answer of a case, enclosed. ``dq, dk, dv`` are None without do, ``dbias`` without bias,
    ``dsink`` without sinks.

    Padded query rows hold o = 0, lse = -inf, dq = 0. ``logp [B, Hq, Sq, Sk]`` is the natural log of
    each probability and ``raw`` each scaled product before softcap and bias, rounded to float64
    (-inf and 0 where the pair is hidden); both None when the pairs were not asked for. ``bits`` is
    the working precision.
    """

    o: Enclosed
    lse: Enclosed
    dq: Enclosed | None
    dk: Enclosed | None
    dv: Enclosed | None
    dbias: Enclosed | None
    dsink: Enclosed | None
    logp: np.ndarray | None
    raw: np.ndarray | None
    bits: int


def exact(case: Case, *, target: int = TARGET_BITS, pairs: bool = True) -> Exact:
    """The exact output, log-sum-exp and gradients of a case, enclosed in balls.

    ``target`` asks for about that many bits in every value that does not cancel; the returned radii
    prove what was reached (at most 106 bits of it survive in hi + lo). ``pairs`` also returns the
    per-pair facts that the bounds need; leave it out for long sequences.
    """
    bits = working_bits(case, target)
    with flint.ctx.workprec(bits):
        return _Engine(case, pairs).run(bits)


class _Engine:
    """The accumulators of one evaluation. Precision is flint's context, set by ``exact``."""

    def __init__(self, case: Case, pairs: bool) -> None:
        b, hq, hk, sq, sk, d, dv = case.shape
        self.case = case
        self.seen = visible(case)
        self.backward = case.do is not None
        self.scale = 1 / arb(d).sqrt() if case.scale is None else arb(case.scale)
        self.cap = None if case.softcap is None else arb(case.softcap)
        self.o = np.zeros((3, b, hq, sq, dv))
        self.lse = np.zeros((3, b, hq, sq))
        self.lse[0] = -np.inf
        self.dq = np.zeros((3, b, hq, sq, d))
        self.dk = np.zeros((3, b, hk, sk, d))
        self.dv = np.zeros((3, b, hk, sk, dv))
        self.logp = np.full((b, hq, sq, sk), -np.inf) if pairs else None
        self.raw = np.zeros((b, hq, sq, sk)) if pairs else None
        self.bias = self.slopes = self.distance = self.dbias_at = None
        if case.bias is not None:
            self.bias = broadcast_mask(case, case.bias.astype(np.float64))
            # where in the stored bias the gradient of a pair is added up
            self.dbias_at = broadcast_mask(case, np.arange(case.bias.size).reshape(case.bias.shape))
            self.dbias = [arb(0)] * case.bias.size
        self.sinks = None if case.sinks is None else [arb(x) for x in case.sinks.astype(np.float64).tolist()]
        self.dsink = [arb(0)] * hq
        self.keep = kept(case) if case.dropout is not None else None
        self.boost = 1 / (1 - arb(case.dropout or 0.0))
        if case.alibi_slopes is not None:
            self.slopes = np.broadcast_to(case.alibi_slopes.astype(np.float64), (b, hq))
            self.distance = np.abs(distances(case))

    def run(self, bits: int) -> Exact:
        b, hq, hk, sq, sk, _, _ = self.case.shape
        group = self.case.group
        for entry in range(b):
            for head in range(hk):
                self._key_head(entry, head, range(head * group, (head + 1) * group))

        def enclosed(stack: np.ndarray) -> Enclosed:
            return Enclosed(*stack)

        dbias = None
        if self.backward and self.case.bias is not None:
            stack = np.zeros((3, self.case.bias.size))
            _store(stack, self.dbias)
            dbias = enclosed(stack.reshape((3, *self.case.bias.shape)))
        dsink = None
        if self.backward and self.sinks is not None:
            stack = np.zeros((3, hq))
            _store(stack, self.dsink)
            dsink = enclosed(stack)
        dq, dk, dv = (enclosed(x) if self.backward else None for x in (self.dq, self.dk, self.dv))
        return Exact(enclosed(self.o), enclosed(self.lse), dq, dk, dv, dbias, dsink, self.logp, self.raw, bits)

    def _key_head(self, b: int, g: int, heads: Iterable[int]) -> None:
        case = self.case
        rows, keys = case.q_length[b], case.k_length[b]
        if rows == 0 or (keys == 0 and self.sinks is None):
            return
        key = _matrix(case.k[b, g, :keys])
        value = _matrix(case.v[b, g, :keys])
        key_t, value_t = key.transpose(), value.transpose()
        step = max(1, BLOCK_PAIRS // max(1, keys))
        dk: Any = None
        dv: Any = None
        for h in heads:
            query = _matrix(case.q[b, h, :rows]) * self.scale
            for start in range(0, rows, step):
                stop = min(rows, start + step)
                block = query if stop - start == rows else _rows(query, start, stop)
                add = self._rows_block(b, h, start, stop, block, key, key_t, value, value_t)
                if add is not None:
                    dk, dv = add if dk is None else (dk + add[0], dv + add[1])
        if dk is not None:
            _store(self.dk[:, b, g, :keys], dk.entries())
            _store(self.dv[:, b, g, :keys], dv.entries())

    def _rows_block(
        self, b: int, h: int, start: int, stop: int, query: Any, key: Any, key_t: Any, value: Any, value_t: Any
    ) -> tuple[Any, Any] | None:
        """Rows start..stop of one head: stores o, lse, dq and returns what they add to dk and dv."""
        case, zero = self.case, arb(0)
        keys, count = key.nrows(), stop - start
        raw = (query * key_t).entries()
        if self.raw is not None:
            self.raw[b, h, start:stop, :keys] = np.reshape([float(x) for x in raw], (count, keys))
            self.raw[b, h, start:stop][~self.seen[b, h, start:stop]] = 0
        weights: list[Any] = [zero] * (count * keys)  # exp(s - m), unnormalised
        columns: list[list[int]] = []
        inverse: list[Any] = []
        sink_weights: list[Any] = []
        for i in range(count):
            cols = np.flatnonzero(self.seen[b, h, start + i, :keys]).tolist()
            columns.append(cols)
            sink = [] if self.sinks is None else [self.sinks[h]]
            if not cols and not sink:
                inverse.append(zero)
                sink_weights.append(zero)
                continue
            base = i * keys
            scores = self._scores(b, h, start + i, [raw[base + j] for j in cols], cols)
            top = (scores + sink)[0]
            for s in scores + sink:
                if s > top:
                    top = s
            top = top.mid()
            row = [(s - top).exp() for s in scores]
            for j, w in zip(cols, row, strict=True):
                weights[base + j] = w
            sink_weights.append((sink[0] - top).exp() if sink else zero)
            total = sum(row, sink_weights[i])
            inverse.append(1 / total)
            lse = top + total.log()
            _store(self.lse[:, b, h, start + i], [lse])
            if self.logp is not None:
                self.logp[b, h, start + i, cols] = [float(s - lse) for s in scores]
        # what multiplies V: the weights that dropout kept, and raised
        matrix = arb_mat(count, keys, self._dropped(b, h, start, weights, keys))
        width = case.v.shape[3]
        product = (matrix * value).entries()
        out = [product[i * width + c] * inverse[i] for i in range(count) for c in range(width)]
        _store(self.o[:, b, h, start:stop], out)
        if case.do is None:
            return None
        return self._backward(
            b, h, start, stop, query, key, value_t, raw, weights, matrix, columns, inverse, sink_weights, out
        )

    def _dropped(self, b: int, h: int, start: int, pairs: list[Any], keys: int) -> list[Any]:
        """z_ij times a value of each pair of rows ``start`` onwards."""
        if self.keep is None:
            return pairs
        count = len(pairs) // keys if keys else 0
        keep = self.keep[b, h, start : start + count, :keys].ravel().tolist()
        return [x * self.boost if kept else arb(0) for x, kept in zip(pairs, keep, strict=True)]

    def _scores(self, b: int, h: int, i: int, raw: list[Any], cols: list[int]) -> list[Any]:
        """s_ij of one row's visible keys from its raw_ij."""
        scores = raw
        if self.cap is not None:
            cap = self.cap
            scores = [cap * (x / cap).tanh() for x in scores]
        if self.bias is not None:
            scores = [s + x for s, x in zip(scores, self.bias[b, h, i, cols].tolist(), strict=True)]
        if self.slopes is not None and self.distance is not None:
            slope = arb(float(self.slopes[b, h]))
            scores = [s - slope * x for s, x in zip(scores, self.distance[b, i, cols].tolist(), strict=True)]
        return scores

    def _backward(
        self,
        b: int,
        h: int,
        start: int,
        stop: int,
        query: Any,
        key: Any,
        value_t: Any,
        raw: list[Any],
        weights: list[Any],
        matrix: Any,
        columns: list[list[int]],
        inverse: list[Any],
        sink_weights: list[Any],
        out: list[Any],
    ) -> tuple[Any, Any]:
        case, zero = self.case, arb(0)
        assert case.do is not None
        keys, count, width = key.nrows(), stop - start, case.v.shape[3]
        upstream = [arb(x) for x in case.do[b, h, start:stop].astype(np.float64).ravel().tolist()]
        # dO / l, so that weights times it are p_ij dO_i
        scaled = [upstream[i * width + c] * inverse[i] for i in range(count) for c in range(width)]
        scaled_mat = arb_mat(count, width, scaled)
        dp = self._dropped(b, h, start, (scaled_mat * value_t).entries(), keys)  # dP_ij / l_i
        ds: list[Any] = [zero] * (count * keys)
        for i, cols in enumerate(columns):
            if not cols and self.sinks is None:
                continue
            base = i * keys
            delta = sum((upstream[i * width + c] * out[i * width + c] for c in range(width)), zero)
            if case.dlse is not None:
                delta = delta - float(case.dlse[b, h, start + i])
            delta = delta * inverse[i]
            if self.sinks is not None:
                self.dsink[h] = self.dsink[h] - sink_weights[i] * delta
            for j in cols:
                ds[base + j] = weights[base + j] * (dp[base + j] - delta)
            if self.dbias_at is not None:
                for j, at in zip(cols, self.dbias_at[b, h, start + i, cols].tolist(), strict=True):
                    self.dbias[at] = self.dbias[at] + ds[base + j]
            if self.cap is not None:
                # 1 - tanh^2 as sech^2, which keeps its relative accuracy where tanh is near 1
                for j in cols:
                    ds[base + j] = ds[base + j] * (raw[base + j] / self.cap).sech() ** 2
        ds_mat = arb_mat(count, keys, ds)
        _store(self.dq[:, b, h, start:stop], (ds_mat * key * self.scale).entries())
        return ds_mat.transpose() * query, matrix.transpose() * scaled_mat


def _matrix(array: np.ndarray) -> Any:
    return arb_mat(array.shape[0], array.shape[1], array.astype(np.float64).ravel().tolist())


def _rows(matrix: Any, start: int, stop: int) -> Any:
    width = matrix.ncols()
    return arb_mat(stop - start, width, matrix.entries()[start * width : stop * width])


def _store(stack: np.ndarray, balls: list[Any]) -> None:
    """Write balls into the (hi, lo, rad) stack, in order; what hi + lo cannot hold goes into rad."""
    shape = stack.shape[1:]
    hi = [float(x) for x in balls]
    rest = [x - h if math.isfinite(h) else arb(0) for x, h in zip(balls, hi, strict=True)]
    lo = [float(x) for x in rest]
    left = [(x - y).abs_upper() for x, y in zip(rest, lo, strict=True)]
    # the conversion to float64 may have rounded a radius down, to 0 even
    rad = np.array([0.0 if x == 0 else math.nextafter(float(x), math.inf) for x in left])
    stack[0], stack[1], stack[2] = np.reshape(hi, shape), np.reshape(lo, shape), np.reshape(rad, shape)
