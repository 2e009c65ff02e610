"""Products of rows: both modes against float64, bad rows, the check of a device, and what the calls leave alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_close, assert_same
from torch import Tensor
from torch.nn import functional as F

from tritonloss.ops import products
from tritonloss.ops.streaming import empty_scores
from tritonloss.types import upcast

MODES = ["ieee", "split"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# A dot product of unit rows: norms and quotients round by 2^-24 for each of the rows, factors and sums as often again.
SCORE_ERROR = 16 * 2.0**-24
# Two bfloat16 terms of the gradient of the scores err by 2^-17 of an entry; what is left out of the products is 2^-26.
GRADIENT_ERROR = 1.1 * 2.0**-17


def some_rows(n: int, dtype: torch.dtype, device: torch.device, dimension: int = 24) -> Tensor:
    """[n, D] of lengths between 0.1 and 10."""
    length = 10 ** (2 * torch.rand(n, 1, dtype=torch.float64) - 1)
    return (F.normalize(torch.randn(n, dimension, dtype=torch.float64), dim=1) * length).to(device, dtype)


def some_gradient(rows: int, columns: int, like: Tensor) -> Tensor:
    """[rows, columns], from 1e-12 to 100 in size."""
    size = 10 ** (14 * torch.rand(rows, columns, dtype=torch.float64) - 12)
    gradient = empty_scores(rows, columns, like)
    return gradient.copy_(size * torch.randn(rows, columns, dtype=torch.float64).sign())


def prepared(rows: Tensor, normalize: bool, mode: str) -> products.Operand:
    return products.prepare(rows, normalize=normalize, mode="ieee" if rows.dtype == torch.float64 else mode)


def all_scores(queries: products.Operand, keys: products.Operand, scale: float = 1.0) -> Tensor:
    out = empty_scores(queries.raw.shape[0], keys.raw.shape[0], upcast(queries.raw[:0]))
    products.scores(queries, slice(0, out.shape[0]), keys, scale, out)
    return out


# --- the mode ---


@pytest.mark.parametrize(
    ("requested", "dtype", "expected"),
    [
        ("ieee", torch.bfloat16, "ieee"),
        ("split", torch.bfloat16, "split"),
        ("split", torch.float32, "split"),
        ("split", torch.float64, "ieee"),
        ("auto", torch.bfloat16, "ieee"),
        (None, torch.float32, "ieee"),
    ],
)
def test_mode_on_a_cpu(requested: str | None, dtype: torch.dtype, expected: str) -> None:
    assert products.resolve_mode(requested, dtype, torch.device("cpu")) == expected


def test_the_option_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setenv("TRITONLOSS_PRODUCTS", "split")
    assert products.resolve_mode(None, torch.float32, cpu) == "split"
    assert products.resolve_mode("ieee", torch.float32, cpu) == "ieee"
    assert products.resolve_mode("auto", torch.float32, cpu) == "ieee"


def test_unknown_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"^products is 'tf32': expected one of auto, ieee, split$"):
        products.resolve_mode("tf32", torch.float32, cpu)
    monkeypatch.setenv("TRITONLOSS_PRODUCTS", "IEEE")
    with pytest.raises(
        ValueError, match=r"^TRITONLOSS_PRODUCTS is 'IEEE': expected one of auto, ieee, split$"
    ):
        products.resolve_mode(None, torch.float64, cpu)


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU whose half precision products are right; nothing is computed there."""
    monkeypatch.setattr(products, "split_unusable", lambda device: None)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_auto_on_a_gpu(dtype: torch.dtype, usable: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.resolve_mode(None, dtype, usable) == "split"
    assert products.resolve_mode("ieee", dtype, usable) == "ieee"
    monkeypatch.setattr(products, "split_unusable", lambda device: "it errs")
    assert products.resolve_mode(None, dtype, usable) == "ieee"
    assert products.resolve_mode("split", dtype, usable) == "split"


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_auto_leaves_float32_rows_to_tf32(precision: str, usable: torch.device) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert products.resolve_mode("auto", torch.float32, usable) == "ieee"
        assert products.resolve_mode("split", torch.float32, usable) == "split"
        assert products.resolve_mode("auto", torch.float16, usable) == "split"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("precision", "expected"), [("tf32", "ieee"), ("ieee", "split"), ("none", "split")])
def test_the_switch_of_a_backend(
    precision: str, expected: str, usable: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it was used, torch refuses to tell the common one."""

    class Matmul:
        fp32_precision = precision

    def refuse() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch.backends.cuda, "matmul", Matmul())
    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    assert products.resolve_mode("auto", torch.float32, usable) == expected


def test_float16_sums_of_torch_are_not_for_float16_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    class Matmul:
        allow_fp16_accumulation = True

    monkeypatch.setattr(torch.backends.cuda, "matmul", Matmul())
    modes = [products.resolve_mode("split", dtype, torch.device("cpu")) for dtype in DTYPES]
    assert modes == ["ieee", "ieee", "split", "ieee"]


# --- scores ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
def test_scores(mode: str, dtype: torch.dtype, normalize: bool, device: torch.device) -> None:
    queries, keys = some_rows(9, dtype, device), some_rows(21, dtype, device)
    left, right = (prepared(rows, normalize, mode) for rows in (queries, keys))
    out = empty_scores(5, 21, upcast(queries[:0]))
    products.scores(left, slice(3, 8), right, 100.0, out)
    q, k = queries[3:8].double(), keys.double()
    size = 100 * q.norm(dim=1, keepdim=True) * k.norm(dim=1)
    exact = 100 * q @ k.T
    if normalize:
        exact, size = exact / size * 100, torch.full_like(size, 100)
    tolerance = 16 * 2.0**-53 if dtype == torch.float64 else SCORE_ERROR
    assert float(((out.double() - exact).abs() / size).max()) <= tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
def test_ieee_is_what_torch_computes(dtype: torch.dtype, normalize: bool, device: torch.device) -> None:
    rows = some_rows(7, dtype, device)
    values = F.normalize(upcast(rows), dim=1) if normalize else upcast(rows)
    operand = prepared(rows, normalize, "ieee")
    assert_same(operand.values(), values)
    assert_same(all_scores(operand, operand).contiguous(), values @ values.T)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_some_of_the_keys(mode: str, dtype: torch.dtype, device: torch.device) -> None:
    """Scores and the gradient of queries of the keys from 16 on are those of an operand of these."""
    queries, keys = some_rows(9, dtype, device), some_rows(31, dtype, device)
    left, whole, part = (prepared(rows, True, mode) for rows in (queries, keys, keys[16:]))
    rows, columns, like = slice(2, 8), slice(16, None), upcast(keys[:0])
    scores = [empty_scores(6, 15, like) for _ in range(2)]
    products.scores(left, rows, whole, 2.0, scores[0], columns)
    products.scores(left, rows, part, 2.0, scores[1])
    tolerance = 4 * torch.finfo(like.dtype).eps
    assert_close(scores[0], scores[1], atol=2 * tolerance)
    gradient = some_gradient(6, 15, like)
    totals = [torch.zeros(6, 24, dtype=like.dtype, device=device) for _ in range(2)]
    terms = products.gradient_terms(gradient.clone(), left, rows, whole, columns)
    products.add_query_gradient(terms, whole, totals[0], 1.0, columns)
    terms = products.gradient_terms(gradient.clone(), left, rows, part)
    products.add_query_gradient(terms, part, totals[1])
    assert_close(totals[0], totals[1], atol=20 * tolerance * float(totals[1].abs().max()))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_long_rows_are_multiplied_in_pieces(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def spy(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        assert (beta == 0) == (not lengths)
        lengths.append(a.shape[1])
        products.multiply_upcast(out, a, b, alpha, beta)

    monkeypatch.setattr(products, "_support", lambda device: spy)
    rows = some_rows(6, dtype, device, 1200)
    operand = prepared(rows, True, "split")
    found = all_scores(operand, operand)
    unit = F.normalize(rows.double(), dim=1)
    assert_close(found, unit @ unit.T, atol=SCORE_ERROR)
    assert lengths == [512 + (2400 if dtype == torch.float32 else 0), 512, 176]


def test_two_terms_hold_22_bits(device: torch.device) -> None:
    rows = some_rows(50, torch.float32, device)
    operand = prepared(rows, True, "split")
    d = rows.shape[1]
    low, high, again = (operand.left[:, i * d : (i + 1) * d].double() / operand.unit for i in range(3))
    assert_same(high, again)
    assert_same(operand.right[:, :d].double() / operand.unit, high)
    assert_same(operand.right[:, d : 2 * d].double() / operand.unit, low)
    unit = operand.values().double()
    off = (high + low - unit).abs()
    assert (
        float((off - unit.abs() * 2.0**-22).max()) <= 2.0**-39
    )  # or half of the smallest subnormal, in units


# --- gradients ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_products(mode: str, dtype: torch.dtype, device: torch.device) -> None:
    """Of rows that are not normalised: what is added is scale * G K and scale * G^T Q."""
    queries, keys = some_rows(9, dtype, device), some_rows(21, dtype, device)
    left, right = (prepared(rows, False, mode) for rows in (queries, keys))
    rows = slice(2, 8)
    gradient = some_gradient(6, 21, upcast(keys[:0]))
    exact = gradient.double()
    grad_queries, grad_keys = (torch.ones(n, 24, dtype=gradient.dtype, device=device) for n in (6, 21))
    scratch = empty_scores(*gradient.shape, gradient)
    terms = products.gradient_terms(gradient, left, rows, right, scratch=scratch)
    products.add_query_gradient(terms, right, grad_queries, 3.0)
    products.add_key_gradient(terms, left, rows, grad_keys, 3.0)
    q, k = queries[rows].double(), keys.double()
    for found, of, other in ((grad_queries, exact, k), (grad_keys, exact.T, q)):
        size = 3 * of.abs() @ other.abs() + 1
        tolerance = 30 * torch.finfo(gradient.dtype).eps + (GRADIENT_ERROR if mode == "split" else 0)
        assert float(((found.double() - 1 - 3 * of @ other).abs() / size).max()) <= tolerance


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("panel", [4, 14])
def test_gradient_of_rows(
    mode: str, dtype: torch.dtype, normalize: bool, panel: int, device: torch.device
) -> None:
    """The whole way, rows against themselves: against autograd in float64."""
    rows = some_rows(14, dtype, device)
    leaf = rows.double().clone().requires_grad_()
    values = F.normalize(leaf, dim=1) if normalize else leaf
    weights = torch.randn(14, 14, dtype=torch.float64, device=device)
    (exact,) = torch.autograd.grad(values @ values.T, leaf, 5.0 * weights)

    operand = prepared(rows, normalize, mode)
    total = torch.zeros_like(upcast(rows))
    for begin in range(0, 14, panel):
        part = slice(begin, min(begin + panel, 14))
        gradient = empty_scores(part.stop - begin, 14, total).copy_(weights[part])
        scratch = empty_scores(*gradient.shape, gradient)
        if panel == 14:
            total = products.symmetric_gradient(gradient, operand, 5.0, scratch)
            continue
        terms = products.gradient_terms(gradient, operand, part, operand, scratch=scratch)
        products.add_query_gradient(terms, operand, total[part], 5.0)
        products.add_key_gradient(terms, operand, part, total, 5.0)
    found = products.row_gradient(total, operand)
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    tolerance = eps if dtype.itemsize == 2 else 20 * eps + (1e-5 if mode == "split" else 0)
    off = (found.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(off.max()) <= (tolerance if dtype != torch.float64 else 20 * eps)


@pytest.mark.parametrize("columns", [1, 7, 16, 31])
@pytest.mark.parametrize("rows", [1, 5])
def test_terms_lie_in_the_scratch(rows: int, columns: int, device: torch.device) -> None:
    operand = prepared(some_rows(31, torch.bfloat16, device), False, "split")
    gradient = some_gradient(rows, columns, torch.empty(0, device=device))
    scratch = empty_scores(8, columns, gradient)[:rows]
    begin, end = scratch.data_ptr(), scratch.data_ptr() + rows * scratch.stride(0) * 4
    high, low = products.gradient_terms(gradient, operand, slice(0, rows), operand, scratch=scratch)
    assert low.data_ptr() - high.data_ptr() == 2 * scratch.stride(0)  # as aligned as the scratch
    for term in (high, low):
        assert begin <= term.data_ptr()
        assert term.data_ptr() + 2 * ((rows - 1) * term.stride(0) + columns) <= end
    assert float(((high.double() + low.double() - gradient) / gradient).abs().max()) <= 2.0**-17
    assert_same(products.gradient_terms(gradient, operand, slice(0, rows), operand), (high, low))


def test_long_sums_of_rows_are_cut(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LONGEST_SUM_OF_ROWS", 8)
    rows = some_rows(19, torch.bfloat16, device)
    operand = prepared(rows, False, "split")
    gradient = some_gradient(4, 19, torch.empty(0, device=device))
    exact, size = gradient.double() @ rows.double(), gradient.double().abs() @ rows.double().abs()
    out = torch.zeros(4, 24, device=device)
    terms = products.gradient_terms(gradient, operand, slice(0, 4), operand)
    products.add_query_gradient(terms, operand, out)
    assert float(((out.double() - exact).abs() / size).max()) <= GRADIENT_ERROR


# --- rows that are no rows of a network ---


def float32_path(rows: Tensor, normalize: bool, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and the gradient of the rows by float32 and autograd."""
    leaf = rows.float().clone().requires_grad_()
    values = F.normalize(leaf, dim=1) if normalize else leaf
    similarity = values @ values.T
    (grad,) = torch.autograd.grad(similarity, leaf, weights)
    return similarity.detach(), grad


def ours(rows: Tensor, normalize: bool, mode: str, weights: Tensor) -> tuple[Tensor, Tensor]:
    operand = prepared(rows, normalize, mode)
    similarity = all_scores(operand, operand)
    total = torch.zeros(rows.shape, device=rows.device)
    everything = slice(0, rows.shape[0])
    terms = products.gradient_terms(weights.clone(), operand, everything, operand)
    products.add_query_gradient(terms, operand, total)
    products.add_key_gradient(terms, operand, everything, total)
    return similarity.contiguous(), products.row_gradient(total, operand)


def row_scaled(factor: float) -> Callable[[Tensor], Tensor]:
    def change(rows: Tensor) -> Tensor:
        rows[3] = rows[3].double() * factor
        rows[5] = rows[5].double() * factor
        return rows

    return change


def set_entry(value: float) -> Callable[[Tensor], Tensor]:
    def change(rows: Tensor) -> Tensor:
        rows[3, 4] = value
        return rows

    return change


BAD = {
    "zeros": row_scaled(0.0),
    "infinity": set_entry(torch.inf),
    "NaN": set_entry(torch.nan),
    "length above 65504": row_scaled(3e4),
    "subnormal float16": row_scaled(2e-6),
    "subnormal float32": row_scaled(1e-40),
    "1e-20": row_scaled(1e-20),
    "1e-13": row_scaled(1e-13),
    "1e15": row_scaled(1e15),
    "1e20": row_scaled(1e20),
    "all 1e-20": lambda rows: rows.mul_(1e-20),
    "all 1e15": lambda rows: rows.mul_(1e15),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("bad", BAD)
def test_bad_rows_as_by_float32(
    bad: str, dtype: torch.dtype, normalize: bool, mode: str, device: torch.device
) -> None:
    """The same is finite and the same NaN, and all else within the errors of both, beside what underflows.

    Without a norm, sums of numbers that overflow may be infinite in one and NaN in the other: two terms have two signs.
    """
    rows = BAD[bad](some_rows(8, torch.float32, device, 20)).to(dtype)
    weights = torch.randn(8, 8, device=device)
    similarity, grad = ours(rows, normalize, mode, weights)
    exact_similarity, exact_grad = float32_path(rows, normalize, weights)
    clean = rows.double().nan_to_num(0.0, 0.0, 0.0)
    norm = clean.norm(dim=1, keepdim=True)
    values = exact_similarity.diagonal().nan_to_num(0.0).double().sqrt() if normalize else norm[:, 0]
    # Float16 terms have no bits below 2^-39 of a unit row: 20 such errors, of both rows.
    least = 2.0**-34 if normalize and mode == "split" else 2.0**-140
    assert_like(
        similarity, exact_similarity, SCORE_ERROR * values[:, None] * values + least, strict=normalize
    )
    of_values = (weights.double().abs() + weights.double().abs().T) @ values[:, None]
    divisor = norm.clamp(min=1e-12) if normalize else torch.ones_like(norm)
    rounding = torch.finfo(dtype).eps + GRADIENT_ERROR
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert_like(grad, exact_grad.to(dtype), rounding * of_values / divisor + least, strict=normalize)


def assert_like(found: Tensor, expected: Tensor, bound: Tensor, *, strict: bool) -> None:
    finite = expected.isfinite()
    assert_same(found.isfinite(), finite)
    if strict:
        assert_same(found.isnan(), expected.isnan())
    off = (found.double() - expected.double()).abs()
    assert bool((off <= bound)[finite].all()), f"{float((off / bound)[finite].max())} of the bound"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_an_infinite_entry_have_its_signs(
    mode: str, dtype: torch.dtype, device: torch.device
) -> None:
    rows = set_entry(-torch.inf)(some_rows(8, dtype, device))
    rows[2, 4] = 0
    operand = prepared(rows, False, mode)
    found = all_scores(operand, operand)[3]
    expected = -torch.inf * rows[:, 4].to(found.dtype)
    assert bool(found[2].isnan())
    assert_same(found[3:], expected[3:])
    assert_same(found[:2], expected[:2])


# --- what a call may not depend on ---


def everything(rows: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    return ours(rows, True, mode, torch.linspace(-1, 1, 144, device=rows.device).reshape(12, 12))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_autocast_and_inference_mode_change_no_bit_and_strides_nothing(
    mode: str, dtype: torch.dtype, device: torch.device
) -> None:
    rows = some_rows(12, dtype, device)
    before = rows.clone()
    expected = everything(rows, mode)
    assert_same(everything(rows, mode), expected)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert_same(everything(rows, mode), expected)
    with torch.inference_mode():
        assert_same([t.clone() for t in everything(rows, mode)], list(expected))
    strided = torch.cat([rows, rows], 1).t().contiguous().t()[:, 24:]
    assert not strided.is_contiguous()
    for found, of_contiguous in zip(everything(strided, mode), expected, strict=True):
        error = max(GRADIENT_ERROR, torch.finfo(found.dtype).eps)  # the norm adds in another order
        assert_close(found, of_contiguous, atol=error * float(of_contiguous.abs().max()))
    assert_same(rows, before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_no_rows_and_no_columns(mode: str, shape: tuple[int, int], device: torch.device) -> None:
    rows = torch.zeros(shape, device=device)
    operand = prepared(rows, False, mode)
    assert_same(all_scores(operand, operand).contiguous(), torch.zeros(shape[0], shape[0], device=device))
    total = torch.zeros(shape, device=device)
    terms = products.gradient_terms(
        torch.ones(shape[0], shape[0], device=device), operand, slice(0, shape[0]), operand
    )
    products.add_query_gradient(terms, operand, total)
    assert_same(products.row_gradient(total, operand), rows)


# --- the check of a device ---


def lossy(dtype: torch.dtype) -> products.Multiply:
    """Rounds the result to `dtype`."""

    def multiply_lossy(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        products.multiply_upcast(out, a, b, alpha, beta)
        out.copy_(out.to(dtype))

    return multiply_lossy


def multiply_in_float16_sums(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
    total = torch.zeros_like(out, dtype=torch.float16)
    for k in range(a.shape[1]):
        total += torch.outer(a[:, k], b[k]).half()
    out.copy_((0 if beta == 0 else beta * out) + alpha * total.float())


def multiply_without_subnormals(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
    flush = [x.masked_fill(x.abs() < torch.finfo(torch.float16).smallest_normal, 0) for x in (a, b)]
    products.multiply_upcast(out, *flush, alpha, beta)


def multiply_without_beta(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
    products.multiply_upcast(out, a, b, alpha, 0.0)


def multiply_what_was_there(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
    out.mul_(beta).add_(a.float() @ b.float(), alpha=alpha)  # NaN, where beta = 0 should not read


def multiply_ignoring_strides(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
    contiguous = b.T.reshape(b.shape) if b.stride(1) != 1 else b
    products.multiply_upcast(out, a, contiguous, alpha, beta)


def multiply_missing(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
    raise NotImplementedError("no such kernel\nand a long trace")


@pytest.mark.parametrize(
    "form",
    [
        lossy(torch.float16),
        lossy(torch.bfloat16),
        multiply_in_float16_sums,
        multiply_without_subnormals,
        multiply_without_beta,
        multiply_what_was_there,
        multiply_ignoring_strides,
    ],
    ids=lambda form: form.__name__,
)
def test_a_wrong_form_is_found(form: products.Multiply) -> None:
    cpu = torch.device("cpu")
    reason = products.check((form,), cpu)
    assert isinstance(reason, str)
    assert " errs by " in reason
    assert products.check((multiply_missing, form, products.multiply_upcast), cpu) is products.multiply_upcast


def product_of_halves(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.to(out_dtype) @ b.to(out_dtype)


def product_into(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(product_of_halves(a, b, out_dtype))


def sum_into(
    own: Tensor,
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor,
) -> Tensor:
    product = alpha * product_of_halves(a, b, out_dtype)
    return out.copy_(product if beta == 0 else beta * own + product)


@pytest.mark.skipif(
    not hasattr(torch.ops.aten.mm, "dtype_out"), reason="torch 2.8 is the first with such products"
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the device has its own")
@pytest.mark.parametrize("form", products.FORMS, ids=lambda form: form.__name__)
def test_the_operators_are_called_as_their_schemas_say(form: products.Multiply) -> None:
    """With kernels for the CPU, which torch lacks."""
    kernels = {"mm.dtype": product_of_halves, "mm.dtype_out": product_into}
    kernels |= {"addmm.dtype_out": sum_into, "baddbmm.dtype_out": sum_into}
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU")
        assert products.check((form,), torch.device("cpu")) is form
    finally:
        library._destroy()
    assert isinstance(products.check((form,), torch.device("cpu")), str)


def test_the_check_does_not_depend_on_the_default_dtype() -> None:
    def multiply_into_float32(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        assert out.dtype == torch.float32
        products.multiply_upcast(out, a, b, alpha, beta)

    torch.set_default_dtype(torch.float64)
    assert products.check((multiply_into_float32,), torch.device("cpu")) is multiply_into_float32


def test_a_form_that_raises_is_named() -> None:
    reason = products.check((multiply_missing, multiply_missing), torch.device("cpu"))
    assert reason == "; ".join(["missing raises NotImplementedError: no such kernel"] * 2)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, Any]:
    """The CPU stands in for a GPU that nobody has looked at."""
    supports: dict[torch.device, Any] = {}
    monkeypatch.setattr(products, "_supports", supports)
    monkeypatch.setattr(products, "DEVICES", ("cpu",))
    return supports


def test_a_failing_device_is_told_of_once(
    checked: dict[torch.device, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(products, "FORMS", (multiply_without_subnormals,))
    random = torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"multiplies in IEEE float32 on cpu: without_subnormals errs by"):
        reason = products.split_unusable(cpu)
    assert reason is not None
    monkeypatch.setattr(products, "FORMS", (products.multiply_upcast,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert products.split_unusable(cpu) is reason
    assert_same(torch.get_rng_state(), random)
    rows = some_rows(5, torch.bfloat16, cpu)  # who asks for "split" gets it by upcasting
    operand = prepared(rows, True, "split")
    unit = F.normalize(rows.double(), dim=1)
    assert_close(all_scores(operand, operand), unit @ unit.T, atol=SCORE_ERROR)


def test_the_form_of_a_device_is_used(
    checked: dict[torch.device, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[torch.dtype] = []

    def multiply_well(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        calls.append(a.dtype)
        assert a.dtype == b.dtype
        products.multiply_upcast(out, a, b, alpha, beta)

    monkeypatch.setattr(products, "FORMS", (multiply_missing, multiply_well))
    assert products.split_unusable(torch.device("cpu")) is None
    for dtype, kinds in (
        (torch.float32, [torch.float16] + 10 * [torch.bfloat16]),
        (torch.bfloat16, 5 * [torch.bfloat16]),
        (torch.float16, [torch.float16] + 8 * [torch.bfloat16]),
    ):
        calls.clear()
        everything(some_rows(12, dtype, torch.device("cpu")), "split")
        assert calls == kinds


def test_nothing_is_checked_while_a_graph_is_captured(
    checked: dict[torch.device, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "FORMS", (multiply_missing,))
    monkeypatch.setattr(products, "_is_recording", lambda device: True)
    reason = products.split_unusable(torch.device("cpu"))
    assert reason is not None
    assert reason.startswith("not checked yet")
    assert checked == {}


def test_torch_without_such_a_product(
    checked: dict[torch.device, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ops:
        class aten:
            mm = object()

    monkeypatch.setattr(torch, "ops", Ops)
    reason = products.split_unusable(torch.device("cpu"))
    assert reason is not None
    assert reason.endswith("2.8 is the first")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_some_form_is_right_on_this_device(device: torch.device) -> None:
    if hasattr(torch.ops.aten.mm, "dtype_out"):
        assert products.split_unusable(torch.device("cuda", torch.cuda.current_device())) is None
