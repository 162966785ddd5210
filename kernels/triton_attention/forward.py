"""The forward kernel: online softmax over key tiles, after FlashAttention-2 (Dao, 2023, arXiv:2307.08691)."""

# mypy: ignore-errors
# ruff: noqa: SIM102

import triton
import triton.language as tl

from .scores import LN2, LOG2E, extent, hide, keys_of_rows, load_tile, pointers, rounded, tile_scores


@triton.jit
def attend(
    queries, k, v, rows, start, full, ragged, stop, offset, q_count, k_count,
    k_b, k_s, k_d, v_b, v_s, v_d, d_size, dv_size, factor, cap, slope, left, right,
    mask, mask_i, mask_j, bias, bias_i, bias_j, pages, page_size,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PAGED: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr, BFLOAT16_BY_HAND: tl.constexpr,
):  # fmt: skip
    """(P V, row sum, maximum in base 2) of M query rows over the keys from start to stop, not yet normalised.

    Keys in [full, ragged) are seen by all rows. mask, bias and slope may differ from row to row ([M, 1]). PAGED: key
    j lies in page ``pages[j // page_size]``, and k_b and v_b lead from page to page.
    """
    d = tl.arange(0, D)
    e = tl.arange(0, DV)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DV], tl.float32)
    for at in range(start, stop, N):
        keys = at + tl.arange(0, N)
        k_at, v_at, k_rows, end = k, v, keys, k_count
        if PAGED:
            page = tl.load(pages + keys // page_size, mask=keys < k_count, other=0).to(tl.int64)[:, None]
            k_at, v_at, k_rows = k + page * k_b, v + page * v_b, keys % page_size
            end = (k_count - keys + k_rows)[:, None]
        kt = load_tile(k_at, k_rows, d, k_s, k_d, end, d_size, not EVEN_K, not EVEN_D, BFLOAT16_BY_HAND)
        s, t = tile_scores(
            tl.dot(queries, tl.trans(kt), input_precision=PRECISION), rows[:, None], keys[None, :],
            offset, q_count, k_count, factor, cap, slope, mask, mask_i, mask_j, bias, bias_i, bias_j,
            HAS_CAP, HAS_SLOPES, HAS_MASK, HAS_BIAS,
        )  # fmt: skip
        if HAS_LEFT or HAS_RIGHT or not EVEN_K:
            if (at < full) | (at >= ragged):
                s = hide(s, rows[:, None], keys[None, :], offset, k_count, left, right, HAS_LEFT, HAS_RIGHT, not EVEN_K)
        higher = tl.maximum(top, tl.max(s, 1))
        origin = tl.where(higher == float("-inf"), 0.0, higher)  # no key seen yet: never -inf - -inf
        p = tl.exp2(s - origin[:, None])
        rescale = tl.exp2(top - origin)
        total = total * rescale + tl.sum(p, 1)
        vt = load_tile(v_at, k_rows, e, v_s, v_d, end, dv_size, not EVEN_K, not EVEN_DV, BFLOAT16_BY_HAND)
        p = rounded(p, v.dtype.element_ty, BFLOAT16_BY_HAND)
        acc = tl.dot(p, vt, acc * rescale[:, None], input_precision=PRECISION)
        top = higher
    return acc, total, top


@triton.jit
def forward(
    q, k, v, o, lse, mask, bias, slopes, q_ranges, k_ranges, pages,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, o_b, o_h, o_s, o_d, lse_b, lse_h,
    mask_b, mask_h, mask_i, mask_j, bias_b, bias_h, bias_i, bias_j, slopes_b, slopes_h, pages_b,
    heads, group, q_size, k_size, page_size, d_size, dv_size, tiles, factor, cap, left, right,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr, PAGED: tl.constexpr,
    RAGGED_Q: tl.constexpr, RAGGED_K: tl.constexpr, EVEN_K: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SHORT: tl.constexpr, PRECISION: tl.constexpr, BFLOAT16_BY_HAND: tl.constexpr,
):  # fmt: skip
    """O [B, Hq, Sq, Dv] and the natural log-sum-exp [B, Hq, Sq]: one program per tile of M query rows.

    Rows that see no key get O = 0 and -inf, rows of padding likewise. Batch entries of at most SHORT queries are
    left to the decode kernel.
    """
    program = tl.program_id(0)
    tile = program % tiles
    head = program // tiles % heads
    batch = program // tiles // heads
    if HAS_RIGHT:
        tile = tiles - 1 - tile  # the last rows see the most keys: they go first
    q_start, q_count, q_rows = extent(q_ranges, batch, q_size, RAGGED_Q)
    k_start, k_count, _ = extent(k_ranges, batch, k_size, RAGGED_K)
    first = tile * M
    if (first >= q_rows) | (q_count <= SHORT):
        return
    b, h, kv = batch.to(tl.int64), head.to(tl.int64), (head // group).to(tl.int64)
    q += b * q_b + h * q_h + q_start.to(tl.int64) * q_s
    o += b * o_b + h * o_h + q_start.to(tl.int64) * o_s
    lse += b * lse_b + h * lse_h + q_start.to(tl.int64)
    k += kv * k_h + k_start.to(tl.int64) * k_s
    v += kv * v_h + k_start.to(tl.int64) * v_s
    if not PAGED:
        k += b * k_b
        v += b * v_b
    mask += b * mask_b + h * mask_h
    bias += b * bias_b + h * bias_h
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes + b * slopes_b + h * slopes_h) * LOG2E
    offset = k_count - q_count
    if TOP_LEFT:
        offset = 0

    rows = first + tl.arange(0, M)
    d = tl.arange(0, D)
    e = tl.arange(0, DV)
    queries = load_tile(q, rows, d, q_s, q_d, q_count, d_size, True, not EVEN_D, BFLOAT16_BY_HAND)
    last = tl.minimum(first + M, q_count) - 1
    start, full, ragged, stop = keys_of_rows(first, last, offset, k_count, left, right, N, HAS_LEFT, HAS_RIGHT)
    acc, total, top = attend(
        queries, k, v, rows, start, full, ragged, stop, offset, q_count, k_count,
        k_b, k_s, k_d, v_b, v_s, v_d, d_size, dv_size, factor, cap, slope, left, right,
        mask, mask_i, mask_j, bias, bias_i, bias_j, pages + b * pages_b, page_size,
        HAS_MASK, HAS_BIAS, HAS_SLOPES, HAS_CAP, HAS_LEFT, HAS_RIGHT, PAGED, EVEN_K, EVEN_D, EVEN_DV,
        M, N, D, DV, PRECISION, BFLOAT16_BY_HAND,
    )  # fmt: skip

    empty = (total == 0.0) | (rows >= q_count)
    divisor = tl.where(empty, 1.0, total)
    out = tl.where(empty[:, None], 0.0, acc / divisor[:, None])
    out = rounded(out, o.dtype.element_ty, BFLOAT16_BY_HAND).to(o.dtype.element_ty)
    inside = (rows[:, None] < q_rows) & (e[None, :] < dv_size)
    tl.store(pointers(o, rows, e, o_s, o_d), out, mask=inside)
    natural = tl.where(empty, float("-inf"), (top + tl.log2(divisor)) * LN2)
    tl.store(lse + rows, natural, mask=rows < q_rows)
