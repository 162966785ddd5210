"""Causal alignment, K08, and the bounds of windows, K09."""

from __future__ import annotations

from .call import Array, Call, Tile
from .kernel import Kernel
from .registry import ALL, HALF, fault


@fault("B053", "K08", "bottom-right causality tests j <= i and forgets the offset", ALL)
class CausalWithoutOffset(Kernel):
    def last_key(self, tile: Tile) -> Array | None:
        return None if tile.call.causal is None else tile.i


@fault("B059", "K08", "a top-left causal flag is passed on to a kernel whose flag is bottom-right", ALL)
class AlignmentDropped(Kernel):
    def last_key(self, tile: Tile) -> Array | None:
        rows, keys = self.lengths(tile.call, tile.b)
        return None if tile.call.causal is None else tile.i + keys - rows


@fault("B060", "K08", "decoding, one query row: causality is top-left whatever was asked", ALL)
class DecodeTopLeft(Kernel):
    def last_key(self, tile: Tile) -> Array | None:
        return tile.i if tile.call.causal is not None and tile.call.sq == 1 else super().last_key(tile)


@fault("B061", "K08", "the causal loop ends at the row's own number and never reaches what the offset adds", ALL)
class LoopWithoutOffset(Kernel):
    def visited(self, tile: Tile) -> bool:
        return tile.call.causal is None or tile.keys.start < tile.rows.stop


@fault(
    "B063", "K08", "half types: causality is tested once per four rows, with the last one's number", ALL, dtypes=HALF
)
class CausalPerFourRows(Kernel):
    def last_key(self, tile: Tile) -> Array | None:
        last = super().last_key(tile)
        return None if last is None else last - tile.i + (tile.i // 4 * 4 + 3)


@fault(
    "B064", "K08", "several new tokens after a cache: a square causal mask meets rectangular scores, an exception", ALL
)
class SquareMask(Kernel):
    def enter(self, call: Call) -> None:
        if call.causal is not None and 1 < call.sq < call.sk:
            raise ValueError(f"cannot add a mask of [{call.sq}, {call.sq}] to scores of [{call.sq}, {call.sk}]")


@fault(
    "B065", "K09", "a window of W keys is passed as W to a bound that is inclusive: one key too many on the left", ALL
)
class WindowTooWide(Kernel):
    def window(self, tile: Tile) -> tuple[int | None, int | None]:
        low, high = super().window(tile)
        return None if low is None else low - 1, high


@fault("B068", "K09", "the left bound of the window is taken as exclusive: one key too few", ALL)
class WindowTooNarrow(Kernel):
    def window(self, tile: Tile) -> tuple[int | None, int | None]:
        low, high = super().window(tile)
        return None if low is None else low + 1, high


@fault("B069", "K09", "the window is laid from the padded lengths and not from those of the batch entry", ALL)
class WindowOfPaddedLengths(Kernel):
    def window(self, tile: Tile) -> tuple[int | None, int | None]:
        call = tile.call
        if call.case.causal == "top-left":
            return super().window(tile)
        left, right = call.window or (None, None)
        offset = call.sk - call.sq
        return None if left is None else offset - left, None if right is None else offset + right


@fault("B072", "K09", "a right bound that is negative after the offset is read as unlimited", ALL)
class NegativeIsUnlimited(Kernel):
    def window(self, tile: Tile) -> tuple[int | None, int | None]:
        low, high = super().window(tile)
        return low, None if high is not None and high < 0 else high
