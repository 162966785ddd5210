"""The gradient of the additive bias, summed over whatever the stored bias broadcasts over.

One program owns one tile of the stored bias and walks through all batch entries, heads, rows and keys that
read it, recomputing dS: no scratch memory of the size of the scores, no atomics, the same bits each time.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from .backward import load_base_two, score_gradient
from .scores import LOG2E, extent, hide, load_tile, product_in_chunks, rounded, tile_scores


@triton.jit
def backward_bias(
    q, k, v, lse, do, delta, dbias, mask, bias, slopes, q_ranges, k_ranges,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, lse_b, lse_h, do_b, do_h, do_s, do_d,
    dbias_b, dbias_h, dbias_i, dbias_j,
    mask_b, mask_h, mask_i, mask_j, bias_b, bias_h, bias_i, bias_j, slopes_b, slopes_h,
    batches, heads, group, q_size, k_size, d_size, dv_size, factor, cap, left, right,
    bias_batches, bias_heads, row_tiles, key_tiles,
    HAS_MASK: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr,
    RAGGED_Q: tl.constexpr, RAGGED_K: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_KEYS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, BFLOAT16_BY_HAND: tl.constexpr,
):  # fmt: skip
    """dbias as the bias is stored; SUM_ROWS and SUM_KEYS say that its last two axes are of size 1."""
    program = tl.program_id(0)
    key_tile = program % key_tiles
    row_tile = program // key_tiles % row_tiles
    bias_head = program // key_tiles // row_tiles % bias_heads
    bias_batch = program // key_tiles // row_tiles // bias_heads
    first_row, end_row = row_tile * M, row_tile * M + M
    if SUM_ROWS:
        first_row, end_row = row_tile * 0, q_size
    first_key, end_key = key_tile * N, key_tile * N + N
    if SUM_KEYS:
        first_key, end_key = key_tile * 0, k_size
    # a stored axis of size 1 is read by every entry of that axis
    first_batch, end_batch = bias_batch, bias_batch + 1
    if bias_batches == 1:
        end_batch = batches
    first_head, end_head = bias_head, bias_head + 1
    if bias_heads == 1:
        end_head = heads

    d = tl.arange(0, D)
    e = tl.arange(0, DV)
    acc = tl.zeros([M, N], tl.float32)
    for entry in range(first_batch, end_batch):
        batch = tl.cast(entry, tl.int32)  # the interpreter's ranges are of Python's integers
        q_start, q_count, _ = extent(q_ranges, batch, q_size, RAGGED_Q)
        k_start, k_count, _ = extent(k_ranges, batch, k_size, RAGGED_K)
        offset = k_count - q_count
        if TOP_LEFT:
            offset = 0
        b = batch.to(tl.int64)
        for head in range(first_head, end_head):
            h, kv = tl.cast(head, tl.int64), tl.cast(head // group, tl.int64)
            q_at = q + b * q_b + h * q_h + q_start.to(tl.int64) * q_s
            do_at = do + b * do_b + h * do_h + q_start.to(tl.int64) * do_s
            k_at = k + b * k_b + kv * k_h + k_start.to(tl.int64) * k_s
            v_at = v + b * v_b + kv * v_h + k_start.to(tl.int64) * v_s
            row_at = b * lse_b + h * lse_h + q_start.to(tl.int64)
            slope = 0.0
            if HAS_SLOPES:
                slope = tl.load(slopes + b * slopes_b + h * slopes_h) * LOG2E
            for i in range(first_row, tl.minimum(end_row, q_count), M):
                rows = i + tl.arange(0, M)
                if not CHUNK:
                    queries = load_tile(q_at, rows, d, q_s, q_d, q_count, d_size, True, True, BFLOAT16_BY_HAND)
                    upstream = load_tile(do_at, rows, e, do_s, do_d, q_count, dv_size, True, True, BFLOAT16_BY_HAND)
                origin = load_base_two(lse + row_at, rows, q_count)
                row_delta = tl.load(delta + row_at + rows, mask=rows < q_count, other=0.0)
                for j in range(first_key, tl.minimum(end_key, k_count), N):
                    keys = j + tl.arange(0, N)
                    if CHUNK:
                        product = product_in_chunks(
                            q_at, rows, q_s, q_d, q_count, k_at, keys, k_s, k_d, k_count, d_size,
                            M, N, D, CHUNK, PRECISION, BFLOAT16_BY_HAND,
                        )  # fmt: skip
                        dp = product_in_chunks(
                            do_at, rows, do_s, do_d, q_count, v_at, keys, v_s, v_d, k_count, dv_size,
                            M, N, DV, CHUNK, PRECISION, BFLOAT16_BY_HAND,
                        )  # fmt: skip
                    else:
                        kt = load_tile(k_at, keys, d, k_s, k_d, k_count, d_size, True, True, BFLOAT16_BY_HAND)
                        product = tl.dot(queries, tl.trans(kt), input_precision=PRECISION)
                        vt = load_tile(v_at, keys, e, v_s, v_d, k_count, dv_size, True, True, BFLOAT16_BY_HAND)
                        dp = tl.dot(upstream, tl.trans(vt), input_precision=PRECISION)
                    s, t = tile_scores(
                        product, rows[:, None], keys[None, :],
                        offset, q_count, k_count, factor, cap, slope,
                        mask + b * mask_b + h * mask_h, mask_i, mask_j, bias + b * bias_b + h * bias_h, bias_i, bias_j,
                        HAS_CAP, HAS_SLOPES, HAS_MASK, True,
                    )  # fmt: skip
                    s = hide(s, rows[:, None], keys[None, :], offset, k_count, left, right, HAS_LEFT, HAS_RIGHT, True)
                    p = tl.exp2(s - origin[:, None])
                    acc += score_gradient(p, s, dp, row_delta[:, None], t, False)  # the bias comes after the cap

    out_rows = row_tile * M + tl.arange(0, M)
    out_keys = key_tile * N + tl.arange(0, N)
    at = dbias + bias_batch.to(tl.int64) * dbias_b + bias_head.to(tl.int64) * dbias_h
    if SUM_ROWS and SUM_KEYS:
        x = tl.sum(tl.sum(acc, 1), 0)
        tl.store(at, rounded(x, dbias.dtype.element_ty, BFLOAT16_BY_HAND).to(dbias.dtype.element_ty))
    elif SUM_ROWS:
        x = rounded(tl.sum(acc, 0), dbias.dtype.element_ty, BFLOAT16_BY_HAND).to(dbias.dtype.element_ty)
        tl.store(at + out_keys.to(tl.int64) * dbias_j, x, mask=out_keys < k_size)
    elif SUM_KEYS:
        x = rounded(tl.sum(acc, 1), dbias.dtype.element_ty, BFLOAT16_BY_HAND).to(dbias.dtype.element_ty)
        tl.store(at + out_rows.to(tl.int64) * dbias_i, x, mask=out_rows < q_size)
    else:
        x = rounded(acc, dbias.dtype.element_ty, BFLOAT16_BY_HAND).to(dbias.dtype.element_ty)
        at += out_rows[:, None].to(tl.int64) * dbias_i + out_keys[None, :].to(tl.int64) * dbias_j
        tl.store(at, x, mask=(out_rows[:, None] < q_size) & (out_keys[None, :] < k_size))
