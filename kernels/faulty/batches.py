"""Heads, groups and batch entries: K12, ragged batches K13, zero sizes K37."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...oracle.result import Result
from .call import Array, Call, Tile
from .kernel import Kernel
from .registry import ALL, fault

# -- heads ---------------------------------------------------------------------------------------


@fault("B086", "K12", "dk and dv hold the first query head of each group in place of the group's sum", ("dk", "dv"))
class GroupNotSummed(Kernel):
    def summed(self, call: Call, h: int) -> bool:
        return h % call.group == 0


@fault("B088", "K12", "key heads are tiled over query heads, h mod Hk, and not repeated", ALL)
class HeadsTiled(Kernel):
    def key_head(self, call: Call, b: int, h: int) -> int:
        return h % call.hk


@fault(
    "B089", "K12", "grouped heads: a mask per batch entry lands on the axis of key heads where the two are as many", ALL
)
class MaskOnKeyHeads(Kernel):
    def mask(self, tile: Tile) -> Array | None:
        call = tile.call
        if call.group > 1 and call.b == call.hk and any(m.shape[:2] == (call.b, 1) for m in call.masks):
            tile = tile._replace(b=tile.h // call.group)
        return super().mask(tile)


@fault(
    "B091", "K12", "as many query rows as heads of a group: the output is taken to be swapped and swapped back", ("o",)
)
class RowsTakenForGroup(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        assert result.o is not None
        if call.sq != call.group:
            return result
        o = result.o.reshape(call.b, call.hk, call.group, call.sq, call.dv).swapaxes(2, 3)
        return replace(result, o=o.reshape(result.o.shape))


# -- ragged batches ------------------------------------------------------------------------------


@fault("B093", "K13", "a batch entry without query rows: dK and dV of its keys are never written", ("dk", "dv"))
class UnwrittenWithoutRows(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        if result.dk is None or result.dv is None or all(self.lengths(call, b)[0] for b in range(call.b)):
            return result
        dk, dv = result.dk.copy(), result.dv.copy()
        for b in range(call.b):
            if self.lengths(call, b)[0] == 0:
                dk[b] = dv[b] = call.memory.fill
        return replace(result, dk=dk, dv=dv)


@fault("B094", "K13", "a batch entry without keys is given one", ALL)
class AtLeastOneKey(Kernel):
    def lengths(self, call: Call, b: int) -> tuple[int, int]:
        rows, keys = super().lengths(call, b)
        return rows, min(max(keys, 1), call.sk)


@fault("B097", "K13", "dQ of a ragged batch is summed in tiles of 4 rows and read back in tiles of 8", ("dq",))
class DqInOtherTiles(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        if result.dq is None or call.case.q_lengths is None:
            return result
        dq = np.zeros_like(result.dq)
        for h in range(call.hq):
            packed, at = np.zeros((8 * (call.sq + 8) * (call.b + 1), call.d), dq.dtype), 0
            for b, n in enumerate(call.q_lengths):
                packed[at : at + n] = result.dq[b, h, :n]
                at += -(-n // 4) * 4
            at = 0
            for b, n in enumerate(call.q_lengths):
                dq[b, h, :n] = packed[at : at + n]
                at += -(-n // 8) * 8
        return replace(result, dq=dq)


@fault("B102", "K13", "the lengths of a ragged batch are ignored: rows see keys beyond their own", ALL)
class LengthsIgnored(Kernel):
    def lengths(self, call: Call, b: int) -> tuple[int, int]:
        return super().lengths(call, b)[0], call.sk


@fault("B103", "K13", "a ragged batch of one sequence of one row loses axes of its output", ("o",))
class Squeezed(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        assert result.o is not None
        ragged = call.case.q_lengths is not None or call.case.k_lengths is not None
        return replace(result, o=result.o.squeeze()) if ragged and call.b == 1 and call.sq == 1 else result


@fault("B186", "K29", "ragged key lengths are reduced to their maximum", ALL)
class LongestForAll(Kernel):
    def lengths(self, call: Call, b: int) -> tuple[int, int]:
        return super().lengths(call, b)[0], max(call.k_lengths)


# -- packed batches ------------------------------------------------------------------------------


@fault("sharp:packed-rows", "sharp", "a packed batch: positions count from its first row, not the sequence's", ALL)
class RowsOfTheBatch(Kernel):
    def offset(self, call: Call, b: int) -> int:
        at = call.memory.q_starts
        return super().offset(call, b) + (0 if at is None else int(at[b]))


@fault(
    "sharp:packed-tail", "sharp", "a packed batch: the last tile of keys is whole, with keys of the next sequence", ALL
)
class NextSequenceSeen(Kernel):
    def lengths(self, call: Call, b: int) -> tuple[int, int]:
        rows, keys = super().lengths(call, b)
        return rows, (keys if call.memory.k_starts is None else min(-(-keys // 4) * 4, call.sk))

    def entry(self, call: Call, array: Array, b: int, of_keys: bool = False) -> Array:
        own, at = super().entry(call, array, b, of_keys), call.memory.k_starts
        if at is None or not of_keys:
            return own
        more = array[0, :, at[b] : at[b] + call.sk]
        own[:, : more.shape[1]] = more
        return own


# -- nothing to do -------------------------------------------------------------------------------


@fault("B217", "K37", "an axis of size 0 is an exception and not an empty or zero result", ALL)
class ZeroSizeRaises(Kernel):
    def enter(self, call: Call) -> None:
        if 0 in (call.b, call.sq, call.sk):
            raise ZeroDivisionError("integer division or modulo by zero")
