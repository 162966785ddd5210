"""Lengths that are no multiple of the block: K07."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .call import Array, Block, Call, Partial, Tile
from .kernel import Kernel
from .registry import ALL, THROUGH_O, fault


def with_more_keys(at: Partial, s: Array, v: Array) -> Partial:
    """A partial softmax after some more keys with scores [rows or 1, keys]."""
    m = np.maximum(at.m, s.max(axis=1, keepdims=True))
    p, factor = np.exp(s - m), np.exp(at.m - m)
    return Partial(m, at.total * factor + p.sum(axis=1, keepdims=True), at.acc * factor + p @ v)


def banded(call: Call) -> bool:
    """Whether causality or a window hides the keys behind the end."""
    return call.causal is not None or call.window is not None


@fault("B039", "K07", "no mask on the ragged key tail: the zeros that fill it up count as keys with score 0", ALL)
class TailCounts(Kernel):
    def attend(
        self, call: Call, b: int, h: int, rows: Block, q: Array, k: Array, v: Array, keys: Sequence[Block]
    ) -> Partial:
        at = super().attend(call, b, h, rows, q, k, v, keys)
        if not keys or not keys[-1].missing or banded(call):
            return at
        missing = keys[-1].missing
        return with_more_keys(at, np.zeros((len(at.m), missing), call.wide), np.zeros((missing, call.dv), call.wide))


@fault("B040", "K07", "a head dimension that is no power of two is read up to one: into the next row", ALL)
class ReadsBeyondTheRow(Kernel):
    def products(self, tile: Tile, q: Array, k: Array) -> Array:
        more = (1 << (tile.call.d - 1).bit_length()) - tile.call.d
        s = super().products(tile, q, k)
        return s + np.roll(q, -1, axis=0)[:, :more] @ np.roll(k, -1, axis=0)[:, :more].T if more else s


@fault("B042", "K07", "V behind a ragged tail is stale and NaN; scores are hidden, but 0 * NaN is added", THROUGH_O)
class StaleTail(Kernel):
    def attend(
        self, call: Call, b: int, h: int, rows: Block, q: Array, k: Array, v: Array, keys: Sequence[Block]
    ) -> Partial:
        at = super().attend(call, b, h, rows, q, k, v, keys)
        if not keys or not keys[-1].missing:
            return at
        stale = np.full((keys[-1].missing, call.dv), np.nan, call.wide)
        return at._replace(acc=at.acc + np.zeros((len(at.acc), len(stale)), call.wide) @ stale)


@fault(
    "B045",
    "K07",
    "a ragged last block is filled with keys that score 0: exp(-lse) * 0 is NaN once exp overflows",
    ("dq",),
)
class TailScoresZero(Kernel):
    def add_dq(self, tile: Tile, dq: Array, ds: Array, k: Array, lse: Array, delta: Array) -> None:
        n = tile.keys.missing
        # P = exp(0 - lse), dP = 0, and the keys are zeros
        p = np.repeat(self.probabilities(tile, np.zeros_like(lse), lse), n, axis=1)
        zeros = np.zeros((n, k.shape[1]), k.dtype)
        super().add_dq(tile, dq, np.hstack([ds, p * (0 - delta)]), np.vstack([k, zeros]), lse, delta)


@fault(
    "B046",
    "K07",
    "rows that fill up the last query block score 0 against the real row's lse; a mask avoids it",
    ("dk", "dv"),
)
class PadRowsWithRealLse(Kernel):
    def add_dk_dv(self, tile: Tile, dk: Array, dv: Array, ds: Array, p: Array, q: Array, do: Array, lse: Array) -> None:
        super().add_dk_dv(tile, dk, dv, ds, p, q, do, lse)
        n = tile.rows.missing
        if n and not tile.call.masks:
            pad = np.repeat(self.probabilities(tile, np.zeros((1, tile.shape[1]), lse.dtype), lse[-1:]), n, axis=0)
            dk[tile.keys.all] += (pad * 0).T @ np.zeros((n, q.shape[1]), q.dtype)
            dv[tile.keys.all] += pad.T @ np.zeros((n, do.shape[1]), do.dtype)


@fault(
    "B047",
    "K07",
    "keys shorter than one block: the backward pass multiplies dS = 0 with what lies behind, NaN",
    ("dq",),
)
class ShorterThanABlock(Kernel):
    def add_dq(self, tile: Tile, dq: Array, ds: Array, k: Array, lse: Array, delta: Array) -> None:
        n = tile.keys.missing if len(tile.call.k_blocks) == 1 else 0
        behind = np.full((n, k.shape[1]), np.nan, k.dtype)
        zeros = np.zeros((ds.shape[0], n), ds.dtype)
        super().add_dq(tile, dq, np.hstack([ds, zeros]), np.vstack([k, behind]), lse, delta)


@fault("B049", "K07", "the loop runs over whole blocks: keys of the next head in memory count too", ALL)
class WholeBlocks(Kernel):
    def attend(
        self, call: Call, b: int, h: int, rows: Block, q: Array, k: Array, v: Array, keys: Sequence[Block]
    ) -> Partial:
        at = super().attend(call, b, h, rows, q, k, v, keys)
        if not keys or not keys[-1].missing or banded(call):
            return at
        after = (b * call.hk + self.key_head(call, b, h) + 1) % (call.b * call.hk)
        k, v = (self.load(call, name, *divmod(after, call.hk))[: keys[-1].missing] for name in ("k", "v"))
        tile = Tile(call, b, h, rows, keys[-1], False)
        s = self.products(tile, q[rows.all], k) * call.wide.type(self.scale(call, False))
        return with_more_keys(at, s, v)


@fault(
    "B050", "K07", "rows of the bias are taken to be padded to whole blocks: read elsewhere, NaN beyond the end", ALL
)
class BiasRowsPadded(Kernel):
    def bias(self, tile: Tile) -> Array | None:
        bias = tile.call.bias
        if bias is None or bias.shape[2] == 1 or bias.shape[3] == 1:
            return super().bias(tile)
        b, h, _, sk = bias.shape
        last = tile.call.k_blocks[-1]
        plane = bias[tile.b if b > 1 else 0, tile.h if h > 1 else 0].ravel().astype(tile.call.wide)
        at = tile.i * (sk + last.missing) + tile.j
        return np.where(at < plane.size, plane[np.minimum(at, plane.size - 1)], np.nan)


@fault("B051", "K07", "scores behind the end of the keys, 0, take part in the running maximum", ALL)
class TailInTheMaximum(Kernel):
    def row_max(self, tile: Tile, s: Array) -> Array:
        m = super().row_max(tile, s)
        return np.maximum(m, 0) if tile.keys.missing else m
