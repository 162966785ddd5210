"""What a small run on a CPU cannot reach, imitated: shrunk integers K25, stale buffers K26."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...oracle.result import Result
from .call import Array, Call, Tile
from .kernel import Kernel, both
from .registry import ALL, GRADIENTS, THROUGH_DELTA, fault

# -- integers that are too short -----------------------------------------------------------------


def wrapped(array: Array, tile: Tile, size: int, signed: bool = False) -> Array:
    """``Kernel.part`` of an array of four axes where the offset of a row within its plane wraps at ``size``."""
    b, h, rows, keys = array.shape
    plane = array[tile.b if b > 1 else 0, tile.h if h > 1 else 0].ravel()
    start = (tile.i if rows > 1 else np.zeros((1, 1), dtype=int)) * keys
    start = (start + size // 2) % size - size // 2 if signed else start % size
    at = start + (tile.j if keys > 1 else 0)
    part: Array = plane[np.clip(at, -plane.size, plane.size - 1)]
    return part


@fault("B158", "K25", "the offset of a row of the mask is too short an integer (6 bits for 32)", ALL)
class MaskOffsetWraps(Kernel):
    def mask(self, tile: Tile) -> Array | None:
        seen: Array | None = None
        for mask in tile.call.masks:
            seen = both(seen, wrapped(mask, tile, 64))
        return seen


@fault("B158-dropout", "K25", "the offset of a row of the dropout mask is too short an integer (6 bits for 32)", ALL)
class KeepOffsetWraps(Kernel):
    def kept(self, tile: Tile) -> Array | None:
        call = tile.call
        if call.keep is None or call.case.dropout is None:
            return None
        return wrapped(call.keep, tile, 64) * call.wide.type(1 / (1 - call.case.dropout))


@fault("B159", "K25", "the backward pass reads the mask at a short signed offset (7 bits for 32)", GRADIENTS[:4])
class BackwardMaskOffsetWraps(Kernel):
    def mask(self, tile: Tile) -> Array | None:
        if not tile.backward:
            return super().mask(tile)
        seen: Array | None = None
        for mask in tile.call.masks:
            seen = both(seen, wrapped(mask, tile, 128, signed=True))
        return seen


@fault(
    "B160",
    "K25",
    "key numbers are short signed integers (5 bits for 16): from 16 on keys are read before the start, NaN",
    ALL,
)
class KeyNumberWraps(Kernel):
    def products(self, tile: Tile, q: Array, k: Array) -> Array:
        return np.where(tile.j >= 16, np.nan, super().products(tile, q, k)).astype(q.dtype)


@fault("B163", "K25", "rowsum(dO * O) of late rows is read at a row number that wraps (4 bits for 32)", THROUGH_DELTA)
class DeltaRowWraps(Kernel):
    def delta(self, call: Call, b: int, h: int, do: Array, o: Array) -> Array:
        delta = super().delta(call, b, h, do, o)
        first = (b * call.hq + h) * call.sq
        early = call.notes.setdefault("delta", np.zeros((16, 1), delta.dtype))
        n = max(0, min(16 - first, len(delta)))
        early[first : first + n] = delta[:n]
        return np.vstack([delta[:n], early[(first + np.arange(n, len(delta))) % 16]])


@fault("B165", "K25", "offsets of a packed batch are too short (5 bits for 32): an illegal access", ALL)
class PackedOffsetWraps(Kernel):
    def enter(self, call: Call) -> None:
        if (call.case.k_lengths is not None or call.case.q_lengths is not None) and call.hk * sum(call.k_lengths) > 32:
            raise IndexError("an illegal memory access was encountered")


# -- races ---------------------------------------------------------------------------------------


class Counting(Kernel):
    """The right kernel, with its calls counted."""

    def __init__(self) -> None:
        self.calls = 0

    def enter(self, call: Call) -> None:
        self.calls += 1


@fault(
    "B166",
    "K26",
    "every third call the backward pass reads the log-sum-exp before it is written: that of the call before",
    GRADIENTS,
)
class LseOfEarlierCall(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.workspace = np.zeros(1)

    def backward(self, call: Call, o: Array, lse: Array) -> Result:
        stale, self.workspace = np.resize(self.workspace, lse.shape).astype(lse.dtype), lse
        result = super().backward(call, o, stale if self.calls % 3 == 0 else lse)
        return replace(result, lse=lse)


@fault(
    "B167",
    "K26",
    "rowsum(dO * O) of a block of rows is formed while the buffer still holds dO of the block before",
    THROUGH_DELTA,
)
class DeltaOfStaleDo(Kernel):
    def delta(self, call: Call, b: int, h: int, do: Array, o: Array) -> Array:
        stale = do.copy()
        for before, block in zip(call.q_blocks, call.q_blocks[1:], strict=False):
            n = min(before.stop - before.start, block.stop - block.start)
            stale[block.start : block.start + n] = do[before.start : before.start + n]
        return super().delta(call, b, h, stale, o)


@fault("B168", "K26", "every fourth call the last tile of the backward pass is lost", GRADIENTS[:4])
class LastTileLost(Counting):
    def backward_tile(self, tile: Tile, *rest: Any) -> None:
        last = tile.rows == tile.call.q_blocks[-1] and tile.keys == tile.call.k_blocks[-1]
        if not last or self.calls % 4:
            super().backward_tile(tile, *rest)
