"""numpy-blocked: attention read block by block, forward and backward, in NumPy.

The forward pass is the online softmax of FlashAttention (Dao et al., 2022, arXiv:2205.14135): per
block of queries it keeps a running maximum m, a row sum and an unnormalised output, and rescales
the last two when a block of keys raises the maximum. The backward pass recomputes the probabilities of
each tile from the log-sum-exp alone; full scores are never stored. The query heads that share a key
head are stacked on the row axis, so that one batched matrix product per tile serves all heads of
the whole batch, and the sum over a group in dK and dV happens inside that product.

An attention sink is where the running maximum and the row sum start. Dropout hides pairs from the
products with V and dO, not from the row sum; its 1 / (1 - p) is multiplied in once, at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..oracle.case import LAYOUTS, Case, Presentation, partition
from ..oracle.formats import FORMATS, Format, format_of
from ..oracle.profile import Profile
from ..oracle.result import GRADIENTS, Result
from .candidate import PROMISES, Candidate
from .presenting import present, unpacked

#: sizes of a query block and of a key block where the presentation leaves the choice to the kernel
DEFAULT_BLOCKS: tuple[int, ...] = (64,)


@dataclass(frozen=True)
class Arithmetic:
    """The two choices of this kernel's arithmetic.

    ``accumulator``  "float32", "float64" or None (the storage format's: float64 for float64, else
                     float32): scores, probabilities and all sums are held in it.
    ``round_p``      P and dS are rounded to the storage format before their matrix products, as
                     kernels for tensor cores do.
    """

    accumulator: str | None = None
    round_p: bool = False

    def format(self, storage: str) -> Format:
        """The accumulator's format. Raises ValueError where it could not hold the storage format."""
        wide = "float64" if storage == "float64" else "float32"
        name = self.accumulator or wide
        accepted = ("float64",) if storage == "float64" else ("float32", "float64")
        if name not in accepted:
            raise ValueError(f"accumulator is {name!r}; with {storage} it must be {' or '.join(accepted)}")
        return FORMATS[name]

    def profile(self, storage: str) -> Profile:
        """What may be relied on for this storage format.

        numpy's float32 exp and tanh were compared with float64's at every argument on the AVX-512
        path, every seventeenth on the AVX2 and plain paths: at most 3.6 u and 2.9 u. In float64,
        sampled against an 80-bit format: at most 1.2 u and 1.7 u. Division is correctly rounded.
        Half types keep their subnormals, and P, dS and the gradients stay in the accumulator's
        format until they are rounded once at the end. The order in which BLAS sums is not known.
        """
        wide = self.format(storage)
        narrow = format_of(storage)
        return Profile(
            storage=storage,
            u=wide.unit,
            u_p=narrow.unit if self.round_p and narrow.unit > wide.unit else 0.0,
            u_exp=4 * wide.unit,
            u_tanh=4 * wide.unit,
            lse="float64" if storage == "float64" else "float32",
            tiny=narrow.smallest if storage == "float16" else narrow.tiny,
            key_block=DEFAULT_BLOCKS[0],
        )


class _Tiles:
    """A case as this kernel reads it: arrays in the accumulator's format, and one tile of scores.

    Arrays over query heads have the shape [B, Hk, G, ...] with G query heads per key head;
    "stacked" means [B, Hk, G * rows, ...].
    """

    def __init__(self, case: Case, presentation: Presentation, arithmetic: Arithmetic) -> None:
        b, hq, hk, sq, sk, d, _ = case.shape
        self.heads = (b, hk, hq // hk)
        self.dtype = arithmetic.format(case.dtype).dtype
        self.rounds_p = arithmetic.round_p and case.q.dtype != self.dtype
        self.storage = case.q.dtype
        self.q_lengths = None if case.q_lengths is None else np.array(case.q_lengths, dtype=np.int64)
        self.k_lengths = None if case.k_lengths is None else np.array(case.k_lengths, dtype=np.int64)
        given = present(case, presentation)

        def rows(array: np.ndarray) -> np.ndarray:
            padded = array if given.q_starts is None else unpacked(array, given.q_starts, sq)
            return self.split(self.load(padded, self.q_lengths))

        k, v = given.k, given.v
        if given.table is not None:
            k, v = (_read_pages(pool, given.table, sk) for pool in (k, v))
        elif given.k_starts is not None:
            k, v = (unpacked(x, given.k_starts, sk) for x in (k, v))
        self.q = rows(given.q)
        self.k = self.load(k, self.k_lengths)
        self.v = self.load(v, self.k_lengths)
        self.do = None if given.do is None else rows(given.do)
        self.dlse = None if given.dlse is None else rows(given.dlse[..., None])
        self.fill = given.fill
        self.kt = self.k.swapaxes(-1, -2)
        self.vt = self.v.swapaxes(-1, -2)
        self.scale = self.dtype.type(1 / math.sqrt(d) if case.scale is None else case.scale)
        self.softcap = None if case.softcap is None else self.dtype.type(case.softcap)
        self.q_blocks = partition(sq if b else 0, presentation.q_blocks or DEFAULT_BLOCKS)
        self.k_blocks = partition(sk if b else 0, presentation.k_blocks or DEFAULT_BLOCKS)

        top_left = case.causal == "top-left"
        self.offset = np.array(
            [0 if top_left else kn - qn for qn, kn in zip(case.q_length, case.k_length, strict=True)], dtype=np.int64
        )
        self.band = self._band(case)
        self.slopes = None
        if case.alibi_slopes is not None:
            slopes = np.broadcast_to(case.alibi_slopes.astype(self.dtype), (b, hq))
            self.slopes = slopes.reshape(*self.heads, 1, 1)
        self.sinks = None
        if case.sinks is not None:
            self.sinks = case.sinks.astype(self.dtype).reshape(1, *self.heads[1:], 1, 1)
        self.keep = None if case.keep is None else self._split_mask(case.keep)
        self.raised = None if case.dropout is None else self.dtype.type(1 / (1 - case.dropout))
        self.bias = None if case.bias is None else self._split_mask(case.bias).astype(self.dtype)
        masks = [] if case.mask is None else [~self._split_mask(case.mask)]
        if self.bias is not None and np.isneginf(self.bias).any():
            masks.append(np.isneginf(self.bias))
        if presentation.route == "mask" and self.band is not None:
            masks.append(self._outside_band(0, sq, 0, sk))
            self.band = None
        self.masks = masks  # each True where a key is hidden

    def load(self, array: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
        """[B, H, S, X] of any strides, contiguous in the accumulator's format, 0 past each entry's length."""
        loaded = np.ascontiguousarray(array, dtype=self.dtype)
        if lengths is None:
            return loaded
        padding = np.arange(array.shape[2]) >= lengths[:, None]
        return np.where(padding[:, None, :, None], 0, loaded)

    def split(self, array: np.ndarray) -> np.ndarray:
        """[B, Hq, ...] as [B, Hk, G, ...], in the accumulator's format."""
        return array.astype(self.dtype, copy=False).reshape(*self.heads, *array.shape[2:])

    def stack(self, array: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Rows ``start`` to ``stop`` of [B, Hk, G, Sq, X], stacked: [B, Hk, G * rows, X]."""
        b, hk, g = self.heads
        return array[:, :, :, start:stop].reshape(b, hk, g * (stop - start), array.shape[-1])

    def unstack(self, stacked: np.ndarray) -> np.ndarray:
        """[B, Hk, G * rows, X] as [B, Hk, G, rows, X]: a view, as stacked arrays are contiguous."""
        return stacked.reshape(*self.heads, stacked.shape[2] // self.heads[2], stacked.shape[3])

    def rounded(self, array: np.ndarray) -> np.ndarray:
        """P or dS as it enters its matrix product."""
        return _stored(array, self.storage).astype(self.dtype) if self.rounds_p else array

    def _split_mask(self, array: np.ndarray) -> np.ndarray:
        """A mask or bias of one to four axes with the head axis split: five axes, 1 where it broadcasts."""
        b, h, sq, sk = (1,) * (4 - array.ndim) + array.shape
        return array.reshape(b, *((1, 1) if h == 1 else self.heads[1:]), sq, sk)

    def _band(self, case: Case) -> tuple[np.ndarray, np.ndarray] | None:
        """Bounds (low, high) per batch entry on j - i: causal and window in one. None: no bound."""
        left, right = case.window or (None, None)
        if case.causal is not None:
            right = 0  # a window's right side is >= 0, so causal is the tighter of the two
        if left is None and right is None:
            return None
        far = 2 * (case.q.shape[2] + case.k.shape[2])  # beyond every j - i - offset
        low = self.offset - (far if left is None else min(left, far))
        high = self.offset + (far if right is None else min(right, far))
        return low, high

    def _ahead(self, i0: int, i1: int, j0: int, j1: int) -> np.ndarray:
        """j - i over the tile, [1, 1, 1, rows, keys]."""
        ahead: np.ndarray = np.arange(j0, j1) - np.arange(i0, i1)[:, None]
        return ahead[None, None, None]

    def _outside_band(self, i0: int, i1: int, j0: int, j1: int) -> np.ndarray:
        assert self.band is not None
        low, high = (bound.reshape(-1, 1, 1, 1, 1) for bound in self.band)
        ahead = self._ahead(i0, i1, j0, j1)
        outside: np.ndarray = (ahead < low) | (ahead > high)
        return outside

    def skipped(self, i0: int, i1: int, j0: int, j1: int) -> bool:
        """True where lengths or the band hide the whole tile in every batch entry."""
        if self.q_lengths is not None and i0 >= self.q_lengths.max():
            return True
        if self.k_lengths is not None and j0 >= self.k_lengths.max():
            return True
        if self.band is None:
            return False
        return bool(j0 - (i1 - 1) > self.band[1].max() or j1 - 1 - i0 < self.band[0].min())

    def hidden(self, i0: int, i1: int, j0: int, j1: int) -> np.ndarray | None:
        """True where a row does not see a key, five axes that broadcast to the tile. None: all seen."""
        parts = [_tile(mask, i0, i1, j0, j1) for mask in self.masks]
        if self.q_lengths is not None and i1 > self.q_lengths.min():
            parts.append((np.arange(i0, i1) >= self.q_lengths[:, None])[:, None, None, :, None])
        if self.k_lengths is not None and j1 > self.k_lengths.min():
            parts.append((np.arange(j0, j1) >= self.k_lengths[:, None])[:, None, None, None, :])
        if self.band is not None and (j1 - 1 - i0 > self.band[1].min() or j0 - (i1 - 1) < self.band[0].max()):
            parts.append(self._outside_band(i0, i1, j0, j1))
        out = None
        for part in parts:
            out = part if out is None else out | part
        return out

    def hide(self, stacked: np.ndarray, hidden: np.ndarray | None, value: float) -> None:
        """Write ``value`` over the hidden pairs: by selection, so that nothing there can reach a sum."""
        if hidden is not None:
            np.copyto(self.unstack(stacked), value, where=hidden)

    def seen(self, array: np.ndarray, hidden: np.ndarray | None, j0: int, j1: int) -> np.ndarray:
        """Keys or values ``j0`` to ``j1``, 0 where no row of the tile sees them: 0 times NaN is NaN."""
        here = array[:, :, j0:j1]
        if hidden is None:
            return here
        unseen = np.asarray(hidden.all(axis=(2, 3)))
        return np.where(unseen[..., None], 0, here) if unseen.any() else here

    def kept(self, stacked: np.ndarray, i0: int, i1: int, j0: int, j1: int) -> np.ndarray:
        """A tile with 0 at the pairs that dropout drops."""
        if self.keep is None:
            return stacked
        return np.where(_tile(self.keep, i0, i1, j0, j1), self.unstack(stacked), 0).reshape(stacked.shape)

    def begin(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Running maximum and row sum of stacked ``rows`` before any key: the sink's, which has no value."""
        m = np.full((*rows.shape[:3], 1), -np.inf, dtype=self.dtype)
        if self.sinks is None:
            return m, np.zeros_like(m)
        self.unstack(m)[...] = self.sinks
        return m, np.ones_like(m)

    def scores(
        self, q: np.ndarray, i0: int, i1: int, j0: int, j1: int
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Stacked scores of a tile (-inf where hidden), tanh of the capped ones, and what is hidden."""
        s = q @ self.kt[..., j0:j1]
        s *= self.scale
        hidden = self.hidden(i0, i1, j0, j1)
        t = None
        if self.softcap is not None:
            t = np.tanh(s / self.softcap)
            s = t * self.softcap
            self.hide(t, hidden, 0.0)
        if self.slopes is not None:
            distance = np.abs(self._ahead(i0, i1, j0, j1) - self.offset.reshape(-1, 1, 1, 1, 1))
            self.unstack(s)[...] -= self.slopes * distance.astype(self.dtype)
        if self.bias is not None:
            self.unstack(s)[...] += _tile(self.bias, i0, i1, j0, j1)
        self.hide(s, hidden, -np.inf)
        return s, t, hidden


def _tile(array: np.ndarray, i0: int, i1: int, j0: int, j1: int) -> np.ndarray:
    """The part of a five-axis mask or bias that belongs to a tile; axes of size 1 broadcast."""
    rows = slice(None) if array.shape[3] == 1 else slice(i0, i1)
    keys = slice(None) if array.shape[4] == 1 else slice(j0, j1)
    return array[..., rows, keys]


def _read_pages(pool: np.ndarray, table: np.ndarray, size: int) -> np.ndarray:
    """Keys 0 to ``size`` of each entry, [B, Hk, size, X], from a pool [pages, page_size, Hk, X]."""
    page_size = pool.shape[1]
    j = np.arange(size)
    return np.asarray(pool[table[:, j // page_size], j % page_size]).swapaxes(1, 2)


def _stored(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """``array`` rounded to ``dtype``, once."""
    if array.dtype == np.float64 and dtype == FORMATS["bfloat16"].dtype:
        # ml_dtypes goes through float32, so rounds twice and misses ties. Rounding to odd on the way
        # (Boldo and Melquiond, 2008) makes the second rounding the only one that counts.
        single = array.astype(np.float32)
        even_and_inexact = (single.view(np.int32) & 1 == 0) & (single != array)
        odd = np.nextafter(single, np.where(array > single, np.float32(np.inf), np.float32(-np.inf)))
        array = np.where(even_and_inexact, odd, single)
    return array.astype(dtype)


def _forward(case: Case, tiles: _Tiles) -> tuple[np.ndarray, np.ndarray]:
    """o [B, Hq, Sq, Dv] in storage and lse [B, Hq, Sq] in the wide format."""
    b, hq, _, sq, _, _, dv = case.shape
    o = np.full((*tiles.heads, sq, dv), tiles.fill, dtype=case.q.dtype)
    lse = np.full((*tiles.heads, sq, 1), tiles.fill, dtype=case.wide_format.dtype)
    for i0, i1 in tiles.q_blocks:
        q = tiles.stack(tiles.q, i0, i1)
        m, row_sum = tiles.begin(q)
        unnormalised = np.zeros((*q.shape[:3], dv), dtype=tiles.dtype)
        for j0, j1 in tiles.k_blocks:
            if tiles.skipped(i0, i1, j0, j1):
                continue
            s, _, hidden = tiles.scores(q, i0, i1, j0, j1)
            new = np.maximum(m, s.max(axis=-1, keepdims=True))
            # a row that has seen no key yet has m = -inf: measure from 0, for exp(-inf - -inf) is NaN
            origin = np.where(new == -np.inf, 0, new)
            rescale = np.exp(m - origin)
            s -= origin
            p = np.exp(s, out=s)
            row_sum = row_sum * rescale + p.sum(axis=-1, keepdims=True)
            p = tiles.rounded(tiles.kept(p, i0, i1, j0, j1))
            unnormalised = unnormalised * rescale + p @ tiles.seen(tiles.v, hidden, j0, j1)
            m = new
        divisor = np.where(row_sum == 0, 1, row_sum)  # an empty row: o = 0 / 1, lse = -inf + 0
        unnormalised += 0  # a sum that sank to -0 meets the 0 of a hidden tile, skipped or not
        unnormalised /= divisor
        if tiles.raised is not None:
            unnormalised *= tiles.raised
        o[:, :, :, i0:i1] = _stored(tiles.unstack(unnormalised), o.dtype)
        lse[:, :, :, i0:i1] = tiles.unstack(m + np.log(divisor))
    return o.reshape(b, hq, sq, dv), lse.reshape(b, hq, sq)


def _backward(case: Case, tiles: _Tiles, forward: Result) -> Result:
    """``forward`` with dq, dk, dv, dbias and dsink: from its stored o and lse, rounded once at the end."""
    o, lse, do, storage = forward.o, forward.lse, tiles.do, case.q.dtype
    assert o is not None and lse is not None and do is not None
    delta = (do * tiles.split(o)).sum(axis=-1, keepdims=True)  # D = rowsum(dO * O)
    if tiles.dlse is not None:
        delta -= tiles.dlse
    # exp(s - inf) = 0: a row that sees nothing has no probabilities
    origin = tiles.split(np.where(lse == -np.inf, np.inf, lse))[..., None]
    dq = np.full(tiles.q.shape, tiles.fill, dtype=tiles.dtype)
    dk = np.zeros_like(tiles.k)
    dv = np.zeros_like(tiles.v)
    dbias = None if tiles.bias is None else np.zeros_like(tiles.bias)
    for i0, i1 in tiles.q_blocks:
        q, do_rows = tiles.stack(tiles.q, i0, i1), tiles.stack(do, i0, i1)
        origin_rows, delta_rows = tiles.stack(origin, i0, i1), tiles.stack(delta, i0, i1)
        dq_rows = np.zeros_like(q)
        for j0, j1 in tiles.k_blocks:
            if tiles.skipped(i0, i1, j0, j1):
                continue
            s, t, hidden = tiles.scores(q, i0, i1, j0, j1)
            s -= origin_rows
            p = np.exp(s, out=s)
            dv[:, :, j0:j1] += tiles.rounded(tiles.kept(p, i0, i1, j0, j1)).swapaxes(-1, -2) @ do_rows
            ds = tiles.kept(do_rows @ tiles.vt[..., j0:j1], i0, i1, j0, j1)
            if tiles.raised is not None:
                ds *= tiles.raised
            ds -= delta_rows
            ds *= p
            tiles.hide(ds, hidden, 0.0)  # p is 0 there, but 0 * inf is not
            if dbias is not None:
                here = _tile(dbias, i0, i1, j0, j1)
                here += _sum_to(tiles.unstack(ds), here.shape)
            if t is not None:
                ds *= 1 - t * t
            ds = tiles.rounded(ds)
            dq_rows += ds @ tiles.seen(tiles.k, hidden, j0, j1)
            dk[:, :, j0:j1] += ds.swapaxes(-1, -2) @ q
        dq[:, :, :, i0:i1] = tiles.unstack(dq_rows)
    dq *= tiles.scale
    dk *= tiles.scale
    if tiles.raised is not None:
        dv *= tiles.raised
    dsink = None
    if tiles.sinks is not None:
        # the sink's value is 0, so its dP is 0 and dS = p (0 - delta); padded rows have delta = 0
        dsink = -(np.exp(tiles.sinks - origin) * delta).sum(axis=(0, 3, 4))
    return replace(
        forward,
        dq=_stored(dq.reshape(case.q.shape), storage),
        dk=_stored(dk, storage),
        dv=_stored(dv, storage),
        dbias=None if dbias is None or case.bias is None else _stored(dbias.reshape(case.bias.shape), case.bias.dtype),
        dsink=None if dsink is None or case.sinks is None else _stored(dsink.reshape(-1), case.sinks.dtype),
    )


def _sum_to(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """``array`` summed over the axes on which ``shape`` broadcasts to it."""
    axes = tuple(n for n, size in enumerate(shape) if size == 1 and array.shape[n] != 1)
    total: np.ndarray = array.sum(axis=axes, keepdims=True) if axes else array
    return total


def solve(
    case: Case,
    presentation: Presentation | None = None,
    *,
    backward: bool | None = None,
    accumulator: str | None = None,
    round_p: bool = False,
) -> Result:
    """Run the kernel on a case: o, lse, and the gradients where ``backward`` (None: where the case holds ``do``).

    ``accumulator`` and ``round_p`` as in Arithmetic. Raises ValueError where gradients are asked for
    without ``do``, or where the accumulator is narrower than the storage format.
    """
    backward = case.do is not None if backward is None else backward
    if backward and case.do is None:
        raise ValueError("backward is True but the case holds no do; give do, the upstream gradient of the output")
    # Overflow near the end of a format's range and exp's underflow are part of the arithmetic.
    with np.errstate(all="ignore"):
        tiles = _Tiles(case, presentation or Presentation(), Arithmetic(accumulator, round_p))
        o, lse = _forward(case, tiles)
        result = Result(o=o, lse=lse)
        return _backward(case, tiles, result) if backward else result


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, **fields: Any) -> Result:
    """The kernel for plain arrays: q [B, Hq, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv].

    ``fields`` are the other fields of Case (scale, causal, mask, do, ...). Returns o in q's dtype,
    lse (natural log), and the gradients where ``do`` is given. Raises CaseError as Case does.
    """
    return solve(Case(q, k, v, **fields))


def candidate(*, accumulator: str | None = None, round_p: bool = False, name: str = "numpy-blocked") -> Candidate:
    """The kernel as a candidate, with the profile that these keywords give it."""
    arithmetic = Arithmetic(accumulator, round_p)
    dtypes = tuple(FORMATS) if accumulator != "float32" else tuple(d for d in FORMATS if d != "float64")

    def run(case: Case, presentation: Presentation, want: frozenset[str]) -> Result:
        backward = not want.isdisjoint(GRADIENTS)
        return solve(case, presentation, backward=backward, accumulator=accumulator, round_p=round_p)

    return Candidate(
        name=name,
        run=run,
        dtypes=dtypes,
        profiles={dtype: arithmetic.profile(dtype) for dtype in dtypes},
        takes_blocks=True,
        takes_layouts=frozenset(LAYOUTS),
        takes_pages=True,
        takes_packed=True,
        promises=frozenset(PROMISES),
        about="blocked online softmax in NumPy over BLAS, forward and backward",
    )


NUMPY_BLOCKED = candidate()
