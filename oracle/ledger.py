"""The ledger of online softmax: the exact state of one row after each block of keys.

A block with visible scores s and values v takes the state (m, l, a) to

    m' = max(m, max s),  alpha = exp(m - m'),
    l' = alpha l + sum_j exp(s_j - m'),  a' = alpha a + sum_j exp(s_j - m') v_j,

and the output of the keys read so far is a' / l'. This is the recurrence of Milakov and
Gimelshein, "Online normalizer calculation for softmax" (2018), with the values carried along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .case import Case, Presentation, partition
from .definition import EXTRA_BITS, context, scores
from .precision import GUARD_BITS, TARGET_BITS, working_bits


@dataclass(frozen=True)
class Block:
    """The state of a row after the block of keys ``start`` up to, not including, ``stop``.

    ``keys``, ``scores``  the block's visible keys and their scores.
    ``maximum``           the largest of these scores; -inf where the block is hidden.
    ``running_maximum``   m: the largest score so far; -inf while no key has been seen.
    ``rescale``           alpha, by which the old state was multiplied: 0 for the first block that
                          is seen (whose old state is nothing), 1 where the block is hidden.
    ``denominator``       l.
    ``accumulator``       a, one number per column of the values.
    ``output``            a / l: the answer if the row ended here; zeros while no key has been seen.
    ``lse``               m + log l: the log-sum-exp if the row ended here.
    ``distance``          max over columns of |output - the whole row's output|.
    ``hidden``            no key of the block is visible, so the state is as it was.
    """

    start: int
    stop: int
    keys: tuple[int, ...]
    scores: tuple[Any, ...]
    maximum: Any
    running_maximum: Any
    rescale: Any
    denominator: Any
    accumulator: tuple[Any, ...]
    output: tuple[Any, ...]
    lse: Any
    distance: Any
    hidden: bool


@dataclass(frozen=True)
class Ledger:
    """A row read block by block, and the whole row at once: ``output`` and ``lse``.

    Only the last block's output and lse must agree with the whole row's. All numbers are mpf of
    ``bits`` of precision.
    """

    blocks: tuple[Block, ...]
    output: tuple[Any, ...]
    lse: Any
    bits: int


def ledger(
    row: Sequence[Any],
    values: Sequence[Sequence[Any]],
    blocks: tuple[int, ...] | None = None,
    *,
    bits: int | None = None,
) -> Ledger:
    """The ledger of one row of scores, one row of values per score.

    Scores and values are ints, floats (taken exactly), mpf or decimal strings; a score of -inf is a
    hidden key. ``blocks`` are block sizes, the last repeated until the row is covered; None is one
    block. Raises ValueError where lengths disagree, where a score is +inf or NaN, or where a value
    is not finite.
    """
    if bits is None:
        rough = context(53)
        exponents = [rough.mag(x) for x in map(rough.mpf, row) if rough.isfinite(x) and x]
        bits = TARGET_BITS + GUARD_BITS + EXTRA_BITS + int(max([0, *exponents]))
    ctx = context(bits)
    s, v = [ctx.mpf(x) for x in row], [[ctx.mpf(x) for x in value] for value in values]
    if len(s) != len(v):
        raise ValueError(f"values has {len(v)} rows but there are {len(s)} scores; they must be equal")
    if len({len(value) for value in v}) > 1:
        raise ValueError(f"values has rows of lengths {sorted({len(value) for value in v})}; they must be equal")
    for j, x in enumerate(s):
        if x == ctx.inf or ctx.isnan(x):
            raise ValueError(f"scores holds {x} at {j}; a score must be finite, or -inf for a hidden key")
    for j, value in enumerate(v):
        if not all(ctx.isfinite(x) for x in value):
            raise ValueError(f"values holds {value} at {j}; values must be finite")
    seen = {j: x for j, x in enumerate(s) if x != ctx.ninf}
    return _read(ctx, seen, v, _bounds(len(s), blocks), bits, len(v[0]) if v else 0)


def ledger_of_row(
    case: Case, b: int, h: int, i: int, blocks: tuple[int, ...] | None = None, *, bits: int | None = None
) -> Ledger:
    """The ledger of query row ``i`` of head ``h`` of batch entry ``b`` of a case.

    ``blocks`` as for ``ledger``, over all Sk keys, hidden ones included. Raises ValueError where the
    case has no such row.
    """
    for name, n, size in (("b", b, case.shape[0]), ("h", h, case.shape[1]), ("i", i, case.shape[3])):
        if not 0 <= n < size:
            raise ValueError(f"{name} is {n}; the case has {size} of them, so it must be from 0 to {size - 1}")
    bits = working_bits(case) + EXTRA_BITS if bits is None else bits
    score = scores(case, bits)
    keys, s, _ = score.row(b, h, i)
    values = score.v[b, h // case.group].tolist()
    return _read(
        score.ctx, dict(zip(keys, s, strict=True)), values, _bounds(case.k.shape[2], blocks), bits, case.v.shape[3]
    )


def _bounds(size: int, blocks: tuple[int, ...] | None) -> list[tuple[int, int]]:
    return partition(size, Presentation(k_blocks=blocks).k_blocks)  # a Presentation checks the sizes


def _read(
    ctx: Any, seen: dict[int, Any], values: list[list[Any]], bounds: list[tuple[int, int]], bits: int, width: int
) -> Ledger:
    """Read the visible scores ``seen`` (by key) and their values over the blocks ``bounds``."""
    output, lse = _whole(ctx, seen, values, width)
    m, l, a = ctx.ninf, ctx.zero, [ctx.zero] * width
    blocks = []
    for start, stop in bounds:
        s = {j: seen[j] for j in range(start, stop) if j in seen}
        first = m == ctx.ninf
        maximum = max(s.values(), default=ctx.ninf)
        alpha = ctx.one
        if s:
            new = max(m, maximum)
            # the old state of the first block is nothing; exp(m - new) would be exp(-inf) there,
            # and exp(-inf - -inf), a NaN, in a kernel whose first block is hidden
            alpha = ctx.zero if first else ctx.exp(m - new)
            m = new
            e = {j: ctx.exp(x - m) for j, x in s.items()}
            l = alpha * l + ctx.fsum(e.values())
            a = [alpha * x + ctx.fsum(e[j] * values[j][c] for j in e) for c, x in enumerate(a)]
        prefix = [x / l for x in a] if l else [ctx.zero] * width
        blocks.append(
            Block(
                start=start,
                stop=stop,
                keys=tuple(s),
                scores=tuple(s.values()),
                maximum=maximum,
                running_maximum=m,
                rescale=alpha,
                denominator=l,
                accumulator=tuple(a),
                output=tuple(prefix),
                lse=m + ctx.log(l) if l else ctx.ninf,
                distance=max((abs(x - y) for x, y in zip(prefix, output, strict=True)), default=ctx.zero),
                hidden=not s,
            )
        )
    return Ledger(blocks=tuple(blocks), output=output, lse=lse, bits=bits)


def _whole(ctx: Any, seen: dict[int, Any], values: list[list[Any]], width: int) -> tuple[tuple[Any, ...], Any]:
    """o and lambda of the whole row at once."""
    if not seen:
        return (ctx.zero,) * width, ctx.ninf
    m = max(seen.values())
    lse = m + ctx.log(ctx.fsum(ctx.exp(x - m) for x in seen.values()))
    p = {j: ctx.exp(x - lse) for j, x in seen.items()}
    return tuple(ctx.fdot((p[j], values[j][c]) for j in p) for c in range(width)), lse
