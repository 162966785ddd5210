"""The kernel that the faults are planted in: right, blocked, and written in small steps that can be overridden.

It goes batch entry by batch entry and head by head, reads tiles of scores and keeps the online
softmax of FlashAttention (Dao et al., 2022, arXiv:2205.14135); the backward pass recomputes the
probabilities of each tile from the log-sum-exp. Its index code is its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...oracle.case import Case, Presentation
from ...oracle.result import GRADIENTS, Result
from ..presenting import unpacked
from .call import Array, Block, Call, Partial, Tile


class Kernel:
    """A right kernel. Every method is a step that a fault may override."""

    # -- memory --------------------------------------------------------------------------------

    def lengths(self, call: Call, b: int) -> tuple[int, int]:
        """Rows and keys of a batch entry that are not padding."""
        return call.q_lengths[b], call.k_lengths[b]

    def key_head(self, call: Call, b: int, h: int) -> int:
        return h // call.group

    def read(self, call: Call, name: str, b: int, h: int) -> Array:
        """One head of "q", "k", "v" or "do" as it lies in memory, [S, D]."""
        array: Array = getattr(call.memory, name)
        of_keys = name in ("k", "v")
        if call.memory.table is None or not of_keys:
            return self.entry(call, array, b, of_keys)[h]
        page, slot = self.page(call, b, np.arange(self.lengths(call, b)[1]))
        out = np.zeros((call.sk, array.shape[3]), array.dtype)
        out[: len(page)] = array[page, slot, h]
        return out

    def entry(self, call: Call, array: Array, b: int, of_keys: bool = False) -> Array:
        """Batch entry b of q, k, v, do or dlse: [H, S, ...], also where the batch is packed."""
        at = call.memory.k_starts if of_keys else call.memory.q_starts
        if at is None:
            return array[b]
        return unpacked(array, at[b : b + 2], call.sk if of_keys else call.sq)[0]

    def page(self, call: Call, b: int, j: Array) -> tuple[Array, Array]:
        """Page of the pool and place in it of these keys."""
        assert call.memory.table is not None and call.presentation.page_size is not None
        size = call.presentation.page_size
        return call.memory.table[b, j // size], j % size

    def load(self, call: Call, name: str, b: int, h: int) -> Array:
        """``read`` in the accumulator's format, with zeros in place of padding."""
        array = self.read(call, name, b, h).astype(call.wide, order="C")
        rows, keys = self.lengths(call, b)
        array[keys if name in ("k", "v") else rows :] = 0
        return array

    def fetch(self, tile: Tile, k: Array, v: Array, seen: Array | None) -> tuple[Array, Array]:
        """The tile's keys and values, with zeros for those that no row of the tile sees."""
        k, v = k[tile.keys.all], v[tile.keys.all]
        if seen is not None:
            some = np.any(seen, axis=0)
            if not some.all():
                k, v = np.where(some[:, None], k, 0), np.where(some[:, None], v, 0)
        return k, v

    # -- what is visible -----------------------------------------------------------------------

    def offset(self, call: Call, b: int) -> int:
        """What aligns row 0 with a key: 0 top-left, else the last row with the last key."""
        rows, keys = self.lengths(call, b)
        return 0 if call.case.causal == "top-left" else keys - rows

    def window(self, tile: Tile) -> tuple[int | None, int | None]:
        """Least and largest j - i that the window allows."""
        left, right = tile.call.window or (None, None)
        offset = self.offset(tile.call, tile.b)
        return None if left is None else offset - left, None if right is None else offset + right

    def last_key(self, tile: Tile) -> Array | None:
        """The last key that causality lets each row see, [rows, 1]."""
        return None if tile.call.causal is None else tile.i + self.offset(tile.call, tile.b)

    def mask(self, tile: Tile) -> Array | None:
        seen: Array | None = None
        for mask in tile.call.masks:
            seen = both(seen, self.part(mask, tile))
        return seen

    def part(self, array: Array, tile: Tile) -> Array:
        """A tile of an array of four axes, as a view of [rows or 1, keys or 1]."""
        b, h, i, j = array.shape
        rows = tile.rows.all if i > 1 else slice(None)
        keys = tile.keys.all if j > 1 else slice(None)
        part: Array = array[tile.b if b > 1 else 0, tile.h if h > 1 else 0, rows, keys]
        return part

    def sees(self, tile: Tile) -> Array | None:
        """True where a row sees a key, broadcastable to the tile. None: everything."""
        call = tile.call
        seen = self.mask(tile)
        rows, keys = self.lengths(call, tile.b)
        if tile.rows.stop > rows:
            seen = both(seen, tile.i < rows)
        if tile.keys.stop > keys:
            seen = both(seen, (tile.j < keys)[None])
        last = self.last_key(tile)
        if last is not None:
            seen = both(seen, tile.j <= last)
        if call.window is not None:
            low, high = self.window(tile)
            # an integer of Python: a bound may be past those of numpy
            ahead = tile.j - tile.i
            seen = both(seen, None if low is None or low <= -call.sq - call.sk else ahead >= low)
            seen = both(seen, None if high is None or high >= call.sq + call.sk else ahead <= high)
        if call.bias_hides:
            assert call.bias is not None
            seen = both(seen, self.part(call.bias, tile) > -np.inf)
        return seen

    # -- scores --------------------------------------------------------------------------------

    def scale(self, call: Call, backward: bool) -> float:
        return 1 / math.sqrt(call.d) if call.case.scale is None else call.case.scale

    def products(self, tile: Tile, q: Array, k: Array) -> Array:
        return q @ k.T

    def tanh(self, x: Array) -> Array:
        return np.tanh(x)

    def distance(self, tile: Tile) -> Array:
        """What ALiBi multiplies its slope with."""
        return abs(tile.i + self.offset(tile.call, tile.b) - tile.j)

    def bias(self, tile: Tile) -> Array | None:
        bias = tile.call.bias
        return None if bias is None else self.part(bias, tile).astype(tile.call.wide)

    def hide(self, tile: Tile, s: Array, seen: Array | None) -> Array:
        """Scores with -inf where a row does not see a key."""
        return s if seen is None else np.where(seen, s, -np.inf)

    def scores(self, tile: Tile, q: Array, k: Array, seen: Array | None) -> tuple[Array, Array | None]:
        """Scores of a tile, and the tanh of the capped ones, 0 where hidden (None without a cap)."""
        call, wide = tile.call, tile.call.wide.type
        s = self.products(tile, q, k) * wide(self.scale(call, tile.backward))
        tanh = None
        if call.case.softcap is not None:
            tanh = self.tanh(s / wide(call.case.softcap))
            s = tanh * wide(call.case.softcap)
            tanh = tanh if seen is None else np.where(seen, tanh, 0)
        if call.slopes is not None:
            s = s - wide(call.slopes[tile.b, tile.h]) * self.distance(tile).astype(wide)
        bias = self.bias(tile)
        if bias is not None:
            s = s + bias
        return self.hide(tile, s, seen), tanh

    # -- forward -------------------------------------------------------------------------------

    def start(self, call: Call) -> float:
        """Where the running maximum starts."""
        return -np.inf

    def visited(self, tile: Tile) -> bool:
        """Whether the loop over key blocks reaches this one."""
        return True

    def row_max(self, tile: Tile, s: Array) -> Array:
        return s.max(axis=1, keepdims=True)

    def origin(self, tile: Tile, m: Array) -> Array:
        """What scores are measured from: never -inf, for exp(-inf - -inf) is NaN."""
        return np.where(m == -np.inf, 0, m)

    def exponential(self, tile: Tile, s: Array, origin: Array) -> Array:
        return np.exp(s - origin)

    def rescale(self, old: Array, new: Array) -> Array:
        """The factor for what was summed under the old maximum."""
        return np.exp(old - new)

    def row_sum(self, tile: Tile, p: Array) -> Array:
        return p.sum(axis=1, keepdims=True)

    def kept(self, tile: Tile) -> Array | None:
        """What dropout multiplies probabilities with, None without it."""
        call = tile.call
        if call.keep is None or call.case.dropout is None:
            return None
        return self.part(call.keep, tile) * call.wide.type(1 / (1 - call.case.dropout))

    def weights(self, tile: Tile, p: Array) -> Array:
        """P as it meets V."""
        kept = self.kept(tile)
        return p if kept is None else p * kept

    def step(self, tile: Tile, s: Array, v: Array, so_far: Partial) -> Partial:
        """One key block of the online softmax."""
        m = np.maximum(so_far.m, self.row_max(tile, s))
        origin = self.origin(tile, m)
        p, factor = self.exponential(tile, s, origin), self.rescale(so_far.m, origin)
        total = so_far.total * factor + self.row_sum(tile, p)
        return Partial(m, total, so_far.acc * factor + self.weights(tile, p) @ v)

    def attend(
        self, call: Call, b: int, h: int, rows: Block, q: Array, k: Array, v: Array, keys: Sequence[Block]
    ) -> Partial:
        """The online softmax of a block of rows over these key blocks."""
        n = rows.stop - rows.start
        zeros = np.zeros((n, 1), call.wide)
        at = Partial(zeros + call.wide.type(self.start(call)), zeros, np.zeros((n, call.dv), call.wide))
        for block in keys:
            tile = Tile(call, b, h, rows, block, False)
            if self.visited(tile):
                seen = self.sees(tile)
                k_tile, v_tile = self.fetch(tile, k, v, seen)
                s, _ = self.scores(tile, q[rows.all], k_tile, seen)
                at = self.step(tile, s, v_tile, at)
        return at

    def add_sink(self, call: Call, h: int, at: Partial) -> Partial:
        """The sink as one more key, of value 0."""
        assert call.case.sinks is not None
        sink = call.wide.type(call.case.sinks[h])
        m = np.maximum(at.m, sink)
        factor = np.exp(at.m - m)
        return Partial(m, at.total * factor + np.exp(sink - m), at.acc * factor)

    def finish_rows(self, call: Call, b: int, h: int, rows: Block, at: Partial) -> tuple[Array, Array]:
        """O [rows, Dv] and log-sum-exp [rows, 1] of a block of rows; 0 and -inf where nothing is seen."""
        divisor = np.where(at.total == 0, 1, at.total)
        return at.acc / divisor, np.where(at.total == 0, -np.inf, at.m + np.log(divisor))

    def forward_rows(
        self, call: Call, b: int, h: int, rows: Block, q: Array, k: Array, v: Array
    ) -> tuple[Array, Array]:
        at = self.attend(call, b, h, rows, q, k, v, call.k_blocks)
        if call.case.sinks is not None:
            at = self.add_sink(call, h, at)
        return self.finish_rows(call, b, h, rows, at)

    def forward(self, call: Call) -> tuple[Array, Array]:
        """o [B, Hq, Sq, Dv] in storage and lse [B, Hq, Sq]."""
        o = np.zeros((call.b, call.hq, call.sq, call.dv), call.storage)
        lse = np.full((call.b, call.hq, call.sq), -np.inf, call.wide)
        for b in range(call.b):
            for h in range(call.hq):
                g = self.key_head(call, b, h)
                q, k, v = self.load(call, "q", b, h), self.load(call, "k", b, g), self.load(call, "v", b, g)
                for rows in call.q_blocks:
                    o[b, h, rows.all], of_rows = self.forward_rows(call, b, h, rows, q, k, v)
                    lse[b, h, rows.all] = of_rows[:, 0]
        return o, lse

    # -- backward ------------------------------------------------------------------------------

    def dlse(self, call: Call, b: int, h: int) -> Array:
        """The upstream gradient of the log-sum-exp, [Sq]."""
        if call.memory.dlse is None:
            return np.zeros(call.sq, call.wide)
        rows = self.lengths(call, b)[0]
        return np.where(np.arange(call.sq) < rows, self.entry(call, call.memory.dlse, b)[h], 0).astype(call.wide)

    def delta(self, call: Call, b: int, h: int, do: Array, o: Array) -> Array:
        """rowsum(dO * O) less the gradient of the log-sum-exp, [Sq, 1]."""
        delta = (do * o.astype(call.wide)).sum(axis=1)
        return (delta - self.dlse(call, b, h))[:, None]

    def probabilities(self, tile: Tile, s: Array, lse: Array) -> Array:
        """P of the backward pass; an empty row has lse = -inf and must give zeros."""
        return np.exp(s - np.where(lse == -np.inf, np.inf, lse))

    def kept_backward(self, tile: Tile) -> Array | None:
        return self.kept(tile)

    def ds(self, tile: Tile, p: Array, dp: Array, delta: Array, lse: Array, kept: Array | None) -> Array:
        """The gradient of the scores, exactly 0 where p is 0: the pair is hidden or far below the maximum."""
        if kept is not None:
            dp = dp * kept
        return np.where(p == 0, 0, p * (dp - delta))

    def through_cap(self, ds: Array, tanh: Array) -> Array:
        return ds * (1 - tanh * tanh)

    def add_dbias(self, dbias: Array, ds: Array, tile: Tile) -> None:
        here = self.part(dbias, tile)
        here += sum_to(ds, here.shape)

    def summed(self, call: Call, h: int) -> bool:
        """Whether query head h is added to dK and dV of its key head."""
        return True

    def add_dq(self, tile: Tile, dq: Array, ds: Array, k: Array, lse: Array, delta: Array) -> None:
        """Add a tile's share to dQ of the head [Sq, D]; lse and delta [rows, 1] are for faults to misuse."""
        dq[tile.rows.all] += ds @ k

    def add_dk_dv(self, tile: Tile, dk: Array, dv: Array, ds: Array, p: Array, q: Array, do: Array, lse: Array) -> None:
        """Add a tile's share to dK and dV of the key head; q and do are those of the tile's rows."""
        dk[tile.keys.all] += ds.T @ q
        dv[tile.keys.all] += p.T @ do

    def dsink(self, call: Call, h: int, lse: Array, delta: Array) -> Array:
        """A head's share of the sink's gradient: P (0 - delta), for its dP is 0."""
        assert call.case.sinks is not None
        p = np.exp(call.wide.type(call.case.sinks[h]) - np.where(lse == -np.inf, np.inf, lse))
        share: Array = np.where(p == 0, 0, -p * delta).sum()
        return share

    def backward(self, call: Call, o: Array, lse: Array) -> Result:
        """The whole result, gradients rounded once at the end."""
        case = call.case
        dq, dk, dv = (call.gradients(f"d{n}", getattr(case, n).shape) for n in ("q", "k", "v"))
        dbias = None if call.bias is None else call.gradients("dbias", call.bias.shape)
        dsink = None if case.sinks is None else call.gradients("dsink", case.sinks.shape)
        for b in range(call.b):
            for h in range(call.hq):
                g = self.key_head(call, b, h)
                q, k, v = self.load(call, "q", b, h), self.load(call, "k", b, g), self.load(call, "v", b, g)
                do = self.load(call, "do", b, h)
                delta, row_lse = self.delta(call, b, h, do, o[b, h]), lse[b, h][:, None]
                if dsink is not None:
                    dsink[h] += self.dsink(call, h, row_lse, delta)
                for rows in call.q_blocks:
                    for keys in call.k_blocks:
                        tile = Tile(call, b, h, rows, keys, True)
                        self.backward_tile(tile, q, k, v, do, row_lse, delta, dq[b, h], dk[b, g], dv[b, g], dbias)
        scale = call.wide.type(self.scale(call, True))
        if case.bias is not None and dbias is not None:
            dbias = dbias.reshape(case.bias.shape).astype(case.bias.dtype)
        dq, dk, dv = (array.astype(call.storage) for array in (dq * scale, dk * scale, dv))
        return Result(o=o, lse=lse, dq=dq, dk=dk, dv=dv, dbias=dbias, dsink=dsink)

    def backward_tile(
        self, tile: Tile, q: Array, k: Array, v: Array, do: Array, lse: Array, delta: Array,
        dq: Array, dk: Array, dv: Array, dbias: Array | None,
    ) -> None:  # fmt: skip
        """One tile of the backward pass; q, do, lse, delta and the gradients are those of the head."""
        rows = tile.rows.all
        q, do, lse, delta = q[rows], do[rows], lse[rows], delta[rows]
        seen = self.sees(tile)
        k, v = self.fetch(tile, k, v, seen)
        s, tanh = self.scores(tile, q, k, seen)
        p, kept = self.probabilities(tile, s, lse), self.kept_backward(tile)
        ds = self.ds(tile, p, do @ v.T, delta, lse, kept)
        if dbias is not None:
            self.add_dbias(dbias, ds, tile)
        if tanh is not None:
            ds = self.through_cap(ds, tanh)
        self.add_dq(tile, dq, ds, k, lse, delta)
        if self.summed(tile.call, tile.h):
            self.add_dk_dv(tile, dk, dv, ds, p if kept is None else p * kept, q, do, lse)

    # -- the call ------------------------------------------------------------------------------

    def enter(self, call: Call) -> None:
        """Before anything is read."""

    def finish(self, call: Call, result: Result) -> Result:
        """The last touch on the outputs."""
        return result

    def run(self, case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        call = Call(case, presentation, want)
        with np.errstate(all="ignore"):
            self.enter(call)
            o, lse = self.forward(call)
            forward_only = want.isdisjoint(GRADIENTS)
            result = Result(o=o, lse=lse) if forward_only else self.backward(call, o, lse)
            return self.finish(call, result)


def both(a: Array | None, b: Array | None) -> Array | None:
    return b if a is None else a if b is None else a & b


def sum_to(array: Array, shape: tuple[int, ...]) -> Array:
    for axis in (0, 1):
        array = array.sum(axis=axis, keepdims=True) if shape[axis] == 1 else array
    return array
