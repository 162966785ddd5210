"""Masks and biases: fillers K05, broadcasting K16, gradient of the bias K17, meaning K18."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ...oracle.formats import format_of
from ...oracle.result import Result
from .call import Array, Block, Call, Partial, Tile
from .kernel import Kernel, both, sum_to
from .registry import ALL, HALF, fault

# -- fillers in place of -inf --------------------------------------------------------------------


@fault("B030", "K05", "padded keys get the score -10000: they win where valid scores are lower", ALL)
class PaddingScoresLow(Kernel):
    def hide(self, tile: Tile, s: Array, seen: Array | None) -> Array:
        rows, keys = self.lengths(tile.call, tile.b)
        s = super().hide(tile, s, seen)
        return s if tile.keys.stop <= keys else np.where((tile.j >= keys) & (tile.i < rows), -1e4, s)


@fault("B031", "K05", "the bias is multiplied by log2(e) in its own format: the least number there becomes -inf", ALL)
class BiasOverflows(Kernel):
    def bias(self, tile: Tile) -> Array | None:
        bias = super().bias(tile)
        if bias is None or tile.call.bias is None:
            return bias
        largest = format_of(tile.call.bias.dtype).max
        return np.where(bias * math.log2(math.e) < -largest, -np.inf, bias)


@fault(
    "B032", "K05", "padding and causal masks are added: keys hidden once get the least number, hidden twice -inf", ALL
)
class TwoFillers(Kernel):
    def hide(self, tile: Tile, s: Array, seen: Array | None) -> Array:
        call, last = tile.call, self.last_key(tile)
        rows, keys = self.lengths(call, tile.b)
        padding = both(self.mask(tile), (tile.j < keys)[None])
        if seen is None or last is None or padding is None:
            return super().hide(tile, s, seen)
        once = ((tile.j > last) != ~padding) & ~seen & (tile.i < rows)
        return np.where(once, s + call.wide.type(-call.case.format.max), super().hide(tile, s, seen))


@fault(
    "B138",
    "K19",
    "float16: hidden keys get score - 65504 in float16, -inf or finite as it falls",
    ALL,
    dtypes=("float16",),
)
class FillerInHalf(Kernel):
    def hide(self, tile: Tile, s: Array, seen: Array | None) -> Array:
        mask, rows = self.mask(tile), self.lengths(tile.call, tile.b)[0]
        hidden = super().hide(tile, s, seen)
        if mask is None:
            return hidden
        filled = (s.astype(np.float16) + np.float16(-65504)).astype(s.dtype)
        return np.where(~mask & (tile.i < rows), filled, hidden)

    def finish_rows(self, call: Call, b: int, h: int, rows: Block, at: Partial) -> tuple[Array, Array]:
        o, lse = super().finish_rows(call, b, h, rows, at)
        unseen = (at.total == 0) & (np.arange(rows.start, rows.stop)[:, None] < self.lengths(call, b)[0])
        return (np.where(unseen, np.nan, o), np.where(unseen, np.nan, lse)) if call.masks else (o, lse)


# -- broadcasting --------------------------------------------------------------------------------


@fault("B115", "K16", "a mask per batch entry with one head is read at b * H + h", ALL)
class MaskIndexWithHeads(Kernel):
    def mask(self, tile: Tile) -> Array | None:
        seen: Array | None = None
        for mask in tile.call.masks:
            b, h = mask.shape[:2]
            wrong = tile._replace(b=(tile.b * tile.call.hq + tile.h) % b) if b > 1 and h == 1 else tile
            seen = both(seen, self.part(mask, wrong))
        return seen


@fault(
    "B118",
    "K16",
    "block indices of a mask without a batch axis run out after the first entry: the others see nothing",
    ALL,
)
class OnlyFirstEntryHasBlocks(Kernel):
    def mask(self, tile: Tile) -> Array | None:
        seen = super().mask(tile)
        if tile.b > 0 and any(mask.shape[0] == 1 for mask in tile.call.masks):
            return np.zeros((1, 1), dtype=bool)
        return seen


@fault(
    "B119",
    "K16",
    "with a mask the backward pass visits rows and keys behind the end and multiplies NaN",
    ("dq", "dk", "dv"),
)
class BlocksBehindTheEnd(Kernel):
    def add_dq(self, tile: Tile, dq: Array, ds: Array, k: Array, lse: Array, delta: Array) -> None:
        super().add_dq(tile, dq, ds, k, lse, delta)
        if tile.call.masks and tile.keys.missing:
            dq[tile.rows.all] += tile.call.wide.type(np.nan)

    def add_dk_dv(self, tile: Tile, dk: Array, dv: Array, ds: Array, p: Array, q: Array, do: Array, lse: Array) -> None:
        super().add_dk_dv(tile, dk, dv, ds, p, q, do, lse)
        if tile.call.masks and tile.rows.missing:
            dk[tile.keys.all] += tile.call.wide.type(np.nan)
            dv[tile.keys.all] += tile.call.wide.type(np.nan)


# -- the gradient of the bias --------------------------------------------------------------------


@fault("B122", "K17", "the gradient of a wider bias is stored with the element size of q", ("dbias",), dtypes=HALF)
class DbiasWithElementSizeOfQ(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        dbias = result.dbias
        if dbias is None or dbias.dtype.itemsize <= call.storage.itemsize:
            return result
        out = np.full(dbias.shape, call.memory.fill, dbias.dtype)
        packed = dbias.astype(call.storage).ravel().view(np.uint8)
        out.reshape(-1).view(np.uint8)[: packed.size] = packed
        return replace(result, dbias=out)


@fault(
    "B124",
    "K17",
    "tiles that share elements of the bias overwrite each other's gradient: the last one wins",
    ("dbias",),
)
class LastWriterWins(Kernel):
    def add_dbias(self, dbias: Array, ds: Array, tile: Tile) -> None:
        here = self.part(dbias, tile)
        here[...] = sum_to(ds, here.shape)


# -- what a mask means ---------------------------------------------------------------------------


@fault("B101", "K13", "with a key padding mask the keys are unpadded by the length of the queries", ALL)
class KeysByQueryLength(Kernel):
    def mask(self, tile: Tile) -> Array | None:
        seen = super().mask(tile)
        padding = any(mask.shape[2] == 1 for mask in tile.call.masks)
        return both(seen, (tile.j < tile.call.sq)[None]) if padding else seen


@fault("B126", "K18", "a boolean mask is added to the scores: +1 for visible, 0 for hidden", ALL)
class MaskAdded(Kernel):
    def mask(self, tile: Tile) -> Array | None:
        return None

    def bias(self, tile: Tile) -> Array | None:
        bias = super().bias(tile)
        seen = super().mask(tile)
        if seen is None:
            return bias
        return seen.astype(tile.call.wide) + (0 if bias is None else bias)


@fault("B127", "K18", "an additive mask is converted to bool: every number but 0 is visible", ALL)
class PolarityInverted(Kernel):
    def enter(self, call: Call) -> None:
        if call.bias is not None:
            call.masks.append(call.bias != 0)
            call.bias_hides = False

    def bias(self, tile: Tile) -> Array | None:
        return None


@fault("B128", "K18", "where the causal flag is set the mask is not passed on", ALL)
class MaskDroppedUnderCausal(Kernel):
    def mask(self, tile: Tile) -> Array | None:
        return super().mask(tile) if tile.call.causal is None else None


@fault("B129", "K18", "a bias of zeros and ones is taken for a boolean mask", ALL)
class NumericMaskIsBoolean(Kernel):
    def enter(self, call: Call) -> None:
        bias = call.bias
        if bias is not None and (bias == 1).any() and ((bias == 0) | (bias == 1)).all():
            call.masks.append(bias == 1)
            call.notes["boolean"] = True

    def bias(self, tile: Tile) -> Array | None:
        return None if "boolean" in tile.call.notes else super().bias(tile)


@fault("B131", "K18", "more keys than the fused kernel takes (16 here): the other path forgets causality", ALL)
class CausalOnTheFastPath(Kernel):
    def last_key(self, tile: Tile) -> Array | None:
        return None if tile.call.sk > 16 else super().last_key(tile)


@fault("B132", "K18", "a mask and the causal flag together: the flag is ignored", ALL)
class CausalIgnoredUnderMask(Kernel):
    def last_key(self, tile: Tile) -> Array | None:
        return None if tile.call.case.mask is not None else super().last_key(tile)
