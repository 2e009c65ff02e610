"""Forward and backward of `soft_rank` on one block of the similarity matrix.

Shapes: scores [rows, n_keys] with a row stride that is a multiple of 16 elements, in units of the temperature;
start, count, offset [rows] int64: the positives of a row are the columns start .. start + count - 1, and its pairs
lie at offset .. offset + count - 1 of the flat tensors ranks, slopes, positives [M].
n_bucket and p_bucket exist for the autotuner only: N and the class size, rounded up to a power of two.
With WITH_POSITIVES the same sum over the other positives of the row, j != i, is taken as well: positive_ranks and
positive_slopes [M]. Without it, these arguments are not read.
"""

import triton
import triton.language as tl

from .surrogates import derivative_of_surrogate, scaled, scaled_difference, surrogate

ROW_STRIDE_UNIT = tl.constexpr(16)
# Columns of a tile of positives against positives: classes are far smaller than rows.
BLOCK_OWN = tl.constexpr(128)


@triton.jit
def row_pointer(matrix, row, stride_units):
    # int64 before the stride: rows * stride passes 2^31. The constant factor lets loads be vectorised for every
    # n_keys without a specialised build.
    return matrix + row.to(tl.int64) * stride_units * ROW_STRIDE_UNIT


@triton.jit
def outside(n, first, size):
    # n < first or n >= first + size in one comparison: below `first` the difference wraps round to a large number.
    return (n - first).to(tl.uint32, bitcast=True) >= size.to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["stride_units", "n_keys", "n_bucket", "p_bucket"])
def soft_rank_forward(
    scores,
    start,
    count,
    offset,
    ranks,
    slopes,
    positives,
    positive_ranks,
    positive_slopes,
    stride_units,
    n_keys,
    n_bucket,
    p_bucket,
    SURROGATE: tl.constexpr,
    WITH_SLOPES: tl.constexpr,
    WITH_POSITIVES: tl.constexpr,
    FAST_MATH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """ranks[i] = sum_j g(s_j - s_i), slopes[i] = sum_j g'(s_j - s_i) over the negatives j, positives[i] = s_i."""
    row = tl.program_id(0)
    n_positives = tl.load(count + row).to(tl.int32)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    if tl.program_id(1) * BLOCK_P >= n_positives:
        return
    first = tl.load(start + row).to(tl.int32)
    row_scores = row_pointer(scores, row, stride_units)
    positive = tl.load(row_scores + first + p, mask=p < n_positives, other=0.0)
    threshold = scaled(positive, SURROGATE)[:, None]
    rank = tl.zeros([BLOCK_P, BLOCK_N], dtype=scores.dtype.element_ty)
    slope = tl.zeros([BLOCK_P, BLOCK_N], dtype=scores.dtype.element_ty)
    # Whole tiles need no look at the end of the row.
    whole = n_keys - n_keys % BLOCK_N
    for begin in range(0, whole, BLOCK_N):
        n = (begin + tl.arange(0, BLOCK_N))[None, :]
        is_negative = outside(n, first, n_positives)
        negative = tl.load(row_scores + n, mask=is_negative, other=-float("inf"))
        difference = scaled_difference(negative, threshold, SURROGATE)
        value, derivative = surrogate(difference, SURROGATE, FAST_MATH)
        rank += value
        if WITH_SLOPES:
            slope += derivative
    if whole < n_keys:
        n = (whole + tl.arange(0, BLOCK_N))[None, :]
        is_negative = (n < n_keys) & outside(n, first, n_positives)
        negative = tl.load(row_scores + n, mask=is_negative, other=-float("inf"))
        difference = scaled_difference(negative, threshold, SURROGATE)
        value, derivative = surrogate(difference, SURROGATE, FAST_MATH)
        rank += value
        if WITH_SLOPES:
            slope += derivative
    pair = tl.load(offset + row) + p
    tl.store(ranks + pair, tl.sum(rank, 1), mask=p < n_positives)
    tl.store(positives + pair, positive, mask=p < n_positives)
    if WITH_SLOPES:
        tl.store(slopes + pair, tl.sum(slope, 1), mask=p < n_positives)
    if WITH_POSITIVES:
        rank = tl.zeros([BLOCK_P, BLOCK_OWN], dtype=scores.dtype.element_ty)
        slope = tl.zeros([BLOCK_P, BLOCK_OWN], dtype=scores.dtype.element_ty)
        for begin in range(0, n_positives, BLOCK_OWN):
            n = begin + tl.arange(0, BLOCK_OWN)
            other = tl.load(row_scores + first + n, mask=n < n_positives, other=-float("inf"))
            difference = scaled(other, SURROGATE)[None, :] - threshold
            difference = tl.where(n[None, :] == p[:, None], -float("inf"), difference)
            value, derivative = surrogate(difference, SURROGATE, FAST_MATH)
            rank += value
            if WITH_SLOPES:
                slope += derivative
        tl.store(positive_ranks + pair, tl.sum(rank, 1), mask=p < n_positives)
        if WITH_SLOPES:
            tl.store(positive_slopes + pair, tl.sum(slope, 1), mask=p < n_positives)


@triton.jit(do_not_specialize=["stride_units", "n_keys", "n_bucket", "p_bucket"])
def soft_rank_backward(
    scores,
    start,
    count,
    offset,
    slopes,
    positives,
    grad_ranks,
    grad_positives,
    positive_slopes,
    grad_positive_ranks,
    grad_scores,
    stride_units,
    n_keys,
    n_bucket,
    p_bucket,
    SURROGATE: tl.constexpr,
    WITH_POSITIVES: tl.constexpr,
    FAST_MATH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """grad_scores of one row: sum_i w_i g'(s_j - s_i) at a negative j, grad_positives[i] - w_i slopes[i] at i.

    With the ranks among the positives and their gradients u, a positive j also gets the sum over the positives i != j
    of u_i g'(s_j - s_i), less u_j positive_slopes[j].
    A pure map: no reduction across programs, every element written once.
    """
    row = tl.program_id(0)
    n_positives = tl.load(count + row).to(tl.int32)
    first = tl.load(start + row).to(tl.int32)
    pairs = tl.load(offset + row)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    negative = tl.load(row_pointer(scores, row, stride_units) + n, mask=n < n_keys, other=-float("inf"))
    negative = scaled(negative, SURROGATE)[None, :]
    grad = tl.zeros([BLOCK_P, BLOCK_N], dtype=scores.dtype.element_ty)
    for begin in range(0, n_positives, BLOCK_P):
        p = begin + tl.arange(0, BLOCK_P)
        positive = tl.load(positives + pairs + p, mask=p < n_positives, other=0.0)
        weight = tl.load(grad_ranks + pairs + p, mask=p < n_positives, other=0.0)
        derivative = derivative_of_surrogate(
            negative - scaled(positive, SURROGATE)[:, None], SURROGATE, FAST_MATH
        )
        grad += weight[:, None] * derivative
    negative_grad = tl.sum(grad, 0)
    own = n - first
    is_positive = (own >= 0) & (own < n_positives)
    weight = tl.load(grad_ranks + pairs + own, mask=is_positive, other=0.0)
    slope = tl.load(slopes + pairs + own, mask=is_positive, other=0.0)
    direct = tl.load(grad_positives + pairs + own, mask=is_positive, other=0.0)
    own_grad = direct - weight * slope
    if WITH_POSITIVES:
        weight = tl.load(grad_positive_ranks + pairs + own, mask=is_positive, other=0.0)
        slope = tl.load(positive_slopes + pairs + own, mask=is_positive, other=0.0)
        # Only the programs whose columns meet the class have a tile to add.
        block = tl.program_id(1) * BLOCK_N
        n_tiles = tl.where((block < first + n_positives) & (block + BLOCK_N > first), n_positives, 0)
        among = tl.zeros([BLOCK_P, BLOCK_N], dtype=scores.dtype.element_ty)
        for begin in range(0, n_tiles, BLOCK_P):
            p = begin + tl.arange(0, BLOCK_P)
            positive = tl.load(positives + pairs + p, mask=p < n_positives, other=0.0)
            other_weight = tl.load(grad_positive_ranks + pairs + p, mask=p < n_positives, other=0.0)
            difference = negative - scaled(positive, SURROGATE)[:, None]
            difference = tl.where(own[None, :] == p[:, None], -float("inf"), difference)
            derivative = derivative_of_surrogate(difference, SURROGATE, FAST_MATH)
            among += other_weight[:, None] * derivative
        own_grad += tl.sum(among, 0) - weight * slope
    grad_row = tl.where(is_positive, own_grad, negative_grad)
    tl.store(row_pointer(grad_scores, row, stride_units) + n, grad_row, mask=n < n_keys)
