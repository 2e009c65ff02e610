"""The surrogates g of the step function, and their derivatives, as device functions.

Every surrogate takes `difference = (s_negative - s_positive) / temperature` and returns g and its derivative. A masked
key arrives as `-inf` and must come out as exactly `(0, 0)`; a NaN as NaN.
For the sigmoid in float32 there is a second form, of ratios e^(difference) instead of differences: `two_sigmoids`.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# e^-200 is 0 in float32; a difference is cut there, because `exponential` wants a finite number.
FLOOR = tl.constexpr(-200.0)
# A denominator (1 + p)(1 + q) is at least 1: scaled by this, it may use the lower half of float32's range as well.
SCALE = tl.constexpr(2.0**-40)
# The bits of 2^82, the bound of a + b in `two_sigmoids`: 16 a b SCALE, the largest number there, is at most 2^126.
RATIO_LIMIT = tl.constexpr(0x68800000)
# The same for `two_derivatives`, and 2^74: (ROOT (1 + p))^-2 times a weight above 2^-38 is a normal number.
ROOT = tl.constexpr(2.0**-30)
SLOPE_RATIO_LIMIT = tl.constexpr(0x64800000)
# The largest difference of two positives that share the ratios of their keys. The factor f of a positive is then at
# least 2^-64, and a sum over 2^23 keys, divided by f SCALE, stays below 2^127.
SPREAD_LIMIT = tl.constexpr(44.0)


@triton.jit
def reciprocal(x, FAST_MATH: tl.constexpr):
    # The IEEE division of a float32 carries full-range guards that the hot loop does not need.
    if FAST_MATH:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def power_of_two(x, FAST_MATH: tl.constexpr):
    # Without ftz the instruction is wrapped in guards that keep subnormal results.
    if FAST_MATH:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        # Ratios above RATIO_LIMIT are not used: capped, their sums do not overflow.
        return tl.exp2(tl.minimum(x, 100.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def exponential(x, FAST_MATH: tl.constexpr):
    """e^x for finite x, to a few roundings at any size; in float32 above 2^126 some number above that, or NaN.

    The exponent x log2(e) is rounded to x * 2^-24, which would be the relative error of the result: what the rounding
    dropped is multiplied back in.
    """
    exponent = x * LOG2_E
    power = power_of_two(exponent, FAST_MATH)
    return tl.fma(power, tl.fma(exponent, -LN_2, x), power)


@triton.jit
def sigmoid(difference, FAST_MATH: tl.constexpr):
    # The exponent is never positive: nothing overflows, both tails keep full relative accuracy.
    distance = -tl.abs(difference)
    if difference.dtype == tl.float32:
        decay = exponential(tl.maximum(distance, FLOOR, propagate_nan=tl.PropagateNan.ALL), FAST_MATH)
    else:
        decay = tl.exp2(distance * LOG2_E)
    scale = reciprocal(1.0 + decay, FAST_MATH)
    tail = decay * scale
    return tl.where(difference > 0, scale, tail), tail * scale


@triton.jit
def two_sigmoids(total, product, quarter, FAST_MATH: tl.constexpr):
    """Sums of g and g' over two keys with the ratios p and q, and one reciprocal: g = p/(1+p), g' = p/(1+p)^2.

    p = a f and q = b f, where a and b belong to the keys and f <= 1 to the positive: total = a + b below RATIO_LIMIT,
    product = 16 a b SCALE, quarter = f / 4. Both results come divided by f SCALE.

    With S = p + q, Q = p q and D = 1 + S + Q, the sums are (S + 2 Q) / D and (S (1 + Q) + 4 Q) / D^2: no term is
    negative, so nothing cancels. A product that underflows is negligible beside `total`.
    """
    four_product = quarter * product  # 4 Q SCALE / f
    denominator = quarter * (4 * SCALE * total + four_product) + SCALE
    inverse = reciprocal(denominator, FAST_MATH)
    first = total * inverse
    second = four_product * inverse
    value = first + second * (0.5 / SCALE)
    derivative = (first * (quarter * four_product + SCALE) + second) * inverse
    return value, derivative


@triton.jit
def two_derivatives(a, b, factor, weight, FAST_MATH: tl.constexpr):
    """weight g' at the ratios p = a factor and q = b factor, with one reciprocal; divided by a ROOT^2 and by b ROOT^2.

    a + b below SLOPE_RATIO_LIMIT. With D = ROOT (1 + p), g' = p ROOT^2 / D^2.
    """
    left = a * (factor * ROOT) + ROOT
    right = b * (factor * ROOT) + ROOT
    inverse = reciprocal(left * right, FAST_MATH)
    first = inverse * right
    second = inverse * left
    weight *= factor
    return first * weight * first, second * weight * second


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
        return sigmoid(difference, FAST_MATH)
    else:
        tl.static_assert(SURROGATE == "one_side_huber", "unknown surrogate")
        return one_side_huber(difference)
