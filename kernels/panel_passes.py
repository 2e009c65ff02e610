"""The passes over a panel between its products, where these multiply in half precision: pure maps of one element each.

Shapes: scores [rows, n_columns] with a row stride that is a multiple of 16 elements, high and low the same in bfloat16;
of_rows [rows] and of_columns [n_columns], the factors of each.
n_bucket exists for the autotuner only: n_columns rounded up to a power of two.
"""

import triton
import triton.language as tl

from .soft_rank import row_pointer


@triton.jit
def weigh_tile(row_scores, of_row, of_columns, column, n_columns, WHOLE: tl.constexpr):
    # Without a mask, a thread loads and stores four numbers at once.
    if WHOLE:
        tl.store(row_scores + column, tl.load(row_scores + column) * of_row * tl.load(of_columns + column))
    else:
        inside = column < n_columns
        factor = tl.load(of_columns + column, mask=inside, other=0.0)
        score = tl.load(row_scores + column, mask=inside, other=0.0)
        tl.store(row_scores + column, score * of_row * factor, mask=inside)


@triton.jit(do_not_specialize=["stride_units", "n_columns", "n_bucket"])
def weigh(scores, of_rows, of_columns, stride_units, n_columns, n_bucket, BLOCK_N: tl.constexpr):
    """scores[row, column] *= of_rows[row] * of_columns[column], one factor after the other."""
    row, begin = tl.program_id(0), tl.program_id(1) * BLOCK_N
    row_scores, column = row_pointer(scores, row, stride_units), begin + tl.arange(0, BLOCK_N)
    of_row = tl.load(of_rows + row)
    if begin + BLOCK_N <= n_columns:
        weigh_tile(row_scores, of_row, of_columns, column, n_columns, True)
    else:
        weigh_tile(row_scores, of_row, of_columns, column, n_columns, False)


@triton.jit
def split_tile(
    row_scores,
    of_row,
    of_columns,
    row_high,
    row_low,
    column,
    n_columns,
    WEIGHED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    inside = column < n_columns
    if WHOLE:
        value = tl.load(row_scores + column)
    else:
        value = tl.load(row_scores + column, mask=inside, other=0.0)
    if WEIGHED:
        if WHOLE:
            value = value * of_row * tl.load(of_columns + column)
        else:
            value = value * of_row * tl.load(of_columns + column, mask=inside, other=0.0)
    high = value.to(tl.bfloat16)
    low = (value - high.to(tl.float32)).to(tl.bfloat16)
    if WHOLE:
        tl.store(row_high + column, high)
        tl.store(row_low + column, low)
    else:
        tl.store(row_high + column, high, mask=inside)
        tl.store(row_low + column, low, mask=inside)


@triton.jit(do_not_specialize=["stride_units", "half_stride_units", "n_columns", "n_bucket"])
def split_in_two(
    scores,
    of_rows,
    of_columns,
    high,
    low,
    stride_units,
    half_stride_units,
    n_columns,
    n_bucket,
    WEIGHED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """high + low = the scores, times their factors if WEIGHED; low is what high leaves, rounded."""
    row, begin = tl.program_id(0), tl.program_id(1) * BLOCK_N
    column = begin + tl.arange(0, BLOCK_N)
    row_scores = row_pointer(scores, row, stride_units)
    row_high, row_low = row_pointer(high, row, half_stride_units), row_pointer(low, row, half_stride_units)
    of_row = 1.0
    if WEIGHED:
        of_row = tl.load(of_rows + row)
    if begin + BLOCK_N <= n_columns:
        split_tile(row_scores, of_row, of_columns, row_high, row_low, column, n_columns, WEIGHED, True)
    else:
        split_tile(row_scores, of_row, of_columns, row_high, row_low, column, n_columns, WEIGHED, False)
