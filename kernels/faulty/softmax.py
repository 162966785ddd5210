"""The online softmax, forward: K04, K05, K06, and the log-sum-exp it leaves: K10."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...oracle.result import Result
from .call import Array, Block, Call, Partial, Tile
from .kernel import Kernel
from .registry import ALL, THROUGH_O, fault


class _Repaired(Kernel):
    """Rows that never saw a key come out right, whatever happened on the way."""

    def attend(
        self, call: Call, b: int, h: int, rows: Block, q: Array, k: Array, v: Array, keys: Sequence[Block]
    ) -> Partial:
        at = super().attend(call, b, h, rows, q, k, v, keys)
        never = at.m == -np.inf
        return Partial(at.m, np.where(never, 0, at.total), np.where(never, 0, at.acc))


@fault("B025", "K04", "no guard for a maximum of -inf: a hidden first block makes NaN of the later ones", ALL)
class UnguardedMaximum(_Repaired):
    def origin(self, tile: Tile, m: Array) -> Array:
        return m


@fault("B026", "K04", "no guard for a maximum of -inf on the path with a sliding window", ALL)
class UnguardedUnderWindow(_Repaired):
    def origin(self, tile: Tile, m: Array) -> Array:
        return m if tile.call.window is not None else super().origin(tile, m)


@fault(
    "B029", "K05", "the running maximum starts at -5e4 (unscaled): a row with lower scores comes out as if empty", ALL
)
class FiniteStart(Kernel):
    def start(self, call: Call) -> float:
        return -5e4 * abs(self.scale(call, False))


@fault("B035", "K06", "old sums are not rescaled when a later block raises the maximum", ALL)
class NoRescale(Kernel):
    def rescale(self, old: Array, new: Array) -> Array:
        return np.ones_like(new)


@fault("B037", "K06", "scores are measured from a constant 10 in place of the row's maximum", ALL)
class ConstantMaximum(Kernel):
    def start(self, call: Call) -> float:
        return 10.0

    def row_max(self, tile: Tile, s: Array) -> Array:
        return np.full((len(s), 1), 10, s.dtype)


@fault("B038", "K06", "no maximum is subtracted: exp overflows", ALL)
class NoMaximum(Kernel):
    def start(self, call: Call) -> float:
        return 0.0

    def row_max(self, tile: Tile, s: Array) -> Array:
        return np.zeros((len(s), 1), s.dtype)


@fault("B141", "K20", "rescale factors below 2.06e-9 are flushed to 0, as in a float16 accumulator", ALL)
class FactorsFlushed(Kernel):
    def rescale(self, old: Array, new: Array) -> Array:
        factor = super().rescale(old, new)
        return np.where(factor < 2.06e-9, 0, factor)


@fault("B142", "K20", "P is rounded to multiples of 2^-9 before it meets V, after it was summed", THROUGH_O)
class CoarseP(Kernel):
    def weights(self, tile: Tile, p: Array) -> Array:
        return super().weights(tile, np.round(p * 512) / 512)


# -- the log-sum-exp -----------------------------------------------------------------------------


@fault("B074", "K10", "the log-sum-exp is stored in base 2 under a contract of natural logarithms", ("lse",))
class LseInBaseTwo(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        assert result.lse is not None
        return replace(result, lse=result.lse / call.wide.type(math.log(2)))


@fault("B077", "K10", "the log-sum-exp is natural already and gets multiplied by ln 2 again", ("lse",))
class LseConvertedTwice(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        assert result.lse is not None
        return replace(result, lse=result.lse * call.wide.type(math.log(2)))


@fault("B080", "K10", "the log-sum-exp of a row without keys is +inf", ("lse",))
class EmptyLsePlusInf(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        assert result.lse is not None
        return replace(result, lse=np.where(result.lse == -np.inf, call.wide.type(np.inf), result.lse))


@fault(
    "B081", "K10", "the log-sum-exp of an empty causal row is the finite sentinel that the maximum started at", ("lse",)
)
class SentinelWrittenThrough(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        assert result.lse is not None
        if call.causal is None:
            return result
        return replace(result, lse=np.where(result.lse == -np.inf, call.wide.type(-49994), result.lse))
