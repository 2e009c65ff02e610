"""Forward and backward of `proxy_logsumexp` on one block of logits.

Shapes: scores [rows, n_columns], a row for each proxy and a column for each embedding, with a row stride that is a
multiple of 16 elements; labels [n_columns] int32, the class of each column: a row owns the columns whose class is
first_class + row. Labels are only compared, never used as an address: any value is safe. offsets [n_columns] is added
to every exponent: alpha * margin + ln w, -inf where a column is left out.
n_bucket exists for tuning only: n_columns rounded up to a power of two.
"""

import triton
import triton.language as tl

from .soft_rank import row_pointer


@triton.jit
def log1p(x):
    # ln(1 + x) with the relative accuracy of x: the rounding error of 1 + x cancels in the quotient.
    rounded = 1.0 + x
    is_tiny = rounded == 1.0
    quotient = tl.log(rounded) / tl.where(is_tiny, 1.0, rounded - 1.0)
    return tl.where(is_tiny, x, x * quotient)


@triton.jit
def log_one_plus_sum(peak, total):
    # ln(1 + total e^peak), peak >= 0. Above 0 the peak is one of the exponents and total >= 1.
    return tl.where(peak > 0, peak + tl.log(total + tl.exp(-peak)), log1p(total))


@triton.jit
def exponents(scores, labels, offsets, own_class, column, n_columns):
    # Outside the row: label -1 of no class, exponent -inf.
    inside = column < n_columns
    is_own = tl.load(labels + column, mask=inside, other=-1) == own_class
    offset = tl.load(offsets + column, mask=inside, other=-float("inf"))
    score = tl.load(scores + column, mask=inside, other=0.0)
    return offset + tl.where(is_own, -score, score), is_own


@triton.jit(do_not_specialize=["first_class", "stride_units", "n_columns", "n_bucket"])
def proxy_logsumexp_forward(
    scores,
    labels,
    offsets,
    positive,
    negative,
    first_class,
    stride_units,
    n_columns,
    n_bucket,
    BLOCK_N: tl.constexpr,
):
    """positive[row] = ln(1 + sum of e^(offset - score) over the row's own columns), negative[row] = ln(1 + sum of
    e^(offset + score) over the others). One program per row: no partial results, no atomics.
    """
    row = tl.program_id(0)
    row_scores = row_pointer(scores, row, stride_units)
    own_class = first_class + row
    no_exponent = -float("inf")
    # The 1 of ln(1 + ...) is an exponent of 0: no peak is below it.
    own_sum = tl.zeros([BLOCK_N], dtype=scores.dtype.element_ty)
    other_sum = tl.zeros([BLOCK_N], dtype=scores.dtype.element_ty)
    own_peak = tl.max(own_sum, 0)
    other_peak = tl.max(other_sum, 0)
    for begin in range(0, n_columns, BLOCK_N):
        column = begin + tl.arange(0, BLOCK_N)
        exponent, is_own = exponents(row_scores, labels, offsets, own_class, column, n_columns)
        new_own_peak = tl.maximum(own_peak, tl.max(tl.where(is_own, exponent, no_exponent), 0))
        new_other_peak = tl.maximum(other_peak, tl.max(tl.where(is_own, no_exponent, exponent), 0))
        term = tl.exp(exponent - tl.where(is_own, new_own_peak, new_other_peak))
        own_sum = own_sum * tl.exp(own_peak - new_own_peak) + tl.where(is_own, term, 0.0)
        other_sum = other_sum * tl.exp(other_peak - new_other_peak) + tl.where(is_own, 0.0, term)
        own_peak = new_own_peak
        other_peak = new_other_peak
    tl.store(positive + row, log_one_plus_sum(own_peak, tl.sum(own_sum, 0)))
    tl.store(negative + row, log_one_plus_sum(other_peak, tl.sum(other_sum, 0)))


@triton.jit(do_not_specialize=["first_class", "stride_units", "grad_stride_units", "n_columns", "n_bucket"])
def proxy_logsumexp_backward(
    scores,
    labels,
    offsets,
    positive,
    negative,
    grad_positive,
    grad_negative,
    grad_scores,
    first_class,
    stride_units,
    grad_stride_units,
    n_columns,
    n_bucket,
    BLOCK_N: tl.constexpr,
):
    """grad_scores = -grad_positive[row] e^(offset - score - positive[row]) at the row's own columns,
    grad_negative[row] e^(offset + score - negative[row]) at the others.

    A pure map: no exponent is positive, every element is written once, grad_scores may be scores.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_scores = row_pointer(scores, row, stride_units)
    exponent, is_own = exponents(row_scores, labels, offsets, first_class + row, column, n_columns)
    total = tl.where(is_own, tl.load(positive + row), tl.load(negative + row))
    weight = tl.where(is_own, -tl.load(grad_positive + row), tl.load(grad_negative + row))
    grad = weight * tl.exp(exponent - total)
    tl.store(row_pointer(grad_scores, row, grad_stride_units) + column, grad, mask=column < n_columns)
