"""Sums over the negatives of a query, for surrogates that are evaluated pair by pair: hinge, softplus, upper step.

Shapes and sizes as in `soft_rank.py`, whose factored sums only the sigmoid has. first .. fourth are the numbers of the
surrogate, see `pair_term`: constants, so that float64 gets all of their digits.
"""

import triton
import triton.language as tl

from .soft_rank import is_negative, row_pointer
from .surrogates import pair_term


@triton.jit(do_not_specialize=["stride_units", "n_keys", "n_bucket", "p_bucket"])
def pair_terms_forward(
    scores,
    start,
    count,
    offset,
    ranks,
    slopes,
    positives,
    stride_units,
    n_keys,
    n_bucket,
    p_bucket,
    first: tl.constexpr,
    second: tl.constexpr,
    third: tl.constexpr,
    fourth: tl.constexpr,
    SURROGATE: tl.constexpr,
    WITH_SLOPES: tl.constexpr,
    FAST_MATH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """ranks[i] = sum_j g(s_j - s_i), slopes[i] = sum_j g'(s_j - s_i) over the negatives j, positives[i] = s_i.

    One program per row and BLOCK_P positives.
    """
    row = tl.program_id(0)
    n_positives = tl.load(count + row).to(tl.int32)
    # Two axes of the grid: one has at most 65535 programs.
    begin_pairs = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * BLOCK_P
    if begin_pairs >= n_positives:
        return
    p = (begin_pairs + tl.arange(0, BLOCK_P))[:, None]
    begin = tl.load(start + row).to(tl.int32)
    row_scores = row_pointer(scores, row, stride_units)
    is_pair = p < n_positives
    positive = tl.load(row_scores + begin + p, mask=is_pair, other=0.0)
    rank = tl.zeros([BLOCK_P, BLOCK_N], dtype=scores.dtype.element_ty)
    slope = tl.zeros([BLOCK_P, BLOCK_N], dtype=scores.dtype.element_ty)
    for tile in range(0, n_keys, BLOCK_N):
        n = (tile + tl.arange(0, BLOCK_N))[None, :]
        negative = is_negative(n, begin, n_positives, n_keys)
        key = tl.load(row_scores + n, mask=negative, other=-float("inf"))
        value, derivative = pair_term(key - positive, first, second, third, fourth, SURROGATE, FAST_MATH)
        rank += value
        if WITH_SLOPES:
            slope += derivative
    pair = tl.load(offset + row) + p
    tl.store(ranks + pair, tl.sum(rank, 1, keep_dims=True), mask=is_pair)
    tl.store(positives + pair, positive, mask=is_pair)
    if WITH_SLOPES:
        tl.store(slopes + pair, tl.sum(slope, 1, keep_dims=True), mask=is_pair)


@triton.jit(do_not_specialize=["stride_units", "n_keys", "n_bucket", "p_bucket"])
def pair_terms_backward(
    scores,
    start,
    count,
    offset,
    slopes,
    positives,
    grad_ranks,
    grad_positives,
    grad_scores,
    stride_units,
    n_keys,
    n_bucket,
    p_bucket,
    first: tl.constexpr,
    second: tl.constexpr,
    third: tl.constexpr,
    fourth: tl.constexpr,
    SURROGATE: tl.constexpr,
    FAST_MATH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """grad_scores of one row: sum_i w_i g'(s_j - s_i) at a negative j, grad_positives[i] - w_i slopes[i] at i.

    One program per row and BLOCK_N keys. A pure map: every element written once.
    """
    row = tl.program_id(0)
    n_positives = tl.load(count + row).to(tl.int32)
    begin = tl.load(start + row).to(tl.int32)
    pairs = tl.load(offset + row)
    row_scores = row_pointer(scores, row, stride_units)
    row_grad = row_pointer(grad_scores, row, stride_units)
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    negative = is_negative(n, begin, n_positives, n_keys)
    key = tl.load(row_scores + n, mask=negative, other=-float("inf"))
    grad = tl.zeros([1, BLOCK_N], dtype=scores.dtype.element_ty)
    for tile in range(0, n_positives, BLOCK_P):
        p = (tile + tl.arange(0, BLOCK_P))[:, None]
        positive = tl.load(positives + pairs + p, mask=p < n_positives, other=0.0)
        weight = tl.load(grad_ranks + pairs + p, mask=p < n_positives, other=0.0)
        _, derivative = pair_term(key - positive, first, second, third, fourth, SURROGATE, FAST_MATH)
        grad += tl.sum(weight * derivative, 0, keep_dims=True)
    tl.store(row_grad + n, grad, mask=negative)
    own = n - begin
    is_own = (own >= 0) & (own < n_positives)
    weight = tl.load(grad_ranks + pairs + own, mask=is_own, other=0.0)
    slope = tl.load(slopes + pairs + own, mask=is_own, other=0.0)
    direct = tl.load(grad_positives + pairs + own, mask=is_own, other=0.0)
    tl.store(row_grad + n, direct - weight * slope, mask=is_own)
