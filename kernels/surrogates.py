"""The surrogates g of the step function, and their derivatives, as device functions.

Every surrogate takes `difference = (s_negative - s_positive) / temperature`, times its own constant factor, and
returns g and its derivative by the difference without that factor. The factor is applied to each score once, outside
the loop over pairs. A masked key arrives as `-inf` and must come out as exactly `(0, 0)`; a NaN as NaN.
"""

import triton
import triton.language as tl


@triton.jit
def reciprocal(x, FAST_MATH: tl.constexpr):
    # The IEEE division of a float32 carries full-range guards that the hot loop does not need: its x is in [1, 2].
    if FAST_MATH:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def scaled(score, SURROGATE: tl.constexpr):
    # The sigmoid's exponential is the hardware's, of base 2: log2(e).
    if SURROGATE == "sigmoid":
        return score * 1.4426950408889634
    else:
        return score


@triton.jit
def scaled_difference(score, threshold, SURROGATE: tl.constexpr):
    """scaled(score) - threshold, for a threshold that is scaled already."""
    return scaled(score, SURROGATE) - threshold


@triton.jit
def sigmoid(difference, FAST_MATH: tl.constexpr):
    # The exponent is never positive: nothing overflows, both tails keep full relative accuracy, -inf gives 0.
    decay = tl.exp2(-tl.abs(difference))
    scale = reciprocal(1.0 + decay, FAST_MATH)
    tail = decay * scale
    return tl.where(difference > 0, scale, tail), tail * scale


@triton.jit
def sigmoid_without_select(difference):
    # Float32 on NVIDIA: one minimum instead of a comparison and a select. The reciprocal of 1 + 2^127 flushes to 0, so
    # nothing overflows and a masked key gives (0, 0).
    growth = tl.exp2(tl.minimum(-difference, 127.0, propagate_nan=tl.PropagateNan.ALL))
    value = reciprocal(1.0 + growth, True)
    return value, growth * value * value


@triton.jit
def one_side_huber(difference):
    rise = 1.0 + difference
    value = tl.where(difference > 0, rise + difference, rise * rise)
    slope = tl.where(difference > 0, 2.0, 2.0 * rise)
    outside = difference <= -1
    return tl.where(outside, 0.0, value), tl.where(outside, 0.0, slope)


@triton.jit
def surrogate(difference, SURROGATE: tl.constexpr, FAST_MATH: tl.constexpr):
    if SURROGATE == "sigmoid":
        if FAST_MATH:
            return sigmoid_without_select(difference)
        else:
            return sigmoid(difference, FAST_MATH)
    else:
        tl.static_assert(SURROGATE == "one_side_huber", "unknown surrogate")
        return one_side_huber(difference)


@triton.jit
def derivative_of_surrogate(difference, SURROGATE: tl.constexpr, FAST_MATH: tl.constexpr):
    # The derivative of the sigmoid is even: without the value, the form of -|difference| has nothing to select.
    if SURROGATE == "sigmoid":
        _, derivative = sigmoid(difference, FAST_MATH)
    else:
        _, derivative = surrogate(difference, SURROGATE, FAST_MATH)
    return derivative
