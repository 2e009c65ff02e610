"""The one place where rows meet rows: scores of a panel of queries with all keys, and the products of their gradient.

Tensor cores multiply half precision numbers exactly and add in float32. So "split" multiplies rows in half precision as
they are, and float32 rows as sums of two float16 terms; reciprocal norms are applied to the scores. That is as exact as
IEEE float32 arithmetic, which "ieee" uses, and several times faster. Where torch has no product of half precision
operands with a float32 result (on a CPU, before torch 2.8), "split" multiplies upcast operands, which is as exact.

A walk over panels makes these calls, once for each call of a loss or once for each panel:

    operand = prepare(rows, normalize=True, mode=resolve_mode(None, rows.dtype, rows.device))
    for panel:
        scores(operand, panel, operand, 1 / temperature, s)
        ...                                                 # the gradient g of s
        terms = gradient_terms(g, operand, panel, operand, scratch=s)
        add_query_gradient(terms, operand, total[panel], 1 / temperature)
        add_key_gradient(terms, operand, panel, total, 1 / temperature)
    gradient = row_gradient(total, operand)

`tritonloss.ops.sources.Products` does so for every loss.

All of it runs without autograd and is no matter of autocast, which leaves operations alone that are given their output.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tritonloss.backends import eager
from tritonloss.ops.panels import LONGEST_DOT, LONGEST_SUM_OF_ROWS
from tritonloss.ops.streaming import empty_scores
from tritonloss.types import upcast

ENVIRONMENT_VARIABLE = "TRITONLOSS_PRODUCTS"
PRODUCTS = ("auto", "ieee", "split")
# Below it a norm is replaced by it, as torch.nn.functional.normalize does.
SHORTEST = 1e-12
# Float16 terms hold a row in units of 1 / UNIT, and no entry of it reaches 2: then the lower term of an entry of 2^-11
# is still a normal float16 with all of its bits.
UNIT = 2.0**14
# Rows of a transpose that is added as it is: what its strides touch is still in the first caches.
MAX_STRIDED = 128
EXPONENT_BITS = 0x7F800000
LEAST_POWER, LARGEST_POWER = 2.0**-126, 2.0**127


def resolve_mode(requested: str | None, dtype: torch.dtype, device: torch.device) -> str:
    """The mode in which rows of `dtype` on `device` are multiplied: "ieee" or "split".

    requested: the option `products=`: "ieee", "split" or "auto"; None stands for TRITONLOSS_PRODUCTS, and "auto" where
    that is not set. "auto" is "split" on CUDA and ROCm unless `split_unusable` has a reason, and "ieee" elsewhere.

    "auto" leaves float32 rows to torch where it was asked for TF32. float64 is always "ieee", and so are all rows but
    those in bfloat16 where torch may add float16 products in float16
    (`torch.backends.cuda.matmul.allow_fp16_accumulation`).

    Raises ValueError for another name.
    """
    requested = requested_products(requested)
    if requested == "ieee" or dtype == torch.float64:
        return "ieee"
    if requested == "auto":
        if device.type != "cuda" or (dtype == torch.float32 and _asks_for_tf32()):
            return "ieee"
        if split_unusable(device) is not None:
            return "ieee"
    if dtype != torch.bfloat16 and getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False):
        return "ieee"
    return "split"


def requested_products(option: str | None) -> str:
    """The option `products=`, or TRITONLOSS_PRODUCTS if it is None, or "auto". Raises ValueError for another name."""
    source = "products"
    if option is None:
        source, option = ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE) or "auto"
    if option not in PRODUCTS:
        raise ValueError(f"{source} is {option!r}: expected one of {', '.join(PRODUCTS)}")
    return option


def _asks_for_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except (
        RuntimeError
    ):  # once a backend's own `fp32_precision` is set, torch no longer answers for all of them
        return getattr(torch.backends.cuda.matmul, "fp32_precision", None) == "tf32"


class Operand:
    """Rows [N, D] prepared for products, to be used as queries, as keys or as both.

    split: whether the mode is "split".
    left, right: [N, K], what is multiplied as a query and as a key; the product is in units of unit^-2.
    factor: [N] float32, what scores of each row are multiplied by; None for 1.
    norm: [N, 1], of at least 1e-12; None if the rows are not normalised.
    divisor: [N, 1], what the sum of gradient products is divided by in the end; None for 1.
    passes: has the passes over a panel, `weigh` and `split_in_two`: a module of `tritonloss.backends`.
    """

    __slots__ = ("_terms", "divisor", "factor", "left", "norm", "passes", "raw", "right", "split", "unit")

    def __init__(
        self,
        raw: Tensor,
        left: Tensor,
        right: Tensor,
        split: bool,
        *,
        unit: float = 1.0,
        factor: Tensor | None = None,
        norm: Tensor | None = None,
        divisor: Tensor | None = None,
        terms: tuple[Tensor, ...] = (),
    ) -> None:
        self.raw, self.left, self.right, self.split = raw, left, right, split
        self.unit, self.factor, self.norm, self.divisor = unit, factor, norm, divisor
        self._terms = terms
        self.passes: Any = eager

    @property
    def gradient_factor(self) -> Tensor | None:
        """[N], what the gradient of the scores is multiplied by before it is multiplied by rows; None for 1."""
        return None if self.norm is None else self.factor

    @property
    def terms(self) -> tuple[Tensor, ...]:
        """[N, D] each; their sum is what gradients are multiplied with. Made at the first use, which scores are not."""
        if not self._terms:
            exact = self.raw if self.norm is None or self.factor is not None else self.values()
            self._terms = _row_terms(exact)
        return self._terms

    def values(self) -> Tensor:
        """The rows [N, D] as scores see them, normalised if asked, in float32 or float64. Computed anew in "split"."""
        if not self.split:
            return self.left
        return upcast(self.raw) if self.norm is None else self.raw / self.norm


def prepare(rows: Tensor, *, normalize: bool, mode: str, passes: Any = eager) -> Operand:
    """`rows` as an operand: once for each call of a loss, for all panels.

    Both operands of a product need the same mode, and rows of the same dtype; else convert both to float32 before.

    Args:
        rows: [N, D] floating, on any device, contiguous or not. The operand keeps it, and may return it as a term.
        normalize: divide each row by its Euclidean norm, or by 1e-12 where that is larger.
        mode: of `resolve_mode`. "split" loses what is below 2^-39 of a unit row in float32.
        passes: of queries, the module whose passes over a panel "split" takes.

    Time O(N D). Memory, in bytes for each of N D entries: "ieee" 4 if normalised or half precision (8 in float64);
    "split" 8 for float32, 2 for bfloat16 if normalised, none for float16; for gradients 6, 0 and 4 more.
    """
    if mode == "ieee" or rows.shape[1] == 0:
        return _prepare_values(rows, normalize)
    operand = (_prepare_two_terms if rows.dtype == torch.float32 else _prepare_one_term)(rows, normalize)
    operand.passes = passes
    return operand


def _prepare_values(rows: Tensor, normalize: bool) -> Operand:
    values, norm = upcast(rows), None
    if normalize:
        norm = torch.linalg.vector_norm(values, dim=1, keepdim=True).clamp_min_(SHORTEST)
        values = values / norm
    return Operand(rows, values, values, False, norm=norm, divisor=norm, terms=(values,))


def _prepare_one_term(rows: Tensor, normalize: bool) -> Operand:
    """Rows in half precision as they are, but for a power of two if they are bfloat16 and normalised.

    Products of float16 always lie within float32; those of bfloat16 need not, where the quotient by the norms does.
    """
    if not normalize:
        return Operand(rows, rows, rows, True, terms=(rows,) if rows.dtype == torch.bfloat16 else ())
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float32).clamp_min_(SHORTEST)
    if rows.dtype == torch.float16:
        return Operand(rows, rows, rows, True, factor=norm.reciprocal()[:, 0], norm=norm)
    # A row whose norm overflows has norm infinity and, as with F.normalize, value 0: its factor is 0.
    size = _power_of_two(norm).clamp_max_(LARGEST_POWER)
    scaled = torch.div(rows, size, out=torch.empty_like(rows))
    return Operand(
        rows, scaled, scaled, True, factor=(size / norm)[:, 0], norm=norm, divisor=size, terms=(scaled,)
    )


def _prepare_two_terms(rows: Tensor, normalize: bool) -> Operand:
    """Float32 rows as high + low, 22 bits, with all three products of the terms in one contraction of length 3 D.

    Of queries low, high, high stand side by side, of keys high, low, high: small products first, so that they are not
    rounded to the size of the large ones.
    """
    norm = factor = None
    if normalize:
        norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min_(SHORTEST)
        scaled = rows / norm
    else:
        largest = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1, keepdim=True)
        power = _power_of_two(largest).clamp_min_(LEAST_POWER)  # infinite if an entry is no finite number
        finite = rows.clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
        scaled, factor = finite.div_(power.clamp_max(LARGEST_POWER)), power[:, 0]
    n, d = rows.shape
    blocks = torch.empty(n, 4 * d, dtype=torch.float16, device=rows.device)
    high, low = blocks[:, :d], blocks[:, d : 2 * d]
    torch.mul(scaled, UNIT, out=high)
    torch.sub(scaled.mul_(UNIT), high, out=low)
    blocks[:, 2 * d : 3 * d], blocks[:, 3 * d :] = high, high
    return Operand(
        rows, blocks[:, d:], blocks[:, : 3 * d], True, unit=UNIT, factor=factor, norm=norm, divisor=norm
    )


def _power_of_two(positive: Tensor) -> Tensor:
    """The largest power of two that is no larger; 0 for subnormal numbers, infinity for infinity and NaN."""
    return (positive.view(torch.int32) & EXPONENT_BITS).view(torch.float32)


def _row_terms(x: Tensor) -> tuple[Tensor, ...]:
    """x as a sum of bfloat16: two for float16 and three for float32, which is exact but for subnormal numbers.

    Where all rows are alike, what they have in common cancels in the gradient: two terms of float32 were not enough.
    """
    n_terms = 2 if x.dtype == torch.float16 else 3
    space = torch.empty(n_terms, *x.shape, dtype=torch.bfloat16, device=x.device)
    rest = upcast(x).clone()
    for term in space:
        term.copy_(rest)
        rest.sub_(term)
    return tuple(space.unbind())


ALL = slice(None)


def scores(
    queries: Operand, rows: slice, keys: Operand, scale: float, out: Tensor, columns: slice = ALL
) -> None:
    """out = scale * (queries[rows] @ keys[columns].T), of normalised rows where these were asked for.

    Args:
        rows, columns: the queries and the keys of the panel.
        out: [rows, columns], float32 (float64 for rows in float64), entries of a row adjacent, in "split" as
            `empty_scores` gives it; what it holds is not read.

    Time O(rows columns D), with one product in "ieee" and half precision, three for float32 rows in "split".
    """
    left, right = queries.left[rows], keys.right[columns].T
    if not queries.split:
        torch.addmm(out, left, right, beta=0, alpha=scale, out=out)
        return
    alpha = scale / (queries.unit * keys.unit)
    longest_first = left.shape[1] - max(0, queries.raw.shape[1] - LONGEST_DOT)
    _multiply_in_pieces(out, left, right, alpha, 0.0, longest_first, LONGEST_DOT)
    of_rows, of_columns = _both(queries.factor, rows, keys.factor, columns, out)
    if of_rows is not None:
        queries.passes.weigh(out, of_rows, of_columns)


def gradient_terms(
    gradient: Tensor,
    queries: Operand,
    rows: slice,
    keys: Operand,
    columns: slice = ALL,
    *,
    scratch: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The gradient of the scores of a panel as the terms that both of its products take: once for each panel.

    In "ieee" it is the gradient itself. In "split" it is a sum of two bfloat16 terms [rows, columns], which err by
    2^-17 of each entry, whatever the range of the entries.

    Args:
        gradient: [rows, columns] as `scores` takes it; it may be overwritten.
        scratch: such memory too, as that of the scores once they are no longer needed. It takes the terms, which then
            need no memory of their own.
    """
    if not queries.split:
        return (gradient,)
    if scratch is None:
        scratch = empty_scores(gradient.shape[0], gradient.shape[1], gradient)
    high, low = _halves_of(scratch).unbind()
    factors = _both(queries.gradient_factor, rows, keys.gradient_factor, columns, gradient)
    queries.passes.split_in_two(gradient, *factors, high, low)
    return high, low


def add_query_gradient(
    terms: tuple[Tensor, ...], keys: Operand, out: Tensor, scale: float = 1.0, columns: slice = ALL
) -> None:
    """out += scale * (gradient @ keys[columns]); out: [rows, D] contiguous, in the dtype that is computed in.

    terms: of `gradient_terms`. Time O(rows columns D): in "ieee" one product, else two for bfloat16 rows, four for
    float16 and five for float32.
    """
    _add_products(out, terms, tuple(term[columns] for term in keys.terms), scale)


def add_key_gradient(
    terms: tuple[Tensor, ...], queries: Operand, rows: slice, out: Tensor, scale: float = 1.0
) -> None:
    """out += scale * (gradient.T @ queries[rows]); out: [columns, D]; otherwise as `add_query_gradient`."""
    _add_products(out, tuple(term.T for term in terms), tuple(term[rows] for term in queries.terms), scale)


def symmetric_gradient(gradient: Tensor, operand: Operand, scale: float, scratch: Tensor) -> Tensor:
    """scale * (gradient + gradient.T) @ rows, [N, D], for queries that are the keys and a panel that holds them all.

    Half the work of `add_query_gradient` and `add_key_gradient`. gradient: [N, N], overwritten in "split". scratch: as
    for `gradient_terms`; it takes the sum.
    """
    if gradient.device.type == "cpu" and gradient.shape[0] <= MAX_STRIDED:
        torch.add(gradient, gradient.T, out=scratch)
    else:
        # torch copies a transpose by tiles, but adds one by strides.
        scratch.copy_(gradient.T).add_(gradient)
    (values, *_) = operand.terms
    if not operand.split:
        total = torch.empty_like(values)
        return torch.addmm(values, scratch, values, beta=0, alpha=scale, out=total)
    total = scratch.new_zeros(values.shape)
    _add_products(
        total, gradient_terms(scratch, operand, ALL, operand, scratch=gradient), operand.terms, scale
    )
    return total


def row_gradient(total: Tensor, operand: Operand, dtype: torch.dtype | None = None) -> Tensor:
    """The gradient of the rows that `prepare` was given, [N, D], from the sum of gradient products.

    The part along a normalised row is taken out, but not of rows shorter than 1e-12, which are divided by a constant.
    total: [N, D] contiguous float32 or float64; overwritten. Everything is computed in its dtype.
    dtype: that the result is rounded to, in the end; default that of the rows.
    """
    if operand.norm is not None:
        values = operand.values()
        # Along the row itself the normalised row does not change, unless its norm was replaced by a constant.
        along = total.new_empty(total.shape[0], 1, 1)
        torch.bmm(total[:, None], values[:, :, None], out=along)
        along = along[:, 0].masked_fill_(operand.norm <= SHORTEST, 0)
        total.addcmul_(values, along, value=-1)
    if operand.divisor is not None:
        total.div_(operand.divisor)
    return total.to(operand.raw.dtype if dtype is None else dtype)


def _both(
    of_rows: Tensor | None, rows: slice, of_columns: Tensor | None, columns: slice, matrix: Tensor
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The factors of the rows and of the columns of a panel, of ones where only the other side has them."""
    if of_rows is None and of_columns is None:
        return None, None
    left = matrix.new_ones(matrix.shape[0]) if of_rows is None else of_rows[rows]
    return left, matrix.new_ones(matrix.shape[1]) if of_columns is None else of_columns[columns]


def _halves_of(scratch: Tensor) -> Tensor:
    """Two bfloat16 matrices [2, rows, N] in the memory of a float32 one, in the two halves of each of its rows."""
    rows, columns = scratch.shape
    stride = scratch.stride(0)
    whole = scratch.as_strided((rows, stride), (stride, 1)).view(torch.bfloat16)
    return whole.as_strided((2, rows, columns), (stride, 2 * stride, 1))


def _add_products(out: Tensor, left: tuple[Tensor, ...], right: tuple[Tensor, ...], scale: float) -> None:
    """out += scale * sum of left @ sum of right, but for products of terms that are below 2^-18 of the whole.

    A term is 2^-9 of the one before. Small products come first: they are not rounded to the size of the large ones.
    """
    if len(left) == 1:
        out.addmm_(left[0], right[0], alpha=scale)
        return
    for order in (2, 1, 0):
        for i in range(min(order + 1, len(left))):
            if order - i < len(right):
                _multiply_in_pieces(
                    out, left[i], right[order - i], scale, 1.0, LONGEST_SUM_OF_ROWS, LONGEST_SUM_OF_ROWS
                )


def _multiply_in_pieces(
    out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float, first: int, others: int
) -> None:
    """out = beta * out + alpha * (a @ b), with sums of `first`, then `others` products."""
    support = _support(out.device)
    multiply = multiply_upcast if isinstance(support, str) else support
    length = a.shape[1]
    if length <= first:
        multiply(out, a, b, alpha, beta)
        return
    begin, end = 0, first
    while begin < length:
        multiply(out, a[:, begin:end], b[begin:end], alpha, beta)
        begin, end, beta = end, min(end + others, length), 1.0


# --- products of half precision operands: out = beta * out + alpha * (a @ b), float32; out is not read if beta = 0 ---

Multiply = Callable[[Tensor, Tensor, Tensor, float, float], None]


def multiply_upcast(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
    """By a product in the dtype of `out`, on any device and with any torch."""
    torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, alpha=alpha, out=out)


def multiply_addmm(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
    torch.ops.aten.addmm.dtype_out(out, a, b, torch.float32, beta=beta, alpha=alpha, out=out)


def multiply_baddbmm(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
    batch = out[None]
    torch.ops.aten.baddbmm.dtype_out(
        batch, a[None], b[None], torch.float32, beta=beta, alpha=alpha, out=batch
    )


def multiply_mm(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
    if beta:
        out.mul_(beta).add_(torch.mm(a, b, out_dtype=torch.float32), alpha=alpha)
    else:
        torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=out)
        out.mul_(alpha)


# Which of them a version of torch has differs: the first that is right is taken.
FORMS: tuple[Multiply, ...] = (multiply_addmm, multiply_baddbmm, multiply_mm)
DEVICES = ("cuda", "xpu")
CHECKED_LENGTH = 256
# Sums of 256 products, rounded towards zero after every four, err by at most 64 2^-23 = 7.6e-6 of the sum of absolute
# values. Float16 sums of that length err by 1e-4 and more, a float16 or bfloat16 result by 2^-12.
CHECKED_TOLERANCE = 1e-5

_supports: dict[torch.device, Multiply | str] = {}


def split_unusable(device: torch.device) -> str | None:
    """Why products of half precision operands with float32 sums are not used on `device`; None if they are.

    The first call for a CUDA, ROCm or XPU device multiplies small matrices in the forms that torch may have, and
    compares them with float64; it waits for the device. The result is kept for the process. A form that fails or errs
    is not used; if none is left, one warning says so. Within a CUDA graph capture or torch.compile nothing is checked
    or kept.
    """
    support = _support(device)
    return support if isinstance(support, str) else None


def _support(device: torch.device) -> Multiply | str:
    """The form of the product for `device`, or the reason why there is none."""
    if device in _supports:
        return _supports[device]
    if device.type not in DEVICES:
        return f"torch multiplies no half precision with float32 results on {device.type}"
    if not hasattr(torch.ops.aten.mm, "dtype_out"):
        return (
            f"torch {torch.__version__} has no half precision product with a float32 result: 2.8 is the first"
        )
    if _is_recording(device):
        return "not checked yet: the first call is within a graph capture or torch.compile"
    _supports[device] = support = check(FORMS, device)
    if isinstance(support, str):
        warnings.warn(f"tritonloss multiplies in IEEE float32 on {device}: {support}", stacklevel=2)
    return support


def _is_recording(device: torch.device) -> bool:
    if torch.compiler.is_compiling():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check(forms: tuple[Multiply, ...], device: torch.device) -> Multiply | str:
    """The first of `forms` that is right on `device`; else what is wrong with each."""
    wrong = []
    for form in forms:
        name = form.__name__.removeprefix("multiply_")
        try:
            error = max(_errors(form, device), default=0.0)
        except Exception as failure:  # whatever a device or a build of torch raises is the answer
            wrong.append(f"{name} raises {type(failure).__name__}: {str(failure).splitlines()[0]}")
        else:
            if error <= CHECKED_TOLERANCE:
                return form
            wrong.append(f"{name} errs by {error:.1e}, more than {CHECKED_TOLERANCE:.0e}")
    return "; ".join(wrong)


def _errors(multiply: Multiply, device: torch.device) -> Iterator[float]:
    """Largest error of an entry, relative to its sum of absolute values, of the products that a loss makes.

    Entries of one sign would show sums in float16, and the first row, of 2^-16, that subnormal float16 are taken for 0.
    """
    generator = torch.Generator().manual_seed(0)
    rows, keys, exact = 24, 40, torch.float64
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16):
            a, b = (
                torch.rand(n, CHECKED_LENGTH, generator=generator, device="cpu").add_(0.5)
                for n in (rows, keys)
            )
            a[0] = 2.0**-16
            a, b = a.to(dtype), b.to(dtype)
            b[1::2] *= -1
            product = a.to(exact) @ b.to(exact).T
            on_device, keys_on_device = a.to(device), b.to(device)
            out = torch.full((rows, 48), torch.nan, dtype=torch.float32, device=device)[
                :, :keys
            ]  # rows of scores are padded
            multiply(out, on_device, keys_on_device.T, 0.5, 0.0)
            yield _error(out, 0.5 * product, product)
            multiply(out, on_device, keys_on_device.T, 2.0, 1.0)
            yield _error(out, 2.5 * product, product)
            transposed = torch.zeros(keys, rows, dtype=torch.float32, device=device)
            multiply(transposed, keys_on_device, on_device.T, 1.0, 1.0)
            yield _error(transposed.T, product, product)
            # As a gradient is multiplied: the contraction runs along the rows of both.
            sums = torch.zeros(keys, rows, dtype=torch.float32, device=device)
            left, right = keys_on_device.T.contiguous(), on_device.T.contiguous()
            multiply(sums, left.T, right, 1.0, 1.0)
            yield _error(sums.T, product, product)


def _error(found: Tensor, exact: Tensor, size: Tensor) -> float:
    """Relative to `size`; infinite where a value is NaN."""
    off = (found.cpu().double() - exact).abs() / size.abs()
    return float(off.nan_to_num(nan=torch.inf).max())
