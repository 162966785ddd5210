"""A presentation's memory: how q, k, v and do lie in it, what is poisoned, packed batches and pages.

For kernels and adapters: they ask ``present`` for the arrays of a case in place of reading the case.
Poison only ever goes where the answer may not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..oracle.case import Case, Presentation
from ..oracle.formats import Format

#: elements that surround a slice on either side of each axis; eight along the last keep the
#: alignment that vector loads want where the width itself is a multiple of eight
MARGINS: tuple[int, int, int, int] = (1, 1, 1, 8)

#: pages of the pool that belong to nobody
UNUSED_PAGES = 2

#: rows at the end of a packed batch that belong to nobody
SPARE_ROWS = 2

#: layouts, poison, page size and packing of a presentation that leaves memory as the case has it
AS_IT_IS = (Presentation().layouts, None, None, False)


@dataclass(frozen=True, eq=False)
class Presented:
    """The arrays of a case as they are put to a kernel.

    ``q``, ``do`` shaped as the case's, ``dlse`` [B, Hq, Sq] (or with the axes that were asked for), and
    ``k``, ``v`` likewise, as views with the strides of their layout. Where ``table`` is given, k and v
    are pools [pages, page_size, Hk, D or Dv] and key j of batch entry b lies in page
    ``table[b, j // page_size]`` at ``j % page_size``; entries of the table past the last page in use
    name a page that belongs to nobody. Where ``q_starts`` and ``k_starts`` are given, int32 [B + 1], the
    batch is packed: q, do and dlse have a batch axis of 1, and rows ``q_starts[b]`` to ``q_starts[b + 1]``
    of it are entry b's; so do k and v that lie in no pages. ``fill`` is what fresh output buffers are to
    hold.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray | None
    dlse: np.ndarray | None
    table: np.ndarray | None
    fill: float
    q_starts: np.ndarray | None = None
    k_starts: np.ndarray | None = None


def present(
    case: Case, presentation: Presentation, *, told_lengths: bool = True, axes: tuple[int, int, int, int] = (0, 1, 2, 3)
) -> Presented:
    """The memory that ``presentation`` asks for. Arrays may be the case's own, which are read-only.

    ``told_lengths``: the kernel is given q_lengths and k_lengths, so it owes not to read padding,
    and that is poisoned. Where it is not, padded keys are hidden by a mask (poisoned with
    ``poison_hidden`` only), and padded queries are 0, as are their do and dlse: the kernel works on
    them as on any others, and what overflows there on its way back reaches dK and dV as NaN.
    ``axes``: the order of [B, H, S, D] in which the kernel takes its arrays (layouts refer to it;
    pages have an order of their own).
    """
    assert told_lengths or not presentation.packed
    memory = (presentation.layouts, presentation.poison, presentation.page_size, presentation.packed)
    if memory == AS_IT_IS and told_lengths and axes == (0, 1, 2, 3):
        return Presented(case.q, case.k, case.v, case.do, case.dlse, None, 0.0)
    fill = poison_value(presentation.poison, case.format)
    arrays = {"q": case.q, "k": case.k, "v": case.v, "do": case.do, "dlse": case.dlse}
    if case.q_lengths is not None and (presentation.poison is not None or not told_lengths):
        rows = np.arange(case.q.shape[2]) >= np.array(case.q_lengths, dtype=np.int64)[:, None]
        for name in ("q", "do", "dlse"):
            # dlse is wider than storage: its own NaN or inf, and a number as huge as the others
            arrays[name] = _filled(arrays[name], rows[:, None], fill if told_lengths else 0.0)
    if presentation.poison is not None:
        unread = np.zeros((case.k.shape[0], case.k.shape[1], case.k.shape[2]), dtype=bool)
        if told_lengths and case.k_lengths is not None:
            unread |= (np.arange(case.k.shape[2]) >= np.array(case.k_lengths, dtype=np.int64)[:, None])[:, None]
        if presentation.poison_hidden:
            unread |= hidden_keys(case)
        arrays["k"], arrays["v"] = _filled(case.k, unread, fill), _filled(case.v, unread, fill)
    table = q_starts = k_starts = None
    if presentation.packed:
        q_starts, k_starts = starts(case.q_length), starts(case.k_length)
        for name, at in (("q", q_starts), ("do", q_starts), ("dlse", q_starts), ("k", k_starts), ("v", k_starts)):
            if presentation.page_size is None or name not in ("k", "v"):
                arrays[name] = _packed(arrays[name], at, fill)
    if presentation.page_size is not None:
        table = page_table(case, presentation.page_size)
        arrays["k"], arrays["v"] = (_pool(case, arrays[name], table, presentation.page_size, fill) for name in "kv")
    laid = {}
    for name, layout in zip(("q", "k", "v", "do"), presentation.layouts, strict=True):
        array = arrays[name]
        if array is not None and not (table is not None and name in "kv"):
            array = array.transpose(axes)
        laid[name] = None if array is None else lay_out(array, layout, fill)
    assert laid["q"] is not None and laid["k"] is not None and laid["v"] is not None
    return Presented(laid["q"], laid["k"], laid["v"], laid["do"], arrays["dlse"], table, fill, q_starts, k_starts)


def poison_value(poison: str | None, storage: Format) -> float:
    """The number that stands for a kind of poison: NaN, +inf, the largest of the format, or 0."""
    return {"nan": np.nan, "inf": np.inf, "huge": storage.max, None: 0.0}[poison]


# -- strides -------------------------------------------------------------------------------------


def lay_out(array: np.ndarray, layout: str, fill: float) -> np.ndarray:
    """An array of four axes with the same numbers and the memory of ``layout``; ``fill`` surrounds a slice.

    Its memory as a whole is ``buffer(...)`` of what is returned.
    """
    if layout == "transposed":
        return np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)
    if layout == "sliced":
        whole = np.full([n + 2 * m for n, m in zip(array.shape, MARGINS, strict=True)], fill, dtype=array.dtype)
        view = whole[tuple(slice(m, m + n) for n, m in zip(array.shape, MARGINS, strict=True))]
        view[...] = array
        return view
    if layout == "expanded":
        return _expanded(array)
    return np.ascontiguousarray(array)


def _expanded(array: np.ndarray) -> np.ndarray:
    small = array
    for axis, size in enumerate(array.shape):
        if size > 1:
            first = small.take([0], axis=axis)
            # by bits: NaN equals itself, and 0 is not -0
            if np.broadcast_to(first, small.shape).tobytes() == small.tobytes():
                small = first
    return np.broadcast_to(np.ascontiguousarray(small), array.shape)


def buffer(view: np.ndarray) -> np.ndarray:
    """The whole contiguous array that a view lies in, surroundings included."""
    while isinstance(view.base, np.ndarray):
        view = view.base
    return view


def fresh(view: np.ndarray) -> np.ndarray:
    """The same view of a writable copy of the whole buffer."""
    whole = buffer(view)
    copy = np.array(whole, order="C", copy=True)
    return np.ndarray(view.shape, view.dtype, copy.view(np.uint8), offset_of(view), view.strides)


def offset_of(view: np.ndarray) -> int:
    """Bytes from the start of a view's buffer to its first element."""
    return view.ctypes.data - buffer(view).ctypes.data if view.size else 0


# -- what nobody may read ------------------------------------------------------------------------


def _filled(array: np.ndarray | None, where: np.ndarray, fill: float) -> np.ndarray | None:
    """A copy with ``fill`` at the [B, H or 1, S] positions of ``where``; the array itself where there are none."""
    if array is None or not where.any():
        return array
    return np.where(where.reshape(where.shape + (1,) * (array.ndim - 3)), array.dtype.type(fill), array)


def hidden_keys(case: Case) -> np.ndarray:
    """True at keys that no row of any query head of their group sees, padding included, bool [B, Hk, Sk].

    Index code of its own, row by row with key intervals: neither the oracle's nor a kernel's.
    """
    batch, hq, hk, sq, sk, _, _ = case.shape
    seen = np.zeros((batch, hk, case.group, sk), dtype=bool)
    full = (batch, hq, sq, sk)
    allowed = np.ones((1, 1, 1, 1), dtype=bool) if case.mask is None else case.mask
    if case.bias is not None:
        allowed = allowed & ~np.isneginf(case.bias.astype(np.float64))
    allowed = np.broadcast_to(allowed, full)
    left, right = case.window or (None, None)
    for b, (rows, keys) in enumerate(zip(case.q_length, case.k_length, strict=True)):
        for i in range(rows):
            at = i if case.causal == "top-left" else i + keys - rows
            first = 0 if left is None else max(0, at - left)
            stop = keys if right is None else min(keys, at + right + 1)
            stop = stop if case.causal is None else min(stop, at + 1)
            if first < stop:
                seen[b, ..., first:stop] |= allowed[b, :, i, first:stop].reshape(hk, case.group, -1)
    return np.asarray(~seen.any(axis=2))


# -- packed batches ------------------------------------------------------------------------------


def starts(lengths: tuple[int, ...]) -> np.ndarray:
    """Cumulative lengths, int32 [B + 1]: where each entry of a packed batch starts, and where the last ends."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)


def _packed(array: np.ndarray | None, at: np.ndarray, fill: float) -> np.ndarray | None:
    """[B, H, S, ...] as [1, H, T + SPARE_ROWS, ...]; the spare rows hold ``fill``."""
    if array is None:
        return None
    out = np.full((1, array.shape[1], at[-1] + SPARE_ROWS, *array.shape[3:]), fill, dtype=array.dtype)
    for b in range(len(array)):
        out[0, :, at[b] : at[b + 1]] = array[b, :, : at[b + 1] - at[b]]
    return out


def unpacked(array: np.ndarray, at: np.ndarray, size: int, fill: float = 0.0) -> np.ndarray:
    """A packed [1, H, T, ...] as [B, H, size, ...], with ``fill`` in the rows past each entry's length."""
    out = np.full((len(at) - 1, array.shape[1], size, *array.shape[3:]), fill, dtype=array.dtype)
    for b in range(len(out)):
        out[b, :, : at[b + 1] - at[b]] = array[0, :, at[b] : at[b + 1]]
    return out


# -- pages ---------------------------------------------------------------------------------------


def page_table(case: Case, page_size: int) -> np.ndarray:
    """Which page of the pool holds each run of ``page_size`` keys, int32 [B, most pages of an entry].

    The order is shuffled, always in the same way for the same lengths and page size. Entries past
    an entry's last page name a page that belongs to nobody.
    """
    used = [-(-n // page_size) for n in case.k_length]
    pages = np.random.default_rng([page_size, *used]).permutation(sum(used) + UNUSED_PAGES).astype(np.int32)
    table = np.full((len(used), -(-case.k.shape[2] // page_size)), pages[-1], dtype=np.int32)
    start = 0
    for b, n in enumerate(used):
        table[b, :n] = pages[start : start + n]
        start += n
    return table


def _pool(case: Case, array: np.ndarray | None, table: np.ndarray, page_size: int, fill: float) -> np.ndarray:
    """k or v [B, Hk, Sk, X] as the pool [pages, page_size, Hk, X]; ``fill`` where no valid key lies."""
    assert array is not None
    _, heads, _, width = array.shape
    count = sum(-(-n // page_size) for n in case.k_length) + UNUSED_PAGES
    pool = np.full((count, page_size, heads, width), fill, dtype=array.dtype)
    for b, n in enumerate(case.k_length):
        j = np.arange(n)
        pool[table[b, j // page_size], j % page_size] = array[b, :, :n].swapaxes(0, 1)
    return pool
