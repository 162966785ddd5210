"""A case as the kernel of the zoo is handed it: memory, flags, masks, and how its axes are cut into tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...oracle.case import Case, Presentation
from ..presenting import Presented, present

Array = np.ndarray

#: sizes of a query block and of a key block where the presentation leaves the choice to the kernel
DEFAULT_BLOCK = 4


class Block(NamedTuple):
    """Elements ``start`` to ``stop`` of an axis, ``missing`` short of the block's nominal size."""

    start: int
    stop: int
    missing: int

    @property
    def all(self) -> slice:
        return slice(self.start, self.stop)


def blocks(size: int, sizes: tuple[int, ...] | None) -> list[Block]:
    """An axis cut into blocks of these sizes in order, the last one repeated."""
    sizes, start = sizes or (DEFAULT_BLOCK,), 0
    out: list[Block] = []
    while start < size:
        nominal = sizes[min(len(out), len(sizes) - 1)]
        stop = min(size, start + nominal)
        out.append(Block(start, stop, start + nominal - stop))
        start = stop
    return out


class Call:
    """A case as the kernel is handed it: memory, flags, masks, and the buffers of the gradients.

    ``causal`` and ``window`` are the flags given to the kernel, None where the presentation puts
    them as a mask; ``masks`` hold True where a row sees a key.
    """

    def __init__(self, case: Case, presentation: Presentation, want: frozenset[str]) -> None:
        b, hq, hk, sq, sk, d, dv = case.shape
        self.case, self.presentation, self.want = case, presentation, want
        self.memory: Presented = present(case, presentation)
        self.b, self.hq, self.hk, self.sq, self.sk, self.d, self.dv = b, hq, hk, sq, sk, d, dv
        self.group = hq // hk
        self.wide = case.wide_format.dtype
        self.storage = case.q.dtype
        self.q_lengths, self.k_lengths = case.q_length, case.k_length
        self.q_blocks = blocks(sq, presentation.q_blocks)
        self.k_blocks = blocks(sk, presentation.k_blocks)
        self.causal, self.window = case.causal, case.window
        self.masks: list[Array] = [] if case.mask is None else [axes4(case.mask)]
        self.bias = None if case.bias is None else axes4(case.bias)
        self.bias_hides = self.bias is not None and bool(np.isneginf(self.bias.astype(np.float64)).any())
        self.keep = None if case.keep is None else axes4(case.keep)
        self.notes: dict[str, Any] = {}  # what a fault remembers within one call
        self.slopes = None if case.alibi_slopes is None else np.broadcast_to(case.alibi_slopes, (b, hq))
        if presentation.route == "mask" and (case.causal is not None or case.window is not None):
            self.masks.append(flags_as_mask(case))
            self.causal = self.window = None

    def gradients(self, name: str, shape: tuple[int, ...]) -> Array:
        """The buffer in which a gradient is summed up."""
        return np.zeros(shape, self.wide)


class Tile(NamedTuple):
    """Where a tile of scores lies, and the pass that reads it."""

    call: Call
    b: int
    h: int
    rows: Block
    keys: Block
    backward: bool

    @property
    def i(self) -> Array:
        """Row numbers, [rows, 1]."""
        return np.arange(self.rows.start, self.rows.stop)[:, None]

    @property
    def j(self) -> Array:
        """Key numbers, [keys]."""
        return np.arange(self.keys.start, self.keys.stop)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start


class Partial(NamedTuple):
    """What the online softmax holds of some rows: maximum and sum [rows, 1], unnormalised output."""

    m: Array
    total: Array
    acc: Array


def axes4(array: Array) -> Array:
    """A mask or bias of one to four axes with four, as a view."""
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def flags_as_mask(case: Case) -> Array:
    """Causality and window as a mask, bool [B, 1, Sq, Sk]."""
    i, j = np.arange(case.q.shape[2])[:, None], np.arange(case.k.shape[2])
    seen = np.ones((case.q.shape[0], 1, len(i), len(j)), dtype=bool)
    far = len(i) + len(j)  # no two positions are further apart
    left, right = (far if side is None else min(side, far) for side in case.window or (None, None))
    if case.causal is not None:
        right = 0
    for b, (rows, keys) in enumerate(zip(case.q_length, case.k_length, strict=True)):
        middle = i + (0 if case.causal == "top-left" else keys - rows)
        seen[b] &= (j >= middle - left) & (j <= middle + right)
    return seen
