"""The passes over a panel between its products, where these multiply in half precision: pure maps of one element each.

Shapes: scores [rows, n_columns] with a row stride that is a multiple of 16 elements, high and low the same in bfloat16;
of_rows [rows] and of_columns [n_columns], the factors of each.
n_bucket exists for the autotuner only: n_columns rounded up to a power of two.
"""

import triton
import triton.language as tl

from .soft_rank import row_pointer


@triton.jit
def weighed(scores, of_rows, of_columns, row, column, stride_units, n_columns):
    score = tl.load(row_pointer(scores, row, stride_units) + column, mask=column < n_columns, other=0.0)
    return score * tl.load(of_rows + row) * tl.load(of_columns + column, mask=column < n_columns, other=0.0)


@triton.jit(do_not_specialize=["stride_units", "n_columns", "n_bucket"])
def weigh(scores, of_rows, of_columns, stride_units, n_columns, n_bucket, BLOCK_N: tl.constexpr):
    """scores[row, column] *= of_rows[row] * of_columns[column], one factor after the other."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    value = weighed(scores, of_rows, of_columns, row, column, stride_units, n_columns)
    tl.store(row_pointer(scores, row, stride_units) + column, value, mask=column < n_columns)


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
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < n_columns
    if WEIGHED:
        value = weighed(scores, of_rows, of_columns, row, column, stride_units, n_columns)
    else:
        value = tl.load(row_pointer(scores, row, stride_units) + column, mask=inside, other=0.0)
    leading = value.to(tl.bfloat16)
    rest = value - leading.to(tl.float32)
    tl.store(row_pointer(high, row, half_stride_units) + column, leading, mask=inside)
    tl.store(row_pointer(low, row, half_stride_units) + column, rest.to(tl.bfloat16), mask=inside)
