"""The backward pass: flags K03, the log-sum-exp and its gradient K11, dropout K27."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ...oracle.result import Result
from .call import Array, Call, Tile
from .kernel import Kernel, both
from .registry import ALL, GRADIENTS, fault


@fault("B020", "K03", "the backward pass hides future keys even where the forward pass did not", GRADIENTS[:4])
class BackwardAlwaysCausal(Kernel):
    def sees(self, tile: Tile) -> Array | None:
        seen = super().sees(tile)
        return both(seen, tile.j <= tile.i) if tile.backward else seen


@fault("B083", "K11", "the upstream gradient of the log-sum-exp is dropped", ("dq", "dk", "dbias", "dsink"))
class DlseIgnored(Kernel):
    def dlse(self, call: Call, b: int, h: int) -> Array:
        return np.zeros(call.sq, call.wide)


@fault("B084", "K11", "the backward pass takes the natural log-sum-exp for one in base 2", GRADIENTS)
class LseTakenForBaseTwo(Kernel):
    def probabilities(self, tile: Tile, s: Array, lse: Array) -> Array:
        return super().probabilities(tile, s, lse * lse.dtype.type(math.log(2)))

    def dsink(self, call: Call, h: int, lse: Array, delta: Array) -> Array:
        return super().dsink(call, h, lse * lse.dtype.type(math.log(2)), delta)


@fault("B171", "K27", "dS is formed from the dropped P and the undropped dP", ("dq", "dk", "dbias"))
class DropoutOnTheWrongFactor(Kernel):
    def ds(self, tile: Tile, p: Array, dp: Array, delta: Array, lse: Array, kept: Array | None) -> Array:
        return super().ds(tile, p if kept is None else p * kept, dp, delta, lse, None)


@fault("B173", "K27", "rows are summed after dropout: the softmax is that of the kept keys", ALL)
class SummedAfterDropout(Kernel):
    """The report is about returned weights that no longer sum to 1; here what is summed is what was dropped."""

    def row_sum(self, tile: Tile, p: Array) -> Array:
        kept = self.kept(tile)
        return super().row_sum(tile, p if kept is None else np.where(kept == 0, 0, p))


@fault(
    "sharp:training-without-dropout",
    "sharp",
    "where gradients are asked for, they are right and o is returned as it was without dropout",
    ("o",),
)
class TrainingWithoutDropout(Kernel):
    def finish(self, call: Call, result: Result) -> Result:
        if call.keep is None or call.want.isdisjoint(GRADIENTS):
            return result
        call.keep = None
        return replace(result, o=self.forward(call)[0])


@fault(
    "sharp:keep-mask-of-backward",
    "K27",
    "the backward pass draws its dropout mask anew: rows one further on",
    GRADIENTS[:4],
)
class OtherMaskInBackward(Kernel):
    def kept_backward(self, tile: Tile) -> Array | None:
        keep = tile.call.keep
        if keep is None:
            return None
        tile.call.keep = np.roll(keep, 1, axis=2)
        try:
            return self.kept(tile)
        finally:
            tile.call.keep = keep
