"""The surrogates g of the step function, and their derivatives, as device functions.

Every surrogate takes `difference = (s_negative - s_positive) / temperature` and returns g and its derivative. A masked
key arrives as `-inf` and must come out as exactly `(0, 0)`; a NaN as NaN.
For the sigmoid in float32 there is a second form, of ratios e^(difference) instead of differences: `two_sigmoids` and
`two_derivatives`.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# e^-200 is 0 in float32; a difference is cut there, because `exponential` wants a finite number.
FLOOR = tl.constexpr(-200.0)
# `two_sigmoids`: the bits of 2^72, the bound of a + b. D = (1 + p)(1 + q) is between 1 and 2^142: kept times SCALE, it
# leaves room for the unit of the sums. SQUARE moves products of two keys and squares of f towards each other:
# f^2 SQUARE underflows only where p and q are below 2^-20, so that their product does not count.
RATIO_LIMIT = tl.constexpr(0x63800000)
SCALE = tl.constexpr(2.0**-30)
SQUARE = tl.constexpr(2.0**60)
# A g of 1 is 1 / (u SCALE), at most 2^108, and a register sums no more than N / 128 of them: up to 2^26 keys. Below
# the smallest f, 2^-199, p is no normal number for any key.
LEAST_U = tl.constexpr(-54.0)
LEAST_V = tl.constexpr(-84.0)
# `slope_scale`: bits of float32. The bound of a + b is 2^62 for weights of 1, and largest there.
EXPONENT = tl.constexpr(0x7F800000)
ONE = tl.constexpr(0x3F800000)
SMALLEST_SLOPE_SCALE = tl.constexpr(65 << 23)  # 2^-62
LARGEST_WEIGHT = tl.constexpr(0x4F800000)  # 2^32; over f it is still a number
SLOPE_BOUND = tl.constexpr(381 << 22)
# e^-62 < 2^-24 / 2^62: for a positive with this f, or a smaller one, 1 + p is 1.
LEAST_F = tl.constexpr(-62.0)


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
def decay_of(difference, FAST_MATH: tl.constexpr):
    """e^-|x|."""
    distance = -tl.abs(difference)
    if difference.dtype == tl.float32:
        return exponential(tl.maximum(distance, FLOOR, propagate_nan=tl.PropagateNan.ALL), FAST_MATH)
    else:
        return tl.exp2(distance * LOG2_E)


@triton.jit
def sigmoid(difference, FAST_MATH: tl.constexpr):
    # The exponent is never positive: nothing overflows, both tails keep full relative accuracy.
    decay = decay_of(difference, FAST_MATH)
    scale = reciprocal(1.0 + decay, FAST_MATH)
    tail = decay * scale
    return tl.where(difference > 0, scale, tail), tail * scale


@triton.jit
def factor(lowest, positive, FIRST: tl.constexpr, SECOND: tl.constexpr, FAST_MATH: tl.constexpr):
    """f = e^(lowest - positive) as a product of two, no less than e^FIRST and e^SECOND. A NaN stays one."""
    is_lowest = positive == lowest  # two infinities have no difference
    gap = tl.where(is_lowest, 0.0, lowest - tl.where(is_lowest, 0.0, positive))
    first = tl.maximum(gap, FIRST, propagate_nan=tl.PropagateNan.ALL)
    second = tl.maximum(gap - first, SECOND, propagate_nan=tl.PropagateNan.ALL)
    return exponential(first, FAST_MATH), exponential(second, FAST_MATH)


@triton.jit
def rank_factors(lowest, positive, FAST_MATH: tl.constexpr):
    """u and v of `two_sigmoids`, 1 / v, and u SCALE."""
    u, v = factor(lowest, positive, LEAST_U, LEAST_V, FAST_MATH)
    return u, v, reciprocal(v, FAST_MATH), u * SCALE


@triton.jit
def two_sigmoids(total, product, u, v, inverse_v, FAST_MATH: tl.constexpr):
    """Sums of g and g' over two keys with the ratios p and q, and one reciprocal: g = p/(1+p), g' = p/(1+p)^2.

    p = a f and q = b f, where a and b belong to the keys and f = u v <= 1 to the positive: total = a + b below
    RATIO_LIMIT, product = a b SCALE / SQUARE. Both results come divided by u SCALE.

    With S = a + b, Q = a b, E = 1 + Q f^2 and D = E + S f, the sums are (S + 2 Q f) / D and (S E + 4 Q f) / D^2, times
    f: no term is negative, so nothing cancels. A product that underflows is negligible beside `total`.
    """
    # E and D are kept times SCALE / v. What stands in brackets depends on the positive only.
    even = product * (u * SQUARE * (u * v)) + (SCALE * inverse_v)
    inverse = reciprocal(total * (u * SCALE) + even, FAST_MATH)
    first = total * inverse
    second = product * inverse
    value = first + second * (u * v * (2 * SQUARE / SCALE))
    derivative = (first * even + second * (u * (4 * SQUARE))) * inverse
    return value, derivative


@triton.jit
def of_all(values, REDUCE: tl.constexpr):
    """The largest or smallest of values [BLOCK_P, 1]. Axis by axis: as a whole they would be shuffled between lanes."""
    if REDUCE == "max":
        return tl.max(tl.max(values, 1), 0)
    else:
        return tl.min(tl.min(values, 1), 0)


@triton.jit
def slope_scale(positive, weight):
    """c for `two_derivatives`, a power of two, and the bits of the bound of a + b there: 1 where it cannot serve.

    With W the largest weight and w the smallest, 8 W / c^2 stays below 2^127, min(w, 1) / (c (a + b)^2 / 4)^2 a normal
    number, and so does c^2. The bits of a number, less those of 1, are its logarithm within 0.09 octaves: halved and
    quartered, they give the roots.
    """
    size = weight.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    size = tl.where(positive == positive, size, 0x7FFFFFFF)
    largest = of_all(size, "max")
    # A weight of 0 asks for nothing: less 1, it is the largest unsigned number.
    smallest = of_all((size - 1).to(tl.uint32, bitcast=True), "min")
    smallest = tl.minimum(smallest, ONE).to(tl.int32, bitcast=True)
    scale = tl.maximum(((largest >> 1) + (3 << 23)) & EXPONENT, SMALLEST_SLOPE_SCALE)
    bound = SLOPE_BOUND + (smallest >> 2) - (scale >> 1)
    return scale.to(tl.float32, bitcast=True), tl.where(largest < LARGEST_WEIGHT, bound, 1)


@triton.jit
def slope_factors(lowest, positive, weight, FAST_MATH: tl.constexpr):
    """f, 1 / f and the weight for `two_derivatives`: what f cannot hold, where 1 + p is 1, goes to the weight."""
    f, rest = factor(lowest, positive, LEAST_F, FLOOR, FAST_MATH)
    return f, reciprocal(f, FAST_MATH), weight * rest


@triton.jit
def two_derivatives(a, b, f, inverse_f, weight, c, FAST_MATH: tl.constexpr):
    """Sums over the positives of weight g' at two keys, with one reciprocal for both; divided by c^2.

    p = a f and q = b f, a and b [1, HALF] of the keys, f and weight [BLOCK_P, 1] of the positives, c of `slope_scale`.
    With S = a + b, Q = a b and r = 1 / (1 / f + S + Q f) = f / ((1 + p)(1 + q)), the sum at a is

        sum of weight p / (1 + p)^2 = a sum of weight / f (1 + q)^2 r^2,

    which needs the sums of weight r^2 / f, 2 weight r^2 and weight f r^2 only, and so does the one at b.
    """
    # What stands in brackets depends on the positives only. f c may be a subnormal number, where p q is below 2^-6.
    inverse = reciprocal(a * b * (f * c) + ((a + b) * c + (inverse_f * c)), FAST_MATH)
    square = inverse * inverse
    zeroth = tl.sum(square * (weight * inverse_f), 0, keep_dims=True)
    first = tl.sum(square * (2 * weight), 0, keep_dims=True)
    second = tl.sum(square * (weight * f), 0, keep_dims=True)
    return a * (zeroth + b * (first + b * second)), b * (zeroth + a * (first + a * second))


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


@triton.jit
def hinge(difference, margin: tl.constexpr):
    """max(x + margin, 0)."""
    x = difference + margin
    # A NaN is not below 0, and goes on.
    return tl.where(x <= 0, 0.0, x), tl.where(x > 0, 1.0, tl.where(x <= 0, 0.0, x))


@triton.jit
def softplus(difference, margin: tl.constexpr, FAST_MATH: tl.constexpr):
    """ln(1 + e^(x + margin))."""
    x = difference + margin
    decay = decay_of(x, FAST_MATH)
    one_more = 1.0 + decay
    # ln(1 + y): what 1 + y has lost of y is lost by ln(1 + y) / (1 + y - 1) in the same way.
    is_one = one_more == 1.0
    logarithm = tl.where(is_one, decay, tl.log(one_more) * (decay / tl.where(is_one, 1.0, one_more - 1.0)))
    slope, _ = sigmoid(x, FAST_MATH)
    return tl.where(x <= 0, 0.0, x) + logarithm, slope


@triton.jit
def upper_step(
    difference,
    bend: tl.constexpr,
    rise: tl.constexpr,
    jump: tl.constexpr,
    height: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    """sigmoid(x) up to 0, jump + sigmoid(x) up to `bend`, then height + rise (x - bend)."""
    value, slope = sigmoid(difference, FAST_MATH)
    value = tl.where(difference > 0, value + jump, value)
    is_line = difference > bend
    return tl.where(is_line, height + rise * (difference - bend), value), tl.where(is_line, rise, slope)


@triton.jit
def pair_term(
    difference,
    first: tl.constexpr,
    second: tl.constexpr,
    third: tl.constexpr,
    fourth: tl.constexpr,
    SURROGATE: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    """g and g' of the surrogates with numbers; those that a surrogate does not have are not read."""
    if SURROGATE == "hinge":
        return hinge(difference, first)
    elif SURROGATE == "softplus":
        return softplus(difference, first, FAST_MATH)
    else:
        tl.static_assert(SURROGATE == "upper_step", "unknown surrogate")
        return upper_step(difference, first, second, third, fourth, FAST_MATH)
