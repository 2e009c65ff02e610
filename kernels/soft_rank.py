"""Forward and backward of `soft_rank` on one block of the similarity matrix.

Shapes: scores [rows, n_keys] with a row stride that is a multiple of 16 elements, in units of the temperature;
start, count, offset [rows] int64: the positives of a row are the columns start .. start + count - 1, and its pairs
lie at offset .. offset + count - 1 of the flat tensors ranks, slopes, positives [M].
n_bucket and p_bucket exist for tuning only: N and the class size, rounded up to a power of two.
With WITH_POSITIVES the same sum over the other positives of the row, j != i, is taken as well: positive_ranks and
positive_slopes [M]. Without it, these arguments are not read.
"""

import triton
import triton.language as tl

from .surrogates import (
    RATIO_LIMIT,
    SCALE,
    SQUARE,
    exponential,
    of_all,
    rank_factors,
    slope_factors,
    slope_scale,
    surrogate,
    two_derivatives,
    two_sigmoids,
)

ROW_STRIDE_UNIT = tl.constexpr(16)
# Columns of a tile of positives against positives: classes are far smaller than rows.
BLOCK_OWN = tl.constexpr(128)
# Tiles of keys for which a backward program prepares its positives once.
TILES_PER_PROGRAM = tl.constexpr(4)
# The score of what is not a key of the sum, and of nothing else: it counts as -inf, but its exponential is 0 without an
# infinity on the way.
ABSENT = tl.constexpr(-(2.0**126))


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
def is_edge(begin, BLOCK_N: tl.constexpr, first, n_positives, n_keys):
    """Whether a tile of keys meets the class or the end of the row."""
    return ((begin < first + n_positives) & (begin + BLOCK_N > first)) | (begin + BLOCK_N > n_keys)


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
    # Two axes of the grid: one has at most 65535 programs.
    begin_pairs = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * BLOCK_P
    if begin_pairs >= n_positives:
        return
    p = begin_pairs + tl.arange(0, BLOCK_P)
    first = tl.load(start + row).to(tl.int32)
    row_scores = row_pointer(scores, row, stride_units)
    is_pair = p < n_positives
    positive = tl.load(row_scores + first + p, mask=is_pair, other=float("inf"))
    threshold = positive[:, None]
    rank = tl.zeros([BLOCK_P, HALF], dtype=scores.dtype.element_ty)
    slope = tl.zeros([BLOCK_P, HALF], dtype=scores.dtype.element_ty)
    if FACTORED:
        lowest = tl.min(tl.where(positive == positive, positive, float("inf")))
        lowest = tl.where(lowest < float("inf"), lowest, 0.0)  # none is finite
        highest = tl.max(tl.where(is_pair & (positive == positive), positive, -float("inf")))
        u, v, inverse_v, unit = rank_factors(lowest, threshold, FAST_MATH)
        lift = 1.0 / unit  # sums are kept in units of u SCALE
        n_saturated = 0
    for begin in range(0, n_keys, BLOCK_N):
        edge = is_edge(begin, BLOCK_N, first, n_positives, n_keys)
        n = (begin + tl.arange(0, HALF))[None, :]
        left, right = load_keys(row_scores, n, HALF, first, n_positives, n_keys, edge)
        if FACTORED:
            left_ratio = exponential(left - lowest, FAST_MATH)
            right_ratio = exponential(right - lowest, FAST_MATH)
            total = left_ratio + right_ratio
            # As unsigned integers, numbers from 0 up keep their order, and every NaN is larger: one comparison tells
            # 0 < largest < RATIO_LIMIT.
            largest = tl.max(total.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
            if (largest - 1).to(tl.uint32, bitcast=True) < (RATIO_LIMIT - 1):
                product = left_ratio * (SCALE / SQUARE) * right_ratio
                value, derivative = two_sigmoids(total, product, u, v, inverse_v, FAST_MATH)
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
    if FACTORED:
        # Before they are added up: a sum of a row may be too large for the unit.
        rank *= unit
        slope *= unit
    rank = tl.sum(rank, 1)
    slope = tl.sum(slope, 1)
    if FACTORED:
        rank += n_saturated
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
    """The gradient of the positives `own` [1, BLOCK_OWN] of a row."""
    is_positive = own < n_positives
    weight = tl.load(grad_ranks + pairs + own, mask=is_positive, other=0.0)
    slope = tl.load(slopes + pairs + own, mask=is_positive, other=0.0)
    grad = tl.load(grad_positives + pairs + own, mask=is_positive, other=0.0) - weight * slope
    if WITH_POSITIVES:
        weight = tl.load(grad_positive_ranks + pairs + own, mask=is_positive, other=0.0)
        slope = tl.load(positive_slopes + pairs + own, mask=is_positive, other=0.0)
        grad -= weight * slope
        keys = tl.load(positives + pairs + own, mask=is_positive, other=0.0)
        for begin in range(0, n_positives, BLOCK_P):
            p = begin + tl.arange(0, BLOCK_P)
            positive = tl.load(positives + pairs + p, mask=p < n_positives, other=0.0)
            other_weight = tl.load(grad_positive_ranks + pairs + p, mask=p < n_positives, other=0.0)
            others = tl.where(own == p[:, None], ABSENT, keys)
            _, derivative = terms(others, positive[:, None], SURROGATE, FAST_MATH)
            grad += tl.sum(other_weight[:, None] * derivative, 0, keep_dims=True)
    return grad


@triton.jit
def load_pairs(positives, grad_ranks, pairs, begin, n_positives, other, BLOCK_P: tl.constexpr):
    """Scores and weights [BLOCK_P, 1] of a row's positives from `begin` on; `other` and 0 past the last."""
    p = (begin + tl.arange(0, BLOCK_P))[:, None]
    positive = tl.load(positives + pairs + p, mask=p < n_positives, other=other)
    weight = tl.load(grad_ranks + pairs + p, mask=p < n_positives, other=0.0)
    return positive, weight


@triton.jit
def factored_pairs(
    positives, grad_ranks, pairs, begin, n_positives, FAST_MATH: tl.constexpr, BLOCK_P: tl.constexpr
):
    """What `two_derivatives` needs of the positives from `begin` on: lowest score, f, 1 / f, weight, c, limit."""
    # Past the last, an infinite score is never the lowest, and its weight is 0.
    positive, weight = load_pairs(positives, grad_ranks, pairs, begin, n_positives, float("inf"), BLOCK_P)
    c, limit = slope_scale(positive, weight)
    lowest = of_all(tl.where(positive == positive, positive, float("inf")), "min")
    lowest = tl.where(lowest < float("inf"), lowest, 0.0)  # none is finite
    f, inverse_f, weight = slope_factors(lowest, positive, weight, FAST_MATH)
    return lowest, f, inverse_f, weight, c, limit


@triton.jit
def direct_gradient(
    left,
    right,
    positives,
    grad_ranks,
    pairs,
    begin,
    n_positives,
    SURROGATE: tl.constexpr,
    FAST_MATH: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Sums over the positives from `begin` on of weight g', term by term."""
    positive, weight = load_pairs(positives, grad_ranks, pairs, begin, n_positives, 0.0, BLOCK_P)
    _, left_slope = terms(left, positive, SURROGATE, FAST_MATH)
    _, right_slope = terms(right, positive, SURROGATE, FAST_MATH)
    left_grad = tl.sum(weight * left_slope, 0, keep_dims=True)
    right_grad = tl.sum(weight * right_slope, 0, keep_dims=True)
    return left_grad, right_grad


@triton.jit
def factored_gradient(
    left,
    right,
    lowest,
    f,
    inverse_f,
    weight,
    c,
    limit,
    positives,
    grad_ranks,
    pairs,
    begin,
    n_positives,
    SURROGATE: tl.constexpr,
    FAST_MATH: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The same with the ratios of `factored_pairs` where they have the range."""
    left_ratio = exponential(left - lowest, FAST_MATH)
    right_ratio = exponential(right - lowest, FAST_MATH)
    largest = tl.max((left_ratio + right_ratio).to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
    left_grad = tl.zeros_like(left)
    right_grad = tl.zeros_like(right)
    # 0 < largest < limit, as in the forward kernel.
    if (largest - 1).to(tl.uint32, bitcast=True) < (limit - 1).to(tl.uint32, bitcast=True):
        left_grad, right_grad = two_derivatives(left_ratio, right_ratio, f, inverse_f, weight, c, FAST_MATH)
        left_grad *= c * c
        right_grad *= c * c
    elif ((largest != 0) | (limit == 1)) & (begin < n_positives):
        left_grad, right_grad = direct_gradient(
            left,
            right,
            positives,
            grad_ranks,
            pairs,
            begin,
            n_positives,
            SURROGATE,
            FAST_MATH,
            BLOCK_P,
        )
    return left_grad, right_grad


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
    ONE_TILE: tl.constexpr,
    FAST_MATH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """grad_scores of one row: sum_i w_i g'(s_j - s_i) at a negative j, grad_positives[i] - w_i slopes[i] at i.

    With the ranks among the positives and their gradients u, a positive j also gets the sum over the positives i != j
    of u_i g'(s_j - s_i), less u_j positive_slopes[j].
    With ONE_TILE no row has more than BLOCK_P positives. A program takes TILES_PER_PROGRAM tiles of keys.
    A pure map: no reduction across programs, every element written once.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    FACTORED: tl.constexpr = SURROGATE == "sigmoid" and scores.dtype.element_ty == tl.float32
    row = tl.program_id(0)
    n_positives = tl.load(count + row).to(tl.int32)
    first = tl.load(start + row).to(tl.int32)
    pairs = tl.load(offset + row)
    row_scores = row_pointer(scores, row, stride_units)
    row_grad = row_pointer(grad_scores, row, stride_units)
    for begin in range(tl.program_id(1) * BLOCK_OWN, n_positives, tl.num_programs(1) * BLOCK_OWN):
        own = (begin + tl.arange(0, BLOCK_OWN))[None, :]
        grad = own_gradient(
            own,
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
        tl.store(row_grad + first + own, grad, mask=own < n_positives)
    if FACTORED and ONE_TILE:
        # Once for all tiles of keys.
        lowest, f, inverse_f, weight, c, limit = factored_pairs(
            positives, grad_ranks, pairs, 0, n_positives, FAST_MATH, BLOCK_P
        )
    begin_program = tl.program_id(1) * (TILES_PER_PROGRAM * BLOCK_N)
    for begin_keys in range(
        begin_program, tl.minimum(begin_program + TILES_PER_PROGRAM * BLOCK_N, n_keys), BLOCK_N
    ):
        n = (begin_keys + tl.arange(0, HALF))[None, :]
        edge = is_edge(begin_keys, BLOCK_N, first, n_positives, n_keys)
        left, right = load_keys(row_scores, n, HALF, first, n_positives, n_keys, edge)
        if FACTORED and ONE_TILE:
            left_grad, right_grad = factored_gradient(
                left,
                right,
                lowest,
                f,
                inverse_f,
                weight,
                c,
                limit,
                positives,
                grad_ranks,
                pairs,
                0,
                n_positives,
                SURROGATE,
                FAST_MATH,
                BLOCK_P,
            )
        else:
            left_grad = tl.zeros_like(left)
            right_grad = tl.zeros_like(right)
            for begin in range(0, n_positives, BLOCK_P):
                if FACTORED:
                    lowest, f, inverse_f, weight, c, limit = factored_pairs(
                        positives, grad_ranks, pairs, begin, n_positives, FAST_MATH, BLOCK_P
                    )
                    more_left, more_right = factored_gradient(
                        left,
                        right,
                        lowest,
                        f,
                        inverse_f,
                        weight,
                        c,
                        limit,
                        positives,
                        grad_ranks,
                        pairs,
                        begin,
                        n_positives,
                        SURROGATE,
                        FAST_MATH,
                        BLOCK_P,
                    )
                else:
                    more_left, more_right = direct_gradient(
                        left,
                        right,
                        positives,
                        grad_ranks,
                        pairs,
                        begin,
                        n_positives,
                        SURROGATE,
                        FAST_MATH,
                        BLOCK_P,
                    )
                left_grad += more_left
                right_grad += more_right
        if edge:
            # By what was loaded: the comparisons of load_keys, made again, are made before it and for every tile.
            tl.store(row_grad + n, left_grad, mask=left != ABSENT)
            tl.store(row_grad + n + HALF, right_grad, mask=right != ABSENT)
        else:
            tl.store(row_grad + n, left_grad)
            tl.store(row_grad + n + HALF, right_grad)
