"""The two passes of `soft_rank` on a grid that touch every score of a block.

Shapes: scores [rows, n_columns] with a row stride in elements, in units of the temperature, each within a cell of the
grid: cell c, 0 .. n_cells - 1, begins at (first_cell + c) / PER_UNIT. The place of a score in its cell is counted in
cells from the middle, -1/2 .. 1/2.
n_bucket exists for tuning only: n_columns rounded up to a power of two.
"""

import triton
import triton.language as tl


@triton.jit
def cell_and_place(score, first_cell, PER_UNIT: tl.constexpr):
    # PER_UNIT is a power of two: nothing is rounded.
    position = score * PER_UNIT
    below = tl.floor(position)
    return below.to(tl.int32) - first_cell, position - below - 0.5


@triton.jit(
    do_not_specialize=[
        "stride_scores",
        "stride_weights",
        "n_rows",
        "n_columns",
        "first_cell",
        "n_cells",
        "n_bucket",
    ]
)
def soft_rank_spread(
    scores,
    weights,
    words,
    stride_scores,
    stride_weights,
    n_rows,
    n_columns,
    first_cell,
    n_cells,
    n_bucket,
    PER_UNIT: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """words [POINTS, rows, n_cells] int64, zero before: for each cell the sums of weight place^k, k < POINTS.

    weights [rows, n_columns]: so large that their fractions do not matter, and no sum of a row overflows. The sums are
    of integers: their order, and so the run, does not matter.
    """
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    score = tl.load(scores + row.to(tl.int64) * stride_scores + n, mask=n < n_columns, other=0.0)
    weight = tl.load(weights + row.to(tl.int64) * stride_weights + n, mask=n < n_columns, other=0.0)
    cell, place = cell_and_place(score, first_cell, PER_UNIT)
    power = weight
    for k in tl.static_range(POINTS):
        plane = (k * n_rows + row).to(tl.int64) * n_cells
        tl.atomic_add(words + plane + cell, power.to(tl.int64), mask=weight != 0, sem="relaxed")
        power *= place


@triton.jit(
    do_not_specialize=[
        "stride_scores",
        "stride_values",
        "n_rows",
        "n_columns",
        "first_cell",
        "n_cells",
        "n_bucket",
    ]
)
def soft_rank_read(
    scores,
    coefficients,
    values,
    stride_scores,
    stride_values,
    n_rows,
    n_columns,
    first_cell,
    n_cells,
    n_bucket,
    PER_UNIT: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """values [rows, n_columns]: the polynomial of each score's cell at its place.

    coefficients [POINTS, rows, n_cells], that of place^k in plane k.
    """
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    within = n < n_columns
    score = tl.load(scores + row.to(tl.int64) * stride_scores + n, mask=within, other=0.0)
    cell, place = cell_and_place(score, first_cell, PER_UNIT)
    value = tl.zeros([BLOCK_N], dtype=scores.dtype.element_ty)
    for reverse in tl.static_range(POINTS):
        plane = ((POINTS - 1 - reverse) * n_rows + row).to(tl.int64) * n_cells
        value = value * place + tl.load(coefficients + plane + cell, mask=within, other=0.0)
    tl.store(values + row.to(tl.int64) * stride_values + n, value, mask=within)
