"""Scores: their range K19, softcap K21, ALiBi K22, scale K23, head dimensions K24, quantised inputs K31."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np

from ...oracle.profile import Profile
from ...oracle.result import Result
from .call import Array, Call, Tile
from .kernel import Kernel
from .registry import ALL, HALF, fault, profile

LOG2E = math.log2(math.e)

# -- range ---------------------------------------------------------------------------------------


@fault(
    "B134", "K19", "the exponent is fma(s, c, -rounded(m c)): at 1e11 the rounding is thousands, exp2 overflows", ALL,
    dtypes=("float32", *HALF),
)  # fmt: skip
class FusedExponent(Kernel):
    def exponential(self, tile: Tile, s: Array, origin: Array) -> Array:
        c = np.float32(LOG2E)
        # products of float32 are exact in float64, so this rounds once, as fma does
        exponent = s.astype(np.float64) * np.float64(c) - (origin * c).astype(np.float64)
        return np.exp2(exponent.astype(np.float32))


@fault("B136", "K19", "float16: the scale comes after a product that is already infinite", ALL, dtypes=("float16",))
class ScaledAfterHalfProduct(Kernel):
    """Only the range of float16 is imitated, not its rounding."""

    def products(self, tile: Tile, q: Array, k: Array) -> Array:
        s = super().products(tile, q, k)
        return np.where(np.abs(s) >= 65520, np.copysign(np.inf, s), s).astype(s.dtype)


@fault("B137", "K19", "float16: scores are rounded to float16 before the softmax", ALL, dtypes=("float16",))
class ScoresInHalf(Kernel):
    def hide(self, tile: Tile, s: Array, seen: Array | None) -> Array:
        return super().hide(tile, s.astype(np.float16).astype(s.dtype), seen)


# -- softcap and ALiBi ---------------------------------------------------------------------------


def absolute_tanh(dtype: str) -> Profile:
    """With e^x and e^-x good to 4 u and three more roundings their ratio is good to
    5 u + 6 u |tanh|, so to 11 u absolutely."""
    usual = profile(dtype)
    return replace(usual, u_tanh=11 * usual.u, tanh_is_absolute=True)


@fault("B144", "K21", "tanh as a ratio of exponentials is NaN where exp overflows", ALL, profile=absolute_tanh)
class TanhOfExponentials(Kernel):
    def tanh(self, x: Array) -> Array:
        return (np.exp(x) - np.exp(-x)) / (np.exp(x) + np.exp(-x))


@fault("sharp:cap-derivative", "K21", "the backward pass leaves out the derivative of the cap", ("dq", "dk"))
class CapDerivativeLeftOut(Kernel):
    def through_cap(self, ds: Array, tanh: Array) -> Array:
        return ds


@fault("B145", "K22", "decoding, one query row: the distance is off by one, which shifts all scores of the row", ALL)
class DistanceOffByOne(Kernel):
    def distance(self, tile: Tile) -> Array:
        if tile.call.sq != 1:
            return super().distance(tile)
        return abs(tile.i + self.offset(tile.call, tile.b) - tile.j + 1)


@fault("B147", "K22", "slopes that differ by batch entry are an exception", ALL)
class SlopesPerEntryRaise(Kernel):
    def enter(self, call: Call) -> None:
        slopes = call.case.alibi_slopes
        if slopes is not None and slopes.ndim == 2:
            raise RuntimeError("expected a bias of 3 dimensions, got 4")


# -- scale and head dimensions -------------------------------------------------------------------


@fault("B150", "K23", "the default scale is inverted: scores are multiplied by sqrt(D)", ALL)
class ScaleInverted(Kernel):
    def scale(self, call: Call, backward: bool) -> float:
        return math.sqrt(call.d) if call.case.scale is None else call.case.scale


@fault("B151", "K23", "the default scale comes from the width that is stored, the larger of D and Dv", ALL)
class ScaleOfStoredWidth(Kernel):
    def scale(self, call: Call, backward: bool) -> float:
        return 1 / math.sqrt(max(call.d, call.dv)) if call.case.scale is None else call.case.scale


@fault(
    "B152", "K23", "the backward pass takes the default scale from D padded to a multiple of 4",
    ("dq", "dk", "dv", "dbias"),
)  # fmt: skip
class BackwardScaleOfPaddedWidth(Kernel):
    def scale(self, call: Call, backward: bool) -> float:
        if backward and call.case.scale is None:
            return 1 / math.sqrt((call.d + 3) // 4 * 4)
        return super().scale(call, backward)


@fault("B153", "K23", "the path with a mask or a bias uses the default scale whatever is asked", ALL)
class ScaleIgnoredUnderMask(Kernel):
    def scale(self, call: Call, backward: bool) -> float:
        return 1 / math.sqrt(call.d) if call.masks or call.bias is not None else super().scale(call, backward)


@fault("B154", "K24", "the head dimension is hard-coded (4 here): scores use the first channels only", ALL)
class FirstChannelsOnly(Kernel):
    def products(self, tile: Tile, q: Array, k: Array) -> Array:
        return q[:, :4] @ k[:, :4].T


@fault("B155", "K24", "rows of dV are stored as far apart as rows of dK", ("dv",))
class DvWithStepOfDk(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        if result.dv is None or call.d == call.dv:
            return result
        dv = np.zeros_like(result.dv)
        for b, g in np.ndindex(*dv.shape[:2]):
            flat, at = dv[b, g].reshape(-1), 0
            for row in result.dv[b, g]:
                here = flat[at : at + call.dv]
                here[...] = row[: len(here)]
                at += call.d
        return replace(result, dv=dv)


@fault("B157", "K24", "channels that fill D up to a power of two hold what an earlier call left there", ALL)
class StaleChannels(Kernel):
    def __init__(self) -> None:
        self.left = 0.0

    def products(self, tile: Tile, q: Array, k: Array) -> Array:
        s = super().products(tile, q, k)
        d = tile.call.d
        return s if d & (d - 1) == 0 else s + q.dtype.type(self.left)

    def finish(self, call: Call, result: Result) -> Result:
        if call.memory.q.size:
            self.left = float(np.tanh(np.nan_to_num(call.memory.q.ravel()[:1].astype(np.float64)))[0])
        return result


# -- quantised keys and values -------------------------------------------------------------------


def quantised(array: Array) -> tuple[Array, float]:
    """An array as a quantised cache stores it, numbers up to 1 and a factor: a power of two, so exact."""
    largest = float(np.abs(array).max(initial=0))
    factor = 2.0 ** math.ceil(math.log2(largest)) if largest > 0 and math.isfinite(largest) else 1.0
    return array / array.dtype.type(factor), factor


@fault("B195", "K31", "keys and values are stored with a factor, which is swallowed on the way", ALL)
class FactorsLost(Kernel):
    def load(self, call: Call, name: str, b: int, h: int) -> Array:
        array = super().load(call, name, b, h)
        return quantised(array)[0] if name in ("k", "v") else array


@fault("B196", "K31", "where the queries would survive float8 too, a fast path leaves the factors out", ALL)
class FactorsLostOnFastPath(Kernel):
    def load(self, call: Call, name: str, b: int, h: int) -> Array:
        array = super().load(call, name, b, h)
        if name not in ("k", "v"):
            return array
        q = call.case.q.astype(np.float32)
        fast = bool((q == q.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)).all())
        return quantised(array)[0] if fast else array
