"""Memory: strides K14 and K15, pages K29, what must not be read K32, unwritten K33, changed inputs K34."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...oracle.result import Result
from ..presenting import buffer, offset_of
from .call import Array, Block, Call, Partial, Tile
from .kernel import Kernel
from .registry import ALL, GRADIENTS, THROUGH_O, fault

# -- strides -------------------------------------------------------------------------------------


def at_strides(view: Array, strides: tuple[int, ...], b: int, h: int, behind: float) -> Array:
    """One head of a view, [S, D], read with other strides (in elements); ``behind`` where memory ends."""
    if not view.size:
        return view[b, h]
    memory = buffer(view).reshape(-1)
    start = offset_of(view) // view.itemsize + b * strides[0] + h * strides[1]
    at = start + np.arange(view.shape[2])[:, None] * strides[2] + np.arange(view.shape[3]) * strides[3]
    inside = (at >= 0) & (at < memory.size)
    found: Array = np.where(inside, memory[np.where(inside, at, 0)], memory.dtype.type(behind))
    return found


def strides_of(view: Array) -> tuple[int, ...]:
    """In elements."""
    return tuple(step // view.itemsize for step in view.strides)


def packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous array, in elements."""
    return tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))


def paged(call: Call, name: str) -> bool:
    return call.memory.table is not None and name in ("k", "v")


@fault("B104", "K14", "the last axis is taken to have stride 1", ALL)
class LastStrideIsOne(Kernel):
    def read(self, call: Call, name: str, b: int, h: int) -> Array:
        view = getattr(call.memory, name)
        if name == "do" or paged(call, name) or strides_of(view)[3] == 1:
            return super().read(call, name, b, h)
        return at_strides(view, (*strides_of(view)[:3], 1), b, h, call.memory.fill)


@fault("B106", "K14", "keys with stride 0 and a last tile of one key: the pointer has moved on by packed rows", ALL)
class LastKeyOfStrideZero(Kernel):
    def read(self, call: Call, name: str, b: int, h: int) -> Array:
        found, view = super().read(call, name, b, h), getattr(call.memory, name)
        if name not in ("k", "v") or paged(call, name) or not call.k_blocks or view.strides[2]:
            return found
        last = call.k_blocks[-1]
        if last.stop - last.start == 1 and call.sk > 1:
            strides = (*strides_of(view)[:2], view.shape[3], strides_of(view)[3])
            found = np.vstack([found[:-1], at_strides(view, strides, b, h, call.memory.fill)[-1:]])
        return found


@fault("B107", "K14", "V is read with the strides of K", ("o", "dq", "dk", "dbias", "dsink"))
class StridesOfKForV(Kernel):
    def read(self, call: Call, name: str, b: int, h: int) -> Array:
        if name != "v" or paged(call, name) or call.d != call.dv:
            return super().read(call, name, b, h)
        return at_strides(call.memory.v, strides_of(call.memory.k), b, h, call.memory.fill)


@fault("B109", "K14", "views are read as if they were packed", ALL)
class ReadAsPacked(Kernel):
    def read(self, call: Call, name: str, b: int, h: int) -> Array:
        view = getattr(call.memory, name)
        if name == "do" or paged(call, name) or view.flags.c_contiguous:
            return super().read(call, name, b, h)
        return at_strides(view, packed(view.shape), b, h, call.memory.fill)


@fault("B111", "K14", "dV is written with the strides of K where K and V lie differently", ("dv",))
class DvWithStridesOfK(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        swapped = [call.presentation.layouts[n] == "transposed" for n in (1, 2)]
        if result.dv is None or swapped[0] == swapped[1] or call.memory.table is not None:
            return result
        return replace(result, dv=result.dv.swapaxes(2, 3).reshape(result.dv.shape))


@fault("B112", "K15", "dO is read with the strides of O", GRADIENTS)
class StridesOfOForDo(Kernel):
    def read(self, call: Call, name: str, b: int, h: int) -> Array:
        view = getattr(call.memory, name)
        if name != "do" or view.flags.c_contiguous:
            return super().read(call, name, b, h)
        return at_strides(view, packed(view.shape), b, h, call.memory.fill)


@fault("B113", "K15", "the stride 0 of the gradient of a plain sum is ignored", GRADIENTS)
class StrideZeroIgnored(Kernel):
    def read(self, call: Call, name: str, b: int, h: int) -> Array:
        view = getattr(call.memory, name)
        if name != "do" or not any(n > 1 and step == 0 for n, step in zip(view.shape, view.strides, strict=True)):
            return super().read(call, name, b, h)
        full = packed(view.shape)
        strides = tuple(step or full[axis] for axis, step in enumerate(strides_of(view)))
        return at_strides(view, strides, b, h, call.memory.fill)


# -- pages ---------------------------------------------------------------------------------------


@fault("B184", "K29", "pages of one key: the last page is said to hold as many keys as there are", ALL)
class LastPageOfAllKeys(Kernel):
    def lengths(self, call: Call, b: int) -> tuple[int, int]:
        rows, keys = super().lengths(call, b)
        return rows, (min(call.sk, 2 * keys - 1) if call.presentation.page_size == 1 and keys else keys)


@fault("B185", "K29", "keys are looked for behind the keys of earlier entries, while each entry starts on a page", ALL)
class DenseOffsets(Kernel):
    def page(self, call: Call, b: int, j: Array) -> tuple[Array, Array]:
        table, size = call.memory.table, call.presentation.page_size
        assert table is not None and size is not None
        lengths = [self.lengths(call, entry)[1] for entry in range(call.b)]
        pages = np.concatenate([table[entry, : -(-n // size)] for entry, n in enumerate(lengths)])
        at = sum(lengths[:b]) + j
        return pages[at // size], at % size


@fault("B187", "K29", "pages of 4 keys or more: the index of the page stops at 1 (for 15)", ALL)
class PageIndexClamped(Kernel):
    def page(self, call: Call, b: int, j: Array) -> tuple[Array, Array]:
        table, size = call.memory.table, call.presentation.page_size
        assert table is not None and size is not None
        return table[b, np.minimum(j // size, 1 if size >= 4 else j)], j % size


@fault("B188", "K29", "page indices are loaded once, four of them: later pages repeat the fourth", ALL)
class FourPageIndices(Kernel):
    def page(self, call: Call, b: int, j: Array) -> tuple[Array, Array]:
        table, size = call.memory.table, call.presentation.page_size
        assert table is not None and size is not None
        return table[b, np.minimum(j // size, 3)], j % size


# -- what must not be read -----------------------------------------------------------------------


class _RawValues(Kernel):
    """P is 0 where a key is hidden, and V there is read nevertheless: 0 * NaN."""

    def raw(self, call: Call) -> bool:
        """Where V is read so."""
        return True

    def load(self, call: Call, name: str, b: int, h: int) -> Array:
        if name == "v" and self.raw(call):
            return self.read(call, name, b, h).astype(call.wide, order="C")
        return super().load(call, name, b, h)

    def fetch(self, tile: Tile, k: Array, v: Array, seen: Array | None) -> tuple[Array, Array]:
        fetched = super().fetch(tile, k, v, seen)
        return (fetched[0], v[tile.keys.all]) if self.raw(tile.call) else fetched


@fault("B199", "K32", "P is 0 behind the length of a batch entry, but V there is read: 0 * NaN", THROUGH_O)
class ValuesBehindTheLength(_RawValues):
    def raw(self, call: Call) -> bool:
        return call.case.k_lengths is not None and call.memory.table is None


@fault("B201", "K32", "whole pages are read and only P is masked: what lies behind the last key leaks", THROUGH_O)
class WholePages(Kernel):
    def attend(
        self, call: Call, b: int, h: int, rows: Block, q: Array, k: Array, v: Array, keys: Sequence[Block]
    ) -> Partial:
        at, size, n = (
            super().attend(call, b, h, rows, q, k, v, keys),
            call.presentation.page_size,
            self.lengths(call, b)[1],
        )
        if size is None or n % size == 0:
            return at
        page, slot = self.page(call, b, np.arange(n, -(-n // size) * size))
        behind = call.memory.v[page, slot, self.key_head(call, b, h)].astype(call.wide)
        return at._replace(acc=at.acc + np.zeros((len(at.acc), len(behind)), call.wide) @ behind)


@fault("B202", "K32", "values outside a sliding window are read and multiplied by a P of 0", THROUGH_O)
class ValuesOutsideTheWindow(_RawValues):
    def raw(self, call: Call) -> bool:
        return call.case.window is not None and call.case.k_lengths is None


@fault("B204", "K32", "unused keys are read and -inf is added to their scores: NaN stays NaN", ALL)
class AddedMinusInfinity(Kernel):
    def load(self, call: Call, name: str, b: int, h: int) -> Array:
        return (
            self.read(call, name, b, h).astype(call.wide, order="C") if name == "k" else super().load(call, name, b, h)
        )

    def fetch(self, tile: Tile, k: Array, v: Array, seen: Array | None) -> tuple[Array, Array]:
        return k[tile.keys.all], super().fetch(tile, k, v, seen)[1]

    def hide(self, tile: Tile, s: Array, seen: Array | None) -> Array:
        return s if seen is None else s + np.where(seen, 0, -np.inf).astype(s.dtype)


# -- buffers -------------------------------------------------------------------------------------


@fault(
    "B207",
    "K33",
    "rows and keys of ragged last blocks are never written to the gradients, which hold NaN",
    ("dq", "dk", "dv"),
)
class TailNeverWritten(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        out = {}
        for name, of in (("dq", call.q_blocks), ("dk", call.k_blocks), ("dv", call.k_blocks)):
            gradient = getattr(result, name)
            if gradient is not None and of and of[-1].missing:
                gradient = gradient.copy()
                gradient[:, :, of[-1].all] = np.nan
            out[name] = gradient
        return replace(result, **out)


@fault("B208", "K34", "the caller's queries are multiplied by the scale in place", ("inputs",))
class ScaledInPlace(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        before = np.array(call.memory.q)
        q = (before.astype(call.wide) * call.wide.type(self.scale(call, False))).astype(call.storage)
        return replace(result, mutated=("q",) if q.tobytes() != before.tobytes() else ())
