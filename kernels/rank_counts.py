"""How many keys of a row of scores are above each relevant key of the row.

Shapes: scores [rows, n_keys] with a row stride that is a multiple of 16 elements; relevant and counts [rows, width],
contiguous. Scores are compared as they are: a NaN is above nothing, and nothing is above it.
n_bucket and p_bucket exist for tuning only: n_keys and width, rounded up to a power of two.
"""

import triton
import triton.language as tl

from .soft_rank import row_pointer


@triton.jit(do_not_specialize=["stride_units", "n_keys", "width", "n_bucket", "p_bucket"])
def rank_counts(
    scores,
    relevant,
    counts,
    stride_units,
    n_keys,
    width,
    n_bucket,
    p_bucket,
    STRICT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """counts[row, p] = the number of keys with a score > relevant[row, p], or >= without STRICT; int32.

    One program per row and BLOCK_P relevant keys. Integers: their order, and so the run, does not matter.
    """
    row = tl.program_id(0)
    # The tiles take both other axes: one of them is too short for the largest classes.
    tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    p = (tile * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
    pairs = row.to(tl.int64) * width + p
    row_scores = row_pointer(scores, row, stride_units)
    bound = tl.load(relevant + pairs, mask=p < width, other=float("nan"))
    above = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.int32)
    for begin in range(0, n_keys, BLOCK_N):
        n = (begin + tl.arange(0, BLOCK_N))[None, :]
        score = tl.load(row_scores + n, mask=n < n_keys, other=float("nan"))
        if STRICT:
            above += (score > bound).to(tl.int32)
        else:
            above += (score >= bound).to(tl.int32)
    tl.store(counts + pairs, tl.sum(above, 1, keep_dims=True), mask=p < width)
