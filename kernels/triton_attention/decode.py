"""Few queries over many keys: each row's keys are split among programs, and their parts merged.

After Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023). A part keeps its maximum, its row sum and its sum
of P V as they are, in float32: merging by log-sum-exps would round them, and exp makes a relative error of the
absolute one. Where a split begins depends on nothing but the key's number, so a batch entry gives the same bits
in any company.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from .forward import attend
from .scores import LN2, LOG2E, extent, keys_of_rows, load_tile, rounded


@triton.jit
def decode(
    q, k, v, parts, sums, tops, mask, bias, slopes, q_ranges, k_ranges, pages,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d,
    mask_b, mask_h, mask_i, mask_j, bias_b, bias_h, bias_i, bias_j, slopes_b, slopes_h, pages_b,
    heads, group, q_size, k_size, page_size, d_size, dv_size, tiles, splits, row_limit, factor, cap, left, right,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr, PAGED: tl.constexpr,
    RAGGED_Q: tl.constexpr, RAGGED_K: tl.constexpr, EVEN_K: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr, BFLOAT16_BY_HAND: tl.constexpr,
):  # fmt: skip
    """parts [B, Hq, R, splits, Dv], sums and tops [B, Hq, R, splits] of batch entries of at most R = row_limit rows.

    A program takes KEYS keys and M of the rows of all query heads that share them, head by head within a row, so
    that keys are read once for the group. Where a row sees none of a split's keys, nothing or a sum of 0 is stored.
    """
    program = tl.program_id(0)
    split = program % splits
    tile = program // splits % tiles
    kv = program // splits // tiles % (heads // group)
    batch = program // splits // tiles // (heads // group)
    q_start, q_count, _ = extent(q_ranges, batch, q_size, RAGGED_Q)
    k_start, k_count, _ = extent(k_ranges, batch, k_size, RAGGED_K)
    first = tile * M
    if (q_count > row_limit) | (first >= group * q_count):
        return
    offset = k_count - q_count
    if TOP_LEFT:
        offset = 0
    last = tl.minimum((first + M - 1) // group, q_count - 1)
    start, full, ragged, stop = keys_of_rows(first // group, last, offset, k_count, left, right, N, HAS_LEFT, HAS_RIGHT)
    start = tl.maximum(start, split * KEYS)
    stop = tl.minimum(stop, split * KEYS + KEYS)
    if start >= stop:
        return

    b = batch.to(tl.int64)
    member = first + tl.arange(0, M)
    rows = member // group
    h = (kv * group + member % group).to(tl.int64)[:, None]
    q += b * q_b + q_start.to(tl.int64) * q_s + h * q_h
    k += kv.to(tl.int64) * k_h + k_start.to(tl.int64) * k_s
    v += kv.to(tl.int64) * v_h + k_start.to(tl.int64) * v_s
    if not PAGED:
        k += b * k_b
        v += b * v_b
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes + b * slopes_b + h * slopes_h) * LOG2E
    queries = load_tile(q, rows, tl.arange(0, D), q_s, q_d, q_count, d_size, True, not EVEN_D, BFLOAT16_BY_HAND)
    acc, total, top = attend(
        queries, k, v, rows, start, full, ragged, stop, offset, q_count, k_count,
        k_b, k_s, k_d, v_b, v_s, v_d, d_size, dv_size, factor, cap, slope, left, right,
        mask + b * mask_b + h * mask_h, mask_i, mask_j, bias + b * bias_b + h * bias_h, bias_i, bias_j,
        pages + b * pages_b, page_size,
        HAS_MASK, HAS_BIAS, HAS_SLOPES, HAS_CAP, HAS_LEFT, HAS_RIGHT, PAGED, EVEN_K, EVEN_D, EVEN_DV,
        M, N, D, DV, PRECISION, BFLOAT16_BY_HAND,
    )  # fmt: skip

    inside = rows < q_count
    at = ((b * heads + kv * group + member % group) * row_limit + rows) * splits + split
    tl.store(sums + at, total, mask=inside)
    tl.store(tops + at, top, mask=inside)
    e = tl.arange(0, DV)
    tl.store(parts + at[:, None] * dv_size + e[None, :], acc, mask=inside[:, None] & (e[None, :] < dv_size))


@triton.jit
def merge(
    parts, sums, tops, o, lse, q_ranges, o_b, o_h, o_s, o_d, lse_b, lse_h, heads, q_size, dv_size, splits, row_limit,
    RAGGED_Q: tl.constexpr, N: tl.constexpr, DV: tl.constexpr, BFLOAT16_BY_HAND: tl.constexpr,
):  # fmt: skip
    """O and the natural log-sum-exp of what decode stored: one program per row, N splits at a time.

    Every part is weighed once, by its distance from the maximum of all. Sums are 0 before decode stores them.
    """
    program = tl.program_id(0)
    row = program % row_limit
    head = program // row_limit % heads
    batch = program // row_limit // heads
    q_start, q_count, q_rows = extent(q_ranges, batch, q_size, RAGGED_Q)
    if (q_count > row_limit) | (row >= q_rows):
        return
    at = program.to(tl.int64) * splits
    e = tl.arange(0, DV)
    top = tl.full([1], float("-inf"), tl.float32)
    for first in range(0, splits, N):
        split = first + tl.arange(0, N)
        total = tl.load(sums + at + split, mask=split < splits, other=0.0)
        higher = tl.load(tops + at + split, mask=(split < splits) & (total != 0.0), other=float("-inf"))
        top = tl.maximum(top, tl.max(higher, 0))
    origin = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([DV], tl.float32)
    for first in range(0, splits, N):
        split = first + tl.arange(0, N)
        part = tl.load(sums + at + split, mask=split < splits, other=0.0)
        there = (split < splits) & (part != 0.0)  # a sum that is not a number is there
        weight = tl.exp2(tl.load(tops + at + split, mask=there, other=float("-inf")) - origin)
        total += tl.sum(part * weight, 0)
        x = tl.load(
            parts + (at + split)[:, None] * dv_size + e[None, :],
            mask=there[:, None] & (e[None, :] < dv_size),
            other=0.0,
        )
        acc += tl.sum(x * weight[:, None], 0)

    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    out = rounded(tl.where(empty, 0.0, acc / divisor), o.dtype.element_ty, BFLOAT16_BY_HAND).to(o.dtype.element_ty)
    b, h = batch.to(tl.int64), head.to(tl.int64)
    to = q_start.to(tl.int64) + row
    tl.store(o + b * o_b + h * o_h + to * o_s + e.to(tl.int64) * o_d, out, mask=e < dv_size)
    natural = tl.where(empty, float("-inf"), (top + tl.log2(divisor)) * LN2)
    tl.store(lse + b * lse_b + h * lse_h + to + tl.arange(0, 1), natural)
