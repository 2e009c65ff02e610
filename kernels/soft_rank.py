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

from .surrogates import (
    RATIO_LIMIT,
    ROOT,
    SCALE,
    SLOPE_RATIO_LIMIT,
    SPREAD_LIMIT,
    exponential,
    surrogate,
    two_derivatives,
    two_sigmoids,
)

ROW_STRIDE_UNIT = tl.constexpr(16)
# Columns of a tile of positives against positives: classes are far smaller than rows.
BLOCK_OWN = tl.constexpr(128)
# The score of what is not a key of the sum: it counts as -inf, but its exponential is 0 without an infinity on the way.
ABSENT = tl.constexpr(-1e38)


@triton.jit
def row_pointer(matrix, row, stride_units):
    # int64 before the stride: rows * stride passes 2^31. The constant factor lets loads be vectorised for every
    # n_keys without a specialised build.
    return matrix + row.to(tl.int64) * stride_units * ROW_STRIDE_UNIT


@triton.jit
def load_keys(row_scores, n, HALF: tl.constexpr, first, n_positives, n_keys, edge):
    """The scores of the keys n and n + HALF. At an edge, ABSENT for those that are positives or beyond the row."""
    # Most tiles hold negatives only. Without a mask, a thread loads four keys at once.
    if edge:
        left = tl.load(row_scores + n, mask=is_negative(n, first, n_positives, n_keys), other=ABSENT)
        n += HALF
        right = tl.load(row_scores + n, mask=is_negative(n, first, n_positives, n_keys), other=ABSENT)
    else:
        left = tl.load(row_scores + n)
        right = tl.load(row_scores + n + HALF)
    return left, right


@triton.jit
def is_negative(n, first, n_positives, n_keys):
    # n < first or n >= first + n_positives in one comparison: below `first` the difference wraps round to a large
    # number.
    outside = (n - first).to(tl.uint32, bitcast=True) >= n_positives.to(tl.uint32, bitcast=True)
    return outside & (n < n_keys)


@triton.jit
def all_above(left, right, bound):
    return tl.min(((left > bound) & (right > bound)).to(tl.int32)) != 0


@triton.jit
def terms(keys, positive, SURROGATE: tl.constexpr, FAST_MATH: tl.constexpr):
    """g and g' of every (positive, key), each with an exponential and a reciprocal of its own."""
    return surrogate(tl.where(keys <= ABSENT, -float("inf"), keys) - positive, SURROGATE, FAST_MATH)


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
    HALF: tl.constexpr = BLOCK_N // 2
    FACTORED: tl.constexpr = SURROGATE == "sigmoid" and scores.dtype.element_ty == tl.float32
    row = tl.program_id(0)
    n_positives = tl.load(count + row).to(tl.int32)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    if tl.program_id(1) * BLOCK_P >= n_positives:
        return
    first = tl.load(start + row).to(tl.int32)
    row_scores = row_pointer(scores, row, stride_units)
    is_pair = p < n_positives
    positive = tl.load(row_scores + first + p, mask=is_pair, other=0.0)
    threshold = positive[:, None]
    rank = tl.zeros([BLOCK_P, HALF], dtype=scores.dtype.element_ty)
    slope = tl.zeros([BLOCK_P, HALF], dtype=scores.dtype.element_ty)
    if FACTORED:
        is_number = is_pair & (positive == positive)
        lowest = tl.min(tl.where(is_number, positive, float("inf")))
        highest = tl.max(tl.where(is_number, positive, -float("inf")))
        factor = exponential(lowest - tl.where(is_pair, positive, lowest), FAST_MATH)
        quarter = (0.25 * factor)[:, None]
        narrow = highest - lowest < SPREAD_LIMIT
        # Sums are kept in units of factor * SCALE, or of 1. A NaN stays one whatever tiles are left out.
        unit = tl.where(narrow, factor * SCALE, tl.where(positive == positive, 1.0, positive))
        lift = (1.0 / unit)[:, None]
        limit = tl.where(narrow, RATIO_LIMIT, 1)
        n_saturated = 0
    for begin in range(0, n_keys, BLOCK_N):
        edge = ((begin < first + n_positives) & (begin + BLOCK_N > first)) | (begin + BLOCK_N > n_keys)
        n = (begin + tl.arange(0, HALF))[None, :]
        left, right = load_keys(row_scores, n, HALF, first, n_positives, n_keys, edge)
        if FACTORED:
            left_ratio = exponential(left - lowest, FAST_MATH)
            right_ratio = exponential(right - lowest, FAST_MATH)
            total = left_ratio + right_ratio
            # As unsigned integers, numbers from 0 up keep their order, and every NaN is larger: one comparison tells
            # 0 < largest < limit.
            largest = tl.max(total.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
            if (largest - 1).to(tl.uint32, bitcast=True) < (limit - 1).to(tl.uint32, bitcast=True):
                product = left_ratio * (16 * SCALE) * right_ratio
                value, derivative = two_sigmoids(total, product, quarter, FAST_MATH)
                rank += value
                if WITH_SLOPES:
                    slope += derivative
            elif largest != 0:
                # e^-88 is 0 in float32, and 1 + e^-18 is 1. A NaN is above nothing.
                SATURATED: tl.constexpr = 88.0 if WITH_SLOPES else 18.0
                if all_above(left, right, highest + SATURATED) & (edge == 0):
                    n_saturated += BLOCK_N
                else:
                    value, derivative = terms(left, threshold, SURROGATE, FAST_MATH)
                    rank += value * lift
                    slope += derivative * lift
                    value, derivative = terms(right, threshold, SURROGATE, FAST_MATH)
                    rank += value * lift
                    slope += derivative * lift
        else:
            value, derivative = terms(left, threshold, SURROGATE, FAST_MATH)
            rank += value
            slope += derivative
            value, derivative = terms(right, threshold, SURROGATE, FAST_MATH)
            rank += value
            slope += derivative
    rank = tl.sum(rank, 1)
    slope = tl.sum(slope, 1)
    if FACTORED:
        rank = rank * unit + n_saturated
        slope *= unit
    pair = tl.load(offset + row) + p
    tl.store(ranks + pair, rank, mask=is_pair)
    tl.store(positives + pair, positive, mask=is_pair)
    if WITH_SLOPES:
        tl.store(slopes + pair, slope, mask=is_pair)
    if WITH_POSITIVES:
        rank = tl.zeros([BLOCK_P, BLOCK_OWN], dtype=scores.dtype.element_ty)
        slope = tl.zeros([BLOCK_P, BLOCK_OWN], dtype=scores.dtype.element_ty)
        for begin in range(0, n_positives, BLOCK_OWN):
            n = begin + tl.arange(0, BLOCK_OWN)
            keys = tl.load(row_scores + first + n, mask=n < n_positives, other=ABSENT)
            others = tl.where(n[None, :] == p[:, None], ABSENT, keys[None, :])
            value, derivative = terms(others, threshold, SURROGATE, FAST_MATH)
            rank += value
            slope += derivative
        tl.store(positive_ranks + pair, tl.sum(rank, 1), mask=is_pair)
        if WITH_SLOPES:
            tl.store(positive_slopes + pair, tl.sum(slope, 1), mask=is_pair)


@triton.jit
def own_gradient(
    own,
    keys,
    pairs,
    n_positives,
    positives,
    slopes,
    grad_ranks,
    grad_positives,
    positive_slopes,
    grad_positive_ranks,
    SURROGATE: tl.constexpr,
    WITH_POSITIVES: tl.constexpr,
    FAST_MATH: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The gradient of the positives `own` of a row, at the scores `keys`; 0 at what is not a positive."""
    is_positive = (own >= 0) & (own < n_positives)
    weight = tl.load(grad_ranks + pairs + own, mask=is_positive, other=0.0)
    slope = tl.load(slopes + pairs + own, mask=is_positive, other=0.0)
    grad = tl.load(grad_positives + pairs + own, mask=is_positive, other=0.0) - weight * slope
    if WITH_POSITIVES:
        weight = tl.load(grad_positive_ranks + pairs + own, mask=is_positive, other=0.0)
        slope = tl.load(positive_slopes + pairs + own, mask=is_positive, other=0.0)
        grad -= weight * slope
        for begin in range(0, n_positives, BLOCK_P):
            p = begin + tl.arange(0, BLOCK_P)
            positive = tl.load(positives + pairs + p, mask=p < n_positives, other=0.0)
            other_weight = tl.load(grad_positive_ranks + pairs + p, mask=p < n_positives, other=0.0)
            others = tl.where(own == p[:, None], ABSENT, keys)
            _, derivative = terms(others, positive[:, None], SURROGATE, FAST_MATH)
            grad += tl.sum(other_weight[:, None] * derivative, 0, keep_dims=True)
    return grad


@triton.jit
def weighted_derivatives(keys, positive, weight, SURROGATE: tl.constexpr, FAST_MATH: tl.constexpr):
    _, derivative = terms(keys, positive, SURROGATE, FAST_MATH)
    return tl.sum(weight * derivative, 0, keep_dims=True)


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
    HALF: tl.constexpr = BLOCK_N // 2
    FACTORED: tl.constexpr = SURROGATE == "sigmoid" and scores.dtype.element_ty == tl.float32
    row = tl.program_id(0)
    n_positives = tl.load(count + row).to(tl.int32)
    first = tl.load(start + row).to(tl.int32)
    pairs = tl.load(offset + row)
    row_scores = row_pointer(scores, row, stride_units)
    begin_keys = tl.program_id(1) * BLOCK_N
    n = (begin_keys + tl.arange(0, HALF))[None, :]
    edge = begin_keys + BLOCK_N > n_keys
    # The columns of positives are computed like the others, and replaced.
    left, right = load_keys(row_scores, n, HALF, first, 0 * n_positives, n_keys, edge)
    left_grad = tl.zeros([1, HALF], dtype=scores.dtype.element_ty)
    right_grad = tl.zeros([1, HALF], dtype=scores.dtype.element_ty)
    for begin in range(0, n_positives, BLOCK_P):
        p = (begin + tl.arange(0, BLOCK_P))[:, None]
        is_pair = p < n_positives
        positive = tl.load(positives + pairs + p, mask=is_pair, other=0.0)
        weight = tl.load(grad_ranks + pairs + p, mask=is_pair, other=0.0)
        if FACTORED:
            is_number = is_pair & (positive == positive)
            lowest = tl.min(tl.where(is_number, positive, float("inf")))
            highest = tl.max(tl.where(is_number, positive, -float("inf")))
            is_nan = (positive != positive) | (weight != weight)
            has_nan = tl.max(is_nan.to(tl.int32)) != 0
            narrow = (highest - lowest < SPREAD_LIMIT) & (has_nan == 0)
            left_ratio = exponential(left - lowest, FAST_MATH)
            right_ratio = exponential(right - lowest, FAST_MATH)
            largest = tl.max((left_ratio + right_ratio).to(tl.uint32, bitcast=True)).to(
                tl.int32, bitcast=True
            )
            limit = tl.where(narrow, SLOPE_RATIO_LIMIT, 1)
            if (largest - 1).to(tl.uint32, bitcast=True) < (limit - 1).to(tl.uint32, bitcast=True):
                factor = exponential(lowest - tl.where(is_pair, positive, lowest), FAST_MATH)
                left_sum, right_sum = two_derivatives(left_ratio, right_ratio, factor, weight, FAST_MATH)
                left_sum = left_ratio * tl.sum(left_sum, 0, keep_dims=True)
                right_sum = right_ratio * tl.sum(right_sum, 0, keep_dims=True)
                left_grad = tl.fma(left_sum, ROOT * ROOT, left_grad)
                right_grad = tl.fma(right_sum, ROOT * ROOT, right_grad)
            elif (largest != 0) | has_nan:
                if (all_above(left, right, highest + 88.0) == 0) | has_nan:
                    left_grad += weighted_derivatives(left, positive, weight, SURROGATE, FAST_MATH)
                    right_grad += weighted_derivatives(right, positive, weight, SURROGATE, FAST_MATH)
        else:
            left_grad += weighted_derivatives(left, positive, weight, SURROGATE, FAST_MATH)
            right_grad += weighted_derivatives(right, positive, weight, SURROGATE, FAST_MATH)
    if (begin_keys < first + n_positives) & (begin_keys + BLOCK_N > first):
        own = n - first
        grad = own_gradient(
            own,
            left,
            pairs,
            n_positives,
            positives,
            slopes,
            grad_ranks,
            grad_positives,
            positive_slopes,
            grad_positive_ranks,
            SURROGATE,
            WITH_POSITIVES,
            FAST_MATH,
            BLOCK_P,
        )
        left_grad = tl.where((own >= 0) & (own < n_positives), grad, left_grad)
        own += HALF
        grad = own_gradient(
            own,
            right,
            pairs,
            n_positives,
            positives,
            slopes,
            grad_ranks,
            grad_positives,
            positive_slopes,
            grad_positive_ranks,
            SURROGATE,
            WITH_POSITIVES,
            FAST_MATH,
            BLOCK_P,
        )
        right_grad = tl.where((own >= 0) & (own < n_positives), grad, right_grad)
    row_grad = row_pointer(grad_scores, row, stride_units)
    if edge:
        tl.store(row_grad + n, left_grad, mask=n < n_keys)
        tl.store(row_grad + n + HALF, right_grad, mask=n + HALF < n_keys)
    else:
        tl.store(row_grad + n, left_grad)
        tl.store(row_grad + n + HALF, right_grad)
