"""Forward and backward of `pair_logsumexp` on one block of scores.

Shapes: scores [rows, n_columns] with a row stride that is a multiple of 16 elements. ranges [rows, 4] int64: the
columns start .. stop - 1 are a row's positives, the columns hidden_start .. hidden_stop - 1 do not count for it, and
every other column is a negative. A hidden column is no positive.

A score s becomes an exponent x by the map of its side. maps [2, 3], positives first, holds scale, offset and width of
each side, in the dtype of the scores. It is a tensor because Triton passes a Python number as float32, and because a
temperature that is learned lies on the device. With y = scale s + offset

    linear:  x = y,                               slope = scale
    circle:  x = y a,  a = relu(y / |scale| + width),  slope = scale a: the factor a is a constant for the gradient

Exponents beyond 2^126 (float64: 2^1022) on either side count as infinite.
n_bucket exists for the autotuner only: n_columns rounded up to a power of two.
"""

import triton
import triton.language as tl

from .soft_histogram import ALIGNMENT, is_within
from .soft_rank import row_pointer
from .surrogates import LOG2_E

# A forward tile is [TILE_ROWS, BLOCK_N / TILE_ROWS]. Peaks and sums are kept per column of the tile, whose rows lie in
# one thread: nothing is shuffled before the row ends.
TILE_ROWS = tl.constexpr(8)
# Columns of a tile of positives: classes are far smaller than rows.
BLOCK_OWN = tl.constexpr(128)


@triton.jit
def exponential(x, FAST_MATH: tl.constexpr):
    # Of what an exponent lies below its peak or its total: the rounding of the product weighs as little as the power.
    binary = x * LOG2_E
    # Without ftz the instruction is wrapped in guards that keep subnormal results.
    if FAST_MATH:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [binary], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(binary)


@triton.jit
def load_range(ranges, row, n_columns, WHICH: tl.constexpr):
    # Within the row, and start <= stop, whatever stands there.
    start = tl.minimum(tl.maximum(tl.load(ranges + row * 4 + 2 * WHICH), 0), n_columns)
    stop = tl.minimum(tl.maximum(tl.load(ranges + row * 4 + 2 * WHICH + 1), start), n_columns)
    return start.to(tl.int32), stop.to(tl.int32)


@triton.jit
def meets(begin, SIZE: tl.constexpr, start, stop):
    """Whether the columns begin .. begin + SIZE - 1 and start .. stop - 1 may have one in common."""
    return (begin < stop) & (begin + SIZE > start)


@triton.jit
def load_map(maps, WHICH: tl.constexpr):
    """What `exponent` takes: scale, offset, 1 / |scale|, width."""
    scale = tl.load(maps + 3 * WHICH)
    return scale, tl.load(maps + 3 * WHICH + 1), 1.0 / tl.abs(scale), tl.load(maps + 3 * WHICH + 2)


@triton.jit
def exponent(score, scale, offset, inverse, width, MAP: tl.constexpr):
    """x of the scores, and the factor by which its slope is not the scale."""
    y = tl.fma(score, scale, offset)
    if MAP == "circle":
        # A NaN may be lost here: y keeps it.
        factor = tl.maximum(tl.fma(y, inverse, width), 0.0)
        return y * factor, factor
    else:
        tl.static_assert(MAP == "linear", "unknown exponent map")
        return y, 1.0


@triton.jit
def sum_of_powers(
    row_scores,
    begin,
    end,
    skip_start,
    skip_stop,
    hidden_start,
    hidden_stop,
    scale,
    offset,
    inverse,
    width,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    MAP: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    """ln of the sum of e^x over the columns begin .. end - 1 without the skipped and the hidden ones; -inf for none."""
    DTYPE: tl.constexpr = row_scores.dtype.element_ty
    # Peaks and their differences stay finite: an infinite exponent makes its own power infinite, and no other one NaN.
    LARGEST: tl.constexpr = 2.0**1022 if DTYPE == tl.float64 else 2.0**126
    SIZE: tl.constexpr = ROWS * LANES
    place = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    peak = tl.full([LANES], -LARGEST, dtype=DTYPE)
    total = tl.zeros([LANES], dtype=DTYPE)
    # Aligned, so that loads are vectorised.
    for tile in range(begin // ALIGNMENT * ALIGNMENT, end, SIZE):
        column = tile + place
        edge = (tile < begin) | (tile + SIZE > end) | meets(tile, SIZE, skip_start, skip_stop)
        if edge | meets(tile, SIZE, hidden_start, hidden_stop):
            counts = is_within(column, begin, end) & (is_within(column, skip_start, skip_stop) == 0)
            counts &= is_within(column, hidden_start, hidden_stop) == 0
            x, _ = exponent(
                tl.load(row_scores + column, mask=counts, other=0.0), scale, offset, inverse, width, MAP
            )
            x = tl.where(counts, x, -float("inf"))
        else:
            x, _ = exponent(tl.load(row_scores + column), scale, offset, inverse, width, MAP)
        new_peak = tl.minimum(tl.maximum(peak, tl.max(x, 0)), LARGEST)
        power = exponential(x - new_peak[None, :], FAST_MATH)
        total = total * exponential(peak - new_peak, FAST_MATH) + tl.sum(power, 0)
        peak = new_peak
    highest = tl.max(peak, 0)
    # No plain product: fused with the first addition of the sum, it would be rounded by one of two lanes only.
    whole = tl.sum(tl.fma(total, exponential(peak - highest, FAST_MATH), 0.0), 0)
    is_empty = whole == 0
    return tl.where(is_empty, -float("inf"), highest + tl.log(tl.where(is_empty, 1.0, whole)))


@triton.jit(do_not_specialize=["stride_units", "n_columns", "n_bucket"])
def pair_logsumexp_forward(
    scores,
    ranges,
    maps,
    positive,
    negative,
    stride_units,
    n_columns,
    n_bucket,
    MAP: tl.constexpr,
    FAST_MATH: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """positive[row] = ln of the sum of e^x over the row's positives, negative[row] over its negatives; -inf for none.

    One program per row: no partial results, no atomics.
    """
    row = tl.program_id(0)
    row_scores = row_pointer(scores, row, stride_units)
    start, stop = load_range(ranges, row, n_columns, 0)
    hidden_start, hidden_stop = load_range(ranges, row, n_columns, 1)
    first = tl.full([], 0, dtype=tl.int32)
    scale, offset, inverse, width = load_map(maps, 1)
    total = sum_of_powers(
        row_scores,
        first,
        n_columns,
        start,
        stop,
        hidden_start,
        hidden_stop,
        scale,
        offset,
        inverse,
        width,
        TILE_ROWS,
        BLOCK_N // TILE_ROWS,
        MAP,
        FAST_MATH,
    )
    tl.store(negative + row, total)
    scale, offset, inverse, width = load_map(maps, 0)
    total = sum_of_powers(
        row_scores,
        start,
        stop,
        first,
        first,
        hidden_start,
        hidden_stop,
        scale,
        offset,
        inverse,
        width,
        1,
        BLOCK_OWN,
        MAP,
        FAST_MATH,
    )
    tl.store(positive + row, total)


@triton.jit
def load_total(total, row):
    """The logarithm of a sum. That of an empty sum is not subtracted: 0 serves every exponent of -inf."""
    value = tl.load(total + row)
    return tl.where(value == -float("inf"), 0.0, value)


@triton.jit(do_not_specialize=["stride_units", "grad_stride_units", "stride_pairs", "n_columns", "n_bucket"])
def pair_logsumexp_backward(
    scores,
    ranges,
    maps,
    positive,
    negative,
    grad_positive,
    grad_negative,
    grad_positive_scores,
    grad_scores,
    stride_units,
    grad_stride_units,
    stride_pairs,
    n_columns,
    n_bucket,
    MAP: tl.constexpr,
    WITH_SCORES: tl.constexpr,
    FAST_MATH: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """grad_scores [rows, n_columns]: slope e^(x - total) times the gradient of the total of the side; 0 if hidden.

    With WITH_SCORES, the columns start + k of the positives also get grad_positive_scores[row, k] [rows, stride_pairs].
    A pure map: every element is read and written once, by one program.
    """
    row = tl.program_id(0)
    tile = tl.program_id(1) * BLOCK_N
    column = tile + tl.arange(0, BLOCK_N)
    row_scores = row_pointer(scores, row, stride_units)
    row_grads = row_pointer(grad_scores, row, grad_stride_units)
    start, stop = load_range(ranges, row, n_columns, 0)
    hidden_start, hidden_stop = load_range(ranges, row, n_columns, 1)
    scale, offset, inverse, width = load_map(maps, 1)
    weight = scale * tl.load(grad_negative + row)
    total = load_total(negative, row)
    edge = meets(tile, BLOCK_N, start, stop) | meets(tile, BLOCK_N, hidden_start, hidden_stop)
    if edge | (tile + BLOCK_N > n_columns):
        inside = column < n_columns
        counts = inside & (is_within(column, hidden_start, hidden_stop) == 0)
        is_own = counts & is_within(column, start, stop)
        own_scale, own_offset, own_inverse, own_width = load_map(maps, 0)
        x, factor = exponent(
            tl.load(row_scores + column, mask=counts, other=0.0),
            tl.where(is_own, own_scale, scale),
            tl.where(is_own, own_offset, offset),
            tl.where(is_own, own_inverse, inverse),
            tl.where(is_own, own_width, width),
            MAP,
        )
        x = tl.where(counts, x, -float("inf"))
        power = exponential(x - tl.where(is_own, load_total(positive, row), total), FAST_MATH)
        own_weight = own_scale * tl.load(grad_positive + row)
        grad = tl.where(is_own, own_weight, weight) * factor * power
        if WITH_SCORES:
            pairs = grad_positive_scores + row.to(tl.int64) * stride_pairs
            grad += tl.load(pairs + (column - start), mask=is_own, other=0.0)
        tl.store(row_grads + column, tl.where(counts, grad, 0.0), mask=inside)
    else:
        x, factor = exponent(tl.load(row_scores + column), scale, offset, inverse, width, MAP)
        tl.store(row_grads + column, weight * factor * exponential(x - total, FAST_MATH))
