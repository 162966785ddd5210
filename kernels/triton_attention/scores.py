"""What the kernels share: extents of ragged batches, loads, roundings, and the scores of a tile.

Scores are kept in base 2 (multiplied by log2 e), for exp2 is what the hardware has. Offsets are
computed in 64 bits: a stride times an index may pass 2^31 although neither does.

BFLOAT16_BY_HAND is for Triton's interpreter, whose bfloat16 arithmetic works on bit patterns and
whose casts truncate: operands are widened to float32 after each load, and wherever the compiled
kernel rounds to bfloat16 the bits are rounded here, to nearest and ties to even.
"""

# triton annotates its own functions only in part; branches on constants are compiled or left out, so they stay
# apart from branches on values
# mypy: ignore-errors
# ruff: noqa: RET505, SIM300

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# How an axis is ragged: every batch entry full, one length per entry, or packed by cumulative lengths.
FULL = tl.constexpr(0)
LENGTHS = tl.constexpr(1)
PACKED = tl.constexpr(2)


@triton.jit
def extent(ranges, batch, size, RAGGED: tl.constexpr):
    """(first row in memory, rows that count, rows in memory) of a batch entry's axis."""
    if RAGGED == PACKED:
        start = tl.load(ranges + batch)
        rows = tl.load(ranges + batch + 1) - start
        return start, rows, rows
    elif RAGGED == LENGTHS:
        return batch * 0, tl.load(ranges + batch), size
    else:
        return batch * 0, size, size


@triton.jit
def pointers(base, rows, columns, row_stride, column_stride):
    """Pointers to a tile; rows and columns are vectors."""
    return base + rows[:, None].to(tl.int64) * row_stride + columns[None, :].to(tl.int64) * column_stride


@triton.jit
def load_tile(
    base, rows, columns, row_stride, column_stride, row_count, column_count,
    CHECK_ROWS: tl.constexpr, CHECK_COLUMNS: tl.constexpr, BFLOAT16_BY_HAND: tl.constexpr,
):  # fmt: skip
    """A tile as its matrix product takes it, 0 beyond row_count and column_count."""
    at = pointers(base, rows, columns, row_stride, column_stride)
    if CHECK_ROWS and CHECK_COLUMNS:
        x = tl.load(at, mask=(rows[:, None] < row_count) & (columns[None, :] < column_count), other=0.0)
    elif CHECK_ROWS:
        x = tl.load(at, mask=rows[:, None] < row_count, other=0.0)
    elif CHECK_COLUMNS:
        x = tl.load(at, mask=columns[None, :] < column_count, other=0.0)
    else:
        x = tl.load(at)
    if BFLOAT16_BY_HAND:
        x = x.to(tl.float32)
    return x


@triton.jit
def product_in_chunks(
    a, a_rows, a_s, a_d, a_count, b, b_rows, b_s, b_d, b_count, size,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, BFLOAT16_BY_HAND: tl.constexpr,
):  # fmt: skip
    """a b^T over ``size`` channels, CHUNK at a time, loaded anew on each call.

    For wide heads in float32: without matrix instructions a thread holds whole rows of both operands, and one
    that does not change from tile to tile would stay in registers for good.
    """
    total = tl.zeros([M, N], tl.float32)
    for at in range(0, WIDTH, CHUNK):
        channels = at + tl.arange(0, CHUNK)
        x = load_tile(a, a_rows, channels, a_s, a_d, a_count, size, True, True, BFLOAT16_BY_HAND)
        y = load_tile(b, b_rows, channels, b_s, b_d, b_count, size, True, True, BFLOAT16_BY_HAND)
        total = tl.dot(x, tl.trans(y), total, input_precision=PRECISION)
    return total


@triton.jit
def rounded(x, STORAGE: tl.constexpr, BFLOAT16_BY_HAND: tl.constexpr):
    """float32 rounded to the storage format, as operand of a product or for a store."""
    if BFLOAT16_BY_HAND and STORAGE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        bits = (bits >> 16) << 16
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(STORAGE)


@triton.jit
def tanh(x):
    """tanh to a few units, relatively: a polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.

    The polynomial interpolates (tanh(x) / x - 1) / x^2 at the Chebyshev nodes of x^2 in [0, 0.31]; it is
    good to 0.07 units of float32.
    """
    magnitude = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(magnitude * (2 * LOG2E)) + 1.0)
    far = tl.where(x < 0, -far, far)
    t = x * x
    slope = -0.006564395453 * t + 0.02128472322
    slope = slope * t - 0.05390535935
    slope = slope * t + 0.1333309279
    slope = slope * t - 0.3333333185
    return tl.where(magnitude < 0.55, x + x * t * slope, far)


@triton.jit
def tile_scores(
    product, rows, keys, offset, row_count, key_count, factor, cap, slope,
    mask, mask_rows, mask_keys, bias, bias_rows, bias_keys,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Scores of a tile in base 2, -inf where mask or bias hide, and the tanh of the capped ones.

    ``product`` holds <q, k>; rows and keys broadcast to its shape, so that either may come first.
    ``factor`` is scale * log2 e, or scale / cap where there is a cap; ``cap`` and ``slope`` are already
    in base 2. ``offset`` aligns row i with key i + offset.
    """
    s = product * factor
    t = s
    if HAS_CAP:
        t = tanh(s)
        s = t * cap
    if HAS_SLOPES:
        s -= slope * tl.abs(rows + offset - keys).to(tl.float32)
    if HAS_BIAS:
        at = bias + rows.to(tl.int64) * bias_rows + keys.to(tl.int64) * bias_keys
        b = tl.load(at, mask=(rows < row_count) & (keys < key_count), other=float("-inf"))
        s += b.to(tl.float32) * LOG2E
    if HAS_MASK:
        at = mask + rows.to(tl.int64) * mask_rows + keys.to(tl.int64) * mask_keys
        seen = tl.load(at, mask=(rows < row_count) & (keys < key_count), other=0)
        s = tl.where(seen != 0, s, float("-inf"))
    return s, t


@triton.jit
def hide(
    s, rows, keys, offset, key_count, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CHECK_KEYS: tl.constexpr,
):  # fmt: skip
    """Scores with -inf outside the band and past the last key."""
    # the limits are vectors: a score costs one comparison for each side
    if HAS_RIGHT or CHECK_KEYS:
        end = key_count
        if HAS_RIGHT:
            end = tl.minimum(rows + (offset + right + 1), end)
        s = tl.where(keys < end, s, float("-inf"))
    if HAS_LEFT:
        s = tl.where(keys >= rows + (offset - left), s, float("-inf"))
    return s


@triton.jit
def up_to_tile(n, TILE: tl.constexpr):
    """n rounded up to whole tiles, at least 0. (Division of negative numbers differs between runtimes.)"""
    return (tl.maximum(n, 0) + TILE - 1) // TILE * TILE


@triton.jit
def down_to_tile(n, TILE: tl.constexpr):
    """n rounded down to whole tiles, at least 0."""
    return tl.maximum(n, 0) // TILE * TILE


@triton.jit
def keys_of_rows(
    first, last, offset, key_count, left, right, TILE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """Key ranges (start, full, ragged, stop) of query rows first to last, at whole tiles of keys.

    Keys outside [start, stop) are seen by no row; those in [full, ragged) by all, as far as the band and the
    number of keys decide: tiles that begin there need no check.
    """
    start, stop = 0, key_count
    full, ragged = 0, key_count
    if HAS_RIGHT:
        stop = tl.minimum(stop, last + offset + right + 1)
        ragged = tl.minimum(ragged, first + offset + right + 1)
    if HAS_LEFT:
        start = down_to_tile(first + offset - left, TILE)
        full = up_to_tile(last + offset - left, TILE)
    stop = tl.maximum(stop, start)
    full = tl.maximum(tl.minimum(full, up_to_tile(stop, TILE)), start)
    ragged = tl.maximum(down_to_tile(ragged, TILE), full)
    return start, full, ragged, stop


@triton.jit
def rows_of_keys(
    first, last, offset, row_count, left, right, TILE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """Row ranges (start, full, ragged, stop) of keys first to last: keys_of_rows from the other side."""
    start, stop = 0, row_count
    full, ragged = 0, row_count
    if HAS_RIGHT:
        start = down_to_tile(first - offset - right, TILE)
        full = up_to_tile(last - offset - right, TILE)
    if HAS_LEFT:
        stop = tl.minimum(stop, last - offset + left + 1)
        ragged = tl.minimum(ragged, first - offset + left + 1)
    stop = tl.maximum(stop, start)
    full = tl.maximum(tl.minimum(full, up_to_tile(stop, TILE)), start)
    ragged = tl.maximum(down_to_tile(ragged, TILE), full)
    return start, full, ragged, stop
