"""The backward kernels: dQ over query tiles, then dK and dV over key tiles.

Every sum has one owner, so gradients come out the same bit for bit each time. Probabilities are
recomputed from the log-sum-exp; dS = P (dP - delta) with delta = <dO, O> - dlse, which the first
kernel computes and stores for the second.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102

import triton
import triton.language as tl

from .scores import (
    LOG2E,
    extent,
    hide,
    keys_of_rows,
    load_tile,
    pointers,
    product_in_chunks,
    rounded,
    rows_of_keys,
    tile_scores,
)


@triton.jit
def load_base_two(lse, rows, row_count):
    """The log-sum-exp in base 2, and +inf for rows that see nothing: exp2(s - inf) = 0."""
    x = tl.load(lse + rows, mask=rows < row_count, other=float("-inf"))
    return tl.where(x == float("-inf"), float("inf"), x * LOG2E)


@triton.jit
def score_gradient(p, s, dp, delta, t, HAS_CAP: tl.constexpr):
    """dS of a tile with respect to <q, k> times the scale; exactly 0 where hidden (0 * inf is not)."""
    ds = p * (dp - delta)
    if HAS_CAP:
        ds *= 1.0 - t * t
    return tl.where(s == float("-inf"), 0.0, ds)


@triton.jit
def backward_q(
    q, k, v, o, lse, do, dlse, delta, dq, mask, bias, slopes, q_ranges, k_ranges,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, o_b, o_h, o_s, o_d, lse_b, lse_h,
    do_b, do_h, do_s, do_d, dlse_b, dlse_h, dlse_s, dq_b, dq_h, dq_s, dq_d,
    mask_b, mask_h, mask_i, mask_j, bias_b, bias_h, bias_i, bias_j, slopes_b, slopes_h,
    heads, group, q_size, k_size, d_size, dv_size, tiles, factor, cap, left, right, scale,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr,
    RAGGED_Q: tl.constexpr, RAGGED_K: tl.constexpr, EVEN_K: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, BFLOAT16_BY_HAND: tl.constexpr,
):  # fmt: skip
    """dQ [B, Hq, Sq, D] and delta [B, Hq, Sq]: one program per tile of M query rows."""
    program = tl.program_id(0)
    tile = program % tiles
    head = program // tiles % heads
    batch = program // tiles // heads
    if HAS_RIGHT:
        tile = tiles - 1 - tile
    q_start, q_count, q_rows = extent(q_ranges, batch, q_size, RAGGED_Q)
    k_start, k_count, _ = extent(k_ranges, batch, k_size, RAGGED_K)
    first = tile * M
    if first >= q_rows:
        return
    b, h, kv = batch.to(tl.int64), head.to(tl.int64), (head // group).to(tl.int64)
    q_start, k_start = q_start.to(tl.int64), k_start.to(tl.int64)
    q += b * q_b + h * q_h + q_start * q_s
    o += b * o_b + h * o_h + q_start * o_s
    do += b * do_b + h * do_h + q_start * do_s
    dq += b * dq_b + h * dq_h + q_start * dq_s
    lse += b * lse_b + h * lse_h + q_start
    delta += b * lse_b + h * lse_h + q_start
    dlse += b * dlse_b + h * dlse_h + q_start * dlse_s
    k += b * k_b + kv * k_h + k_start * k_s
    v += b * v_b + kv * v_h + k_start * v_s
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
    if not CHUNK:
        queries = load_tile(q, rows, d, q_s, q_d, q_count, d_size, True, not EVEN_D, BFLOAT16_BY_HAND)
    upstream = load_tile(do, rows, e, do_s, do_d, q_count, dv_size, True, not EVEN_DV, BFLOAT16_BY_HAND)
    outputs = load_tile(o, rows, e, o_s, o_d, q_count, dv_size, True, not EVEN_DV, BFLOAT16_BY_HAND)
    row_delta = tl.sum(upstream.to(tl.float32) * outputs.to(tl.float32), 1)
    if HAS_DLSE:
        row_delta -= tl.load(dlse + rows.to(tl.int64) * dlse_s, mask=rows < q_count, other=0.0)
    tl.store(delta + rows, row_delta, mask=rows < q_rows)
    origin = load_base_two(lse, rows, q_count)

    acc = tl.zeros([M, D], tl.float32)
    last = tl.minimum(first + M, q_count) - 1
    start, full, ragged, stop = keys_of_rows(first, last, offset, k_count, left, right, N, HAS_LEFT, HAS_RIGHT)
    for at in range(start, stop, N):
        keys = at + tl.arange(0, N)
        kt = load_tile(k, keys, d, k_s, k_d, k_count, d_size, not EVEN_K, not EVEN_D, BFLOAT16_BY_HAND)
        if CHUNK:
            product = product_in_chunks(
                q, rows, q_s, q_d, q_count, k, keys, k_s, k_d, k_count, d_size,
                M, N, D, CHUNK, PRECISION, BFLOAT16_BY_HAND,
            )  # fmt: skip
            dp = product_in_chunks(
                do, rows, do_s, do_d, q_count, v, keys, v_s, v_d, k_count, dv_size,
                M, N, DV, CHUNK, PRECISION, BFLOAT16_BY_HAND,
            )  # fmt: skip
        else:
            product = tl.dot(queries, tl.trans(kt), input_precision=PRECISION)
            vt = load_tile(v, keys, e, v_s, v_d, k_count, dv_size, not EVEN_K, not EVEN_DV, BFLOAT16_BY_HAND)
            dp = tl.dot(upstream, tl.trans(vt), input_precision=PRECISION)
        s, t = tile_scores(
            product, rows[:, None], keys[None, :],
            offset, q_count, k_count, factor, cap, slope, mask, mask_i, mask_j, bias, bias_i, bias_j,
            HAS_CAP, HAS_SLOPES, HAS_MASK, HAS_BIAS,
        )  # fmt: skip
        if HAS_LEFT or HAS_RIGHT or not EVEN_K:
            if (at < full) | (at >= ragged):
                s = hide(s, rows[:, None], keys[None, :], offset, k_count, left, right, HAS_LEFT, HAS_RIGHT, not EVEN_K)
        p = tl.exp2(s - origin[:, None])
        ds = score_gradient(p, s, dp, row_delta[:, None], t, HAS_CAP)
        acc = tl.dot(rounded(ds, k.dtype.element_ty, BFLOAT16_BY_HAND), kt, acc, input_precision=PRECISION)

    out = rounded(acc * scale, dq.dtype.element_ty, BFLOAT16_BY_HAND).to(dq.dtype.element_ty)
    inside = (rows[:, None] < q_rows) & (d[None, :] < d_size)
    tl.store(pointers(dq, rows, d, dq_s, dq_d), out, mask=inside)


@triton.jit
def backward_kv(
    q, k, v, lse, do, delta, dk, dv, mask, bias, slopes, q_ranges, k_ranges,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, lse_b, lse_h,
    do_b, do_h, do_s, do_d, dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s, dv_d,
    mask_b, mask_h, mask_i, mask_j, bias_b, bias_h, bias_i, bias_j, slopes_b, slopes_h,
    heads, group, q_size, k_size, d_size, dv_size, tiles, factor, cap, left, right, scale,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr,
    RAGGED_Q: tl.constexpr, RAGGED_K: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr, BFLOAT16_BY_HAND: tl.constexpr,
):  # fmt: skip
    """dK [B, Hk, Sk, D] and dV [B, Hk, Sk, Dv]: one program per tile of N keys, over all heads of the group.

    Tiles are held with keys on the rows. Rows past the last query have P = 0 by their log-sum-exp, and keys
    past the last one touch no other key's sums, so only the band is checked here.
    """
    program = tl.program_id(0)
    tile = program % tiles
    kv = program // tiles % (heads // group)
    batch = program // tiles // (heads // group)
    q_start, q_count, _ = extent(q_ranges, batch, q_size, RAGGED_Q)
    k_start, k_count, k_rows = extent(k_ranges, batch, k_size, RAGGED_K)
    first = tile * N
    if first >= k_rows:
        return
    b, q_start, k_start = batch.to(tl.int64), q_start.to(tl.int64), k_start.to(tl.int64)
    k += b * k_b + kv.to(tl.int64) * k_h + k_start * k_s
    v += b * v_b + kv.to(tl.int64) * v_h + k_start * v_s
    dk += b * dk_b + kv.to(tl.int64) * dk_h + k_start * dk_s
    dv += b * dv_b + kv.to(tl.int64) * dv_h + k_start * dv_s
    offset = k_count - q_count
    if TOP_LEFT:
        offset = 0

    keys = first + tl.arange(0, N)
    d = tl.arange(0, D)
    e = tl.arange(0, DV)
    kt = load_tile(k, keys, d, k_s, k_d, k_count, d_size, True, not EVEN_D, BFLOAT16_BY_HAND)
    vt = load_tile(v, keys, e, v_s, v_d, k_count, dv_size, True, not EVEN_DV, BFLOAT16_BY_HAND)
    acc_k = tl.zeros([N, D], tl.float32)
    acc_v = tl.zeros([N, DV], tl.float32)
    last = tl.minimum(first + N, k_count) - 1
    start, full, ragged, stop = rows_of_keys(first, last, offset, q_count, left, right, M, HAS_LEFT, HAS_RIGHT)
    for member in range(group):
        h = (kv * group + member).to(tl.int64)
        q_at = q + b * q_b + h * q_h + q_start * q_s
        do_at = do + b * do_b + h * do_h + q_start * do_s
        row_at = b * lse_b + h * lse_h + q_start
        mask_at = mask + b * mask_b + h * mask_h
        bias_at = bias + b * bias_b + h * bias_h
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(slopes + b * slopes_b + h * slopes_h) * LOG2E
        for at in range(start, stop, M):
            rows = at + tl.arange(0, M)
            queries = load_tile(q_at, rows, d, q_s, q_d, q_count, d_size, not EVEN_Q, not EVEN_D, BFLOAT16_BY_HAND)
            upstream = load_tile(
                do_at, rows, e, do_s, do_d, q_count, dv_size, not EVEN_Q, not EVEN_DV, BFLOAT16_BY_HAND
            )
            origin = load_base_two(lse + row_at, rows, q_count)
            row_delta = tl.load(delta + row_at + rows, mask=rows < q_count, other=0.0)
            s, t = tile_scores(
                tl.dot(kt, tl.trans(queries), input_precision=PRECISION), rows[None, :], keys[:, None],
                offset, q_count, k_count, factor, cap, slope, mask_at, mask_i, mask_j, bias_at, bias_i, bias_j,
                HAS_CAP, HAS_SLOPES, HAS_MASK, HAS_BIAS,
            )  # fmt: skip
            if HAS_LEFT or HAS_RIGHT:
                if (at < full) | (at >= ragged):
                    s = hide(s, rows[None, :], keys[:, None], offset, k_count, left, right, HAS_LEFT, HAS_RIGHT, False)
            p = tl.exp2(s - origin[None, :])
            p_stored = rounded(p, v.dtype.element_ty, BFLOAT16_BY_HAND)
            acc_v = tl.dot(p_stored, upstream, acc_v, input_precision=PRECISION)
            dp = tl.dot(vt, tl.trans(upstream), input_precision=PRECISION)
            ds = score_gradient(p, s, dp, row_delta[None, :], t, HAS_CAP)
            ds = rounded(ds, k.dtype.element_ty, BFLOAT16_BY_HAND)
            acc_k = tl.dot(ds, queries, acc_k, input_precision=PRECISION)

    counted = keys[:, None] < k_count
    out = rounded(tl.where(counted, acc_k * scale, 0.0), dk.dtype.element_ty, BFLOAT16_BY_HAND)
    inside = (keys[:, None] < k_rows) & (d[None, :] < d_size)
    tl.store(pointers(dk, keys, d, dk_s, dk_d), out.to(dk.dtype.element_ty), mask=inside)
    out = rounded(tl.where(counted, acc_v, 0.0), dv.dtype.element_ty, BFLOAT16_BY_HAND)
    inside = (keys[:, None] < k_rows) & (e[None, :] < dv_size)
    tl.store(pointers(dv, keys, e, dv_s, dv_d), out.to(dv.dtype.element_ty), mask=inside)
