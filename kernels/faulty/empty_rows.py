"""Rows that see no key: K01 forward, K02 gradients."""

from __future__ import annotations

import numpy as np

from .call import Array, Block, Call, Partial, Tile
from .kernel import Kernel
from .registry import GRADIENTS, fault

_NOT_SINK = ("o", "lse", "dq", "dk", "dv", "dbias")


@fault("B003", "K01", "a row that sees no key keeps what the accumulator held: the sum of the last block's V", ("o",))
class LeftInAccumulator(Kernel):
    def attend(self, call: Call, b: int, h: int, rows: Block, q: Array, k: Array, v: Array, keys: object) -> Partial:
        at = super().attend(call, b, h, rows, q, k, v, keys)  # type: ignore[arg-type]
        if not call.k_blocks or call.case.sinks is not None:
            return at  # with a sink no row is empty
        left = v[call.k_blocks[-1].all].sum(axis=0)
        return at._replace(acc=np.where(at.total == 0, left, at.acc))


@fault("B005", "K01", "plain softmax over a row of -inf: NaN in O and in the log-sum-exp", _NOT_SINK)
class PlainSoftmax(Kernel):
    def finish_rows(self, call: Call, b: int, h: int, rows: Block, at: Partial) -> tuple[Array, Array]:
        o, lse = super().finish_rows(call, b, h, rows, at)
        seen = (at.total != 0) | (np.arange(rows.start, rows.stop)[:, None] >= self.lengths(call, b)[0])
        return np.where(seen, o, np.nan), np.where(seen, lse, np.nan)


@fault("B007", "K01", "0 / 0 in O where a key padding mask hides every key of a batch entry", ("o",))
class PaddingMaskOfNothing(Kernel):
    def finish_rows(self, call: Call, b: int, h: int, rows: Block, at: Partial) -> tuple[Array, Array]:
        o, lse = super().finish_rows(call, b, h, rows, at)
        padding = any(mask.shape[2] == 1 for mask in call.masks)
        return (np.where(at.total == 0, np.nan, o) if padding else o), lse


@fault("B010", "K01", "0 / 0 in O where a sliding window leaves a row without keys", ("o",))
class WindowOfNothing(Kernel):
    def finish_rows(self, call: Call, b: int, h: int, rows: Block, at: Partial) -> tuple[Array, Array]:
        o, lse = super().finish_rows(call, b, h, rows, at)
        return (o if call.window is None else np.where(at.total == 0, np.nan, o)), lse


@fault(
    "B013", "K02", "the NaN of a row hidden by a mask is repaired in O after the softmax and stays in P", GRADIENTS[:4]
)
class RepairedAfterSoftmax(Kernel):
    def probabilities(self, tile: Tile, s: Array, lse: Array) -> Array:
        p = super().probabilities(tile, s, lse)
        if not tile.call.masks and not tile.call.bias_hides:
            return p
        real = tile.i < self.lengths(tile.call, tile.b)[0]
        return np.where((lse == -np.inf) & real, np.nan, p)


@fault("B014", "K02", "O of an empty row is repaired, but its gradients see exp(-inf - -inf)", GRADIENTS[:4])
class UnguardedRecomputation(Kernel):
    def probabilities(self, tile: Tile, s: Array, lse: Array) -> Array:
        return np.exp(s - lse)


@fault(
    "B016", "K02", "rows that fill up the last query block have lse -inf and score 0: P = exp(0 + inf)", ("dk", "dv")
)
class PadRowsSeePadColumns(Kernel):
    def add_dk_dv(self, tile: Tile, dk: Array, dv: Array, ds: Array, p: Array, q: Array, do: Array, lse: Array) -> None:
        super().add_dk_dv(tile, dk, dv, ds, p, q, do, lse)
        # the repair gave pad rows the pad columns to look at: none where the key block is full
        if tile.rows.missing and not tile.keys.missing:
            pad = np.full((tile.rows.missing, tile.shape[1]), np.exp(np.inf), tile.call.wide)
            dk[tile.keys.all] += (pad * 0).T @ np.zeros((len(pad), q.shape[1]), q.dtype)
            dv[tile.keys.all] += pad.T @ np.zeros((len(pad), do.shape[1]), do.dtype)


@fault(
    "B017",
    "K02",
    "the row sum gets the smallest normal number: O is 0, its derivative 0 / tiny^2",
    ("dq", "dk", "dbias"),
)
class SumPlusTiny(Kernel):
    def ds(self, tile: Tile, p: Array, dp: Array, delta: Array, lse: Array, kept: Array | None) -> Array:
        real = tile.i < self.lengths(tile.call, tile.b)[0]
        return np.where((lse == -np.inf) & real, np.nan, super().ds(tile, p, dp, delta, lse, kept))


@fault("B099", "K13", "a batch entry with no keys at all divides 0 by 0, in O and in the log-sum-exp", _NOT_SINK)
class EntryOfNoKeys(Kernel):
    def finish_rows(self, call: Call, b: int, h: int, rows: Block, at: Partial) -> tuple[Array, Array]:
        o, lse = super().finish_rows(call, b, h, rows, at)
        if self.lengths(call, b)[1] > 0:
            return o, lse
        seen = (at.total != 0) | (np.arange(rows.start, rows.stop)[:, None] >= self.lengths(call, b)[0])
        return np.where(seen, o, np.nan), np.where(seen, lse, np.nan)
