"""Forward and backward of `soft_histogram` on one block of the similarity matrix.

Shapes: scores [rows, n_columns] with a row stride that is a multiple of 16 elements; column c is key first_column + c.
ranges [rows, 4] int64, in keys: a row's positives start .. stop - 1, and the keys that do not count for it,
hidden_start .. hidden_stop - 1; every other key is a negative.
n_bucket exists for tuning only: n_columns rounded up to a power of two.
"""

import triton
import triton.language as tl

from .soft_rank import row_pointer

# A pair adds one word to its bin: COUNT_UNIT plus its fraction in units of 1 / FRACTION_UNITS; float64 has a second
# word for the next digit. A program sees at most 2^18 pairs, so that no sum of fractions reaches COUNT_UNIT and no sum
# of words the sign.
COUNT_UNIT = tl.constexpr(1 << 44)
FRACTION_UNITS = tl.constexpr(1 << 24)
# Loads of a row start at a multiple of this many elements, so that they stay aligned and vectorised.
ALIGNMENT = tl.constexpr(16)


@triton.jit
def node_position(score, n_bins, DESCENDING: tl.constexpr):
    # In units of the bins, 0 .. n_bins; that of -1 for a NaN. Half of an integer is exact.
    half = 0.5 * n_bins
    within = tl.minimum(tl.maximum(score, -1.0), 1.0)
    return half - half * within if DESCENDING else half + half * within


@triton.jit
def load_range(ranges, row, first_column, WHICH: tl.constexpr):
    # In columns of the block; what lies outside of it is never compared with.
    start = tl.load(ranges + row * 4 + 2 * WHICH) - first_column
    stop = tl.load(ranges + row * 4 + 2 * WHICH + 1) - first_column
    return start.to(tl.int32), stop.to(tl.int32)


@triton.jit
def is_within(column, start, stop):
    return (column >= start) & (column < stop)


@triton.jit(
    do_not_specialize=[
        "stride_units",
        "n_rows",
        "n_columns",
        "first_column",
        "n_bins",
        "rows_per_program",
        "columns_per_program",
        "n_bucket",
    ]
)
def soft_histogram_forward(
    scores,
    ranges,
    words,
    stride_units,
    n_rows,
    n_columns,
    first_column,
    n_bins,
    rows_per_program,
    columns_per_program,
    n_bucket,
    DESCENDING: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """words [programs, digits, 2, n_bins + 2] int64, zero before: for each bin the number of its pairs and the sum of
    their fractions, of the positives and of the negatives; the last entry counts the NaN.

    A program has its own table. All sums are of integers: their order, and so the run, does not matter.
    """
    N_DIGITS: tl.constexpr = 2 if scores.dtype.element_ty == tl.float64 else 1
    size = n_bins + 2
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    table = words + program.to(tl.int64) * (2 * N_DIGITS * size)
    first_row = tl.program_id(0) * rows_per_program
    left = tl.program_id(1) * columns_per_program
    right = tl.minimum(left + columns_per_program, n_columns)
    for index in range(0, tl.minimum(rows_per_program, n_rows - first_row)):
        row = first_row + index
        start, stop = load_range(ranges, row, first_column, 0)
        hidden_start, hidden_stop = load_range(ranges, row, first_column, 1)
        row_scores = row_pointer(scores, row, stride_units)
        # Tiles that are hidden as a whole are skipped.
        begin = tl.where(hidden_start <= left, tl.maximum(hidden_stop // ALIGNMENT * ALIGNMENT, left), left)
        for tile in range(begin, right, BLOCK_N):
            column = tile + tl.arange(0, BLOCK_N)
            counts = (column < right) & (is_within(column, hidden_start, hidden_stop) == 0)
            score = tl.load(row_scores + column, mask=counts, other=0.0)
            position = node_position(score, n_bins, DESCENDING)
            node = position.to(tl.int32)
            rest = position - node
            slot = tl.where(score != score, n_bins + 1, node)
            slot += tl.where(is_within(column, start, stop), 0, size)
            for digit in tl.static_range(N_DIGITS):
                rest *= FRACTION_UNITS
                fraction = rest.to(tl.int32)
                rest -= fraction
                word = fraction.to(tl.int64) + COUNT_UNIT
                tl.atomic_add(table + digit * 2 * size + slot, word, mask=counts, sem="relaxed")


@triton.jit(
    do_not_specialize=[
        "stride_units",
        "grad_stride_units",
        "n_columns",
        "first_column",
        "n_bins",
        "slopes_per_row",
        "n_bucket",
    ]
)
def soft_histogram_backward(
    scores,
    ranges,
    slopes,
    grad_scores,
    stride_units,
    grad_stride_units,
    n_columns,
    first_column,
    n_bins,
    slopes_per_row,
    n_bucket,
    DESCENDING: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """grad_scores [rows, n_columns]: the slope of the bin that each pair lies in, 0 where the score is outside [-1, 1]
    and for hidden keys.

    slopes [2, n_bins], positives first, for all rows (slopes_per_row 0) or for each (2 n_bins).
    """
    row = tl.program_id(0)
    start, stop = load_range(ranges, row, first_column, 0)
    hidden_start, hidden_stop = load_range(ranges, row, first_column, 1)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < n_columns
    counts = inside & (is_within(column, hidden_start, hidden_stop) == 0)
    score = tl.load(row_pointer(scores, row, stride_units) + column, mask=counts, other=0.0)
    node = tl.minimum(node_position(score, n_bins, DESCENDING).to(tl.int32), n_bins - 1)
    node += tl.where(is_within(column, start, stop), 0, n_bins)
    table = slopes + row.to(tl.int64) * slopes_per_row
    # A NaN has no node: the interpreters up to Triton 3.6 let it pass minimum and maximum.
    slope = tl.load(table + node, mask=counts & (tl.abs(score) <= 1), other=0.0)
    tl.store(row_pointer(grad_scores, row, grad_stride_units) + column, slope, mask=inside)
