"""The closed forms of the log-sum-exp losses, with the block functions on one full block, against the oracles."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from checks import assert_close
from torch import Tensor
from torch.nn import functional as F

from tritonloss import reference
from tritonloss.layout import class_ranges
from tritonloss.losses import logsumexp_math as forms
from tritonloss.ops.streaming import empty_scores


class Case(NamedTuple):
    """A loss: its exponents, its closed form, and its oracle as the values and which of them are averaged."""

    maps: forms.ExponentMaps
    terms: Callable[..., forms.QueryTerms]
    options: dict[str, Any]
    losses: Callable[..., tuple[Tensor, Tensor]]


def above_zero(losses: Tensor) -> tuple[Tensor, Tensor]:
    return losses, losses > 0


def every(losses: Tensor) -> tuple[Tensor, Tensor]:
    return losses, torch.ones_like(losses, dtype=torch.bool)


def info_nce(positives: str) -> Case:
    return Case(
        forms.softmax_maps(1 / 0.05),
        forms.info_nce_terms,
        {"scale": 1 / 0.05, "positives": positives},
        lambda *a, **k: reference.info_nce(*a, temperature=0.05, positives=positives, **k),
    )


CASES = {
    "nt_xent": Case(
        forms.softmax_maps(1 / 0.07),
        forms.nt_xent_terms,
        {"scale": 1 / 0.07},
        lambda *a, **k: every(reference.nt_xent(*a, temperature=0.07, **k)),
    ),
    "sup_con": Case(
        forms.softmax_maps(1 / 0.1),
        forms.sup_con_terms,
        {"scale": 1 / 0.1},
        lambda *a, **k: above_zero(reference.sup_con(*a, temperature=0.1, **k)),
    ),
    "multi_similarity": Case(
        forms.multi_similarity_maps(2, 50, 0.5),
        forms.multi_similarity_terms,
        {"alpha": 2, "beta": 50},
        lambda *a, **k: every(reference.multi_similarity(*a, alpha=2, beta=50, base=0.5, **k)),
    ),
    "circle": Case(
        forms.circle_maps(0.4, 80),
        forms.circle_terms,
        {},
        lambda *a, **k: above_zero(reference.circle(*a, m=0.4, gamma=80, **k)),
    ),
    "info_nce, mean": info_nce("mean"),
    "info_nce, sum": info_nce("sum"),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


MODULES = [importlib.import_module(f"tritonloss.backends.{name}_logsumexp") for name in ("eager", "triton")]
# The kernels have tests of their own: here, one loss for each kind of exponents and of derivatives.
CHOSEN = [
    pytest.param(module, case, id=f"{module.__name__.split('.')[-1]}-{name}")
    for module in MODULES
    for name, case in CASES.items()
    if module is MODULES[0] or name in ("sup_con", "circle")
]
on_backends = pytest.mark.parametrize(("module", "case"), CHOSEN)


def streamed(
    module: ModuleType, case: Case, queries: Tensor, keys: Tensor, ranges: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, what it is averaged over [Q], and the gradient of the similarities [Q, N], of one block."""
    s = empty_scores(len(queries), len(keys), queries)
    torch.mm(queries, keys.T, out=s)
    table = case.maps.table(s.dtype, s.device)
    positive, negative = s.new_empty(2, len(s))
    module.pair_logsumexp_forward(s, ranges, table, case.maps.kind, positive, negative)
    start, stop, hidden_start, hidden_stop = ranges[:, :, None].unbind(1)
    column = start + torch.arange(int((stop - start).max()), device=s.device)
    is_pair = (column < stop) & ~((column >= hidden_start) & (column < hidden_stop))
    scores = torch.where(is_pair, s.gather(1, column.clamp(max=len(keys) - 1)), torch.nan)
    terms = case.terms(positive, negative, scores, is_pair, **case.options)
    divisor = terms.counted.sum().clamp(min=1)
    grads = [None if g is None else g / divisor for g in terms[2:]]
    grad = empty_scores(*s.shape, s)
    module.pair_logsumexp_backward(s, ranges, table, case.maps.kind, positive, negative, *grads, grad)
    return terms.values.sum() / divisor, terms.counted, grad


class Batch(NamedTuple):
    """Unit rows sorted by class, their labels, their keys if others, and the ranges of a block of all of them."""

    queries: Tensor
    labels: Tensor
    keys: Tensor | None
    key_labels: Tensor
    ranges: Tensor


def batch(with_keys: bool, device: torch.device, seed: int = 0) -> Batch:
    """Classes of 1 to 5 rows. With keys, a class of either has none of the other."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([0, 0, 1, 1, 1, 1, 1, 2, 3, 3, 3, 4])
    key_labels = torch.tensor([0, 1, 1, 1, 2, 2, 4, 5]) if with_keys else labels

    def rows(n: int) -> Tensor:
        return F.normalize(torch.randn(n, 6, dtype=torch.float64, generator=generator), dim=1)

    start, count = class_ranges(labels, key_labels)
    row = torch.arange(len(labels))
    hidden = torch.zeros(2, len(labels), dtype=torch.int64) if with_keys else torch.stack([row, row + 1])
    ranges = torch.stack([start, start + count, *hidden], 1)
    queries, keys = rows(len(labels)), rows(len(key_labels)) if with_keys else None
    return Batch(*(None if t is None else t.to(device) for t in (queries, labels, keys, key_labels, ranges)))


def dense(case: Case, b: Batch) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The loss of the oracle, which values are averaged, and the gradients of queries and keys."""
    leaves = [t.clone().requires_grad_() for t in (b.queries, b.keys) if t is not None]
    arguments = {} if b.keys is None else {"ref_emb": leaves[1], "ref_labels": b.key_labels}
    losses, is_counted = case.losses(leaves[0], b.labels, **arguments)
    value = losses[is_counted].mean()
    return value.detach(), is_counted, list(torch.autograd.grad(value, leaves))


def row_gradients(b: Batch, grad: Tensor) -> list[Tensor]:
    """Of queries and keys before they were normalised, from that of the similarities."""
    keys = b.queries if b.keys is None else b.keys
    grads = [grad @ keys, grad.T @ b.queries]
    if b.keys is None:
        grads = [grads[0] + grads[1]]
    rows = [b.queries] if b.keys is None else [b.queries, b.keys]
    return [g - (g * r).sum(1, keepdim=True) * r for g, r in zip(grads, rows, strict=True)]


@on_backends
@pytest.mark.parametrize("with_keys", [False, True], ids=["rows", "keys"])
def test_float64(with_keys: bool, case: Case, module: ModuleType, device: torch.device) -> None:
    b = batch(with_keys, device)
    value, is_counted, grads = dense(case, b)
    keys = b.queries if b.keys is None else b.keys
    actual, counted, grad = streamed(module, case, b.queries, keys, b.ranges)
    assert counted.sum() == is_counted.sum()
    # Exponents of up to 110 err by 1e-14, and slopes of up to 150 multiply that.
    assert_close(actual, value, rtol=1e-12)
    assert_close(row_gradients(b, grad), grads, rtol=1e-12, atol=1e-12)


@on_backends
@pytest.mark.parametrize("with_keys", [False, True], ids=["rows", "keys"])
def test_float32(with_keys: bool, case: Case, module: ModuleType, device: torch.device) -> None:
    """A similarity is rounded by about eps, its exponent so by slope * eps, and each power by as much relatively."""
    b = batch(with_keys, device)
    value, is_counted, grads = dense(case, b)
    half = b._replace(queries=b.queries.float(), keys=None if b.keys is None else b.keys.float())
    keys = half.queries if half.keys is None else half.keys
    actual, counted, grad = streamed(module, case, half.queries, keys, b.ranges)
    assert counted.sum() == is_counted.sum()
    eps = torch.finfo(torch.float32).eps
    slope = max(abs(side[0]) * (1 + 2 * side[2]) for side in case.maps[1:])
    error = 2 * eps * slope
    assert_close(actual, value, rtol=error)
    for got, expected in zip(row_gradients(half, grad), grads, strict=True):
        assert (got - expected).norm() <= error * expected.norm()


def test_a_loss_far_below_the_rounding_of_its_exponents(device: torch.device) -> None:
    """A single positive far above all negatives: the loss is e^-40, counted, and its derivatives are not lost."""
    scores = torch.tensor([[0.9]], device=device)
    is_pair = torch.ones(1, 1, dtype=torch.bool, device=device)
    # A sum of the positive alone as a block would round it.
    positive, negative = torch.tensor([18.000002], device=device), torch.tensor([-22.0], device=device)
    exact = torch.exp(torch.tensor(-40.0, dtype=torch.float64))
    for terms in (
        forms.sup_con_terms(positive, negative, scores, is_pair, scale=20.0),
        forms.info_nce_terms(positive, negative, scores, is_pair, scale=20.0),
        forms.nt_xent_terms(positive, negative, scores, is_pair, scale=20.0),
    ):
        # An exponent of 18 is rounded by 1e-6.
        assert_close(terms.values, exact[None], rtol=4e-6)
        assert terms.counted.tolist() == [1]
        assert_close(terms.grad_negative, exact[None], rtol=4e-6)
        assert_close(terms.grad_positive, torch.zeros(1))
        assert terms.grad_scores is not None
        assert_close(terms.grad_scores, -20 * exact[None, None], rtol=4e-6)


EMPTY = -torch.inf


@cases
@pytest.mark.parametrize("width", [0, 2])
@pytest.mark.parametrize(("positive", "negative"), [(EMPTY, 3.0), (EMPTY, EMPTY)])
def test_a_query_without_positives(
    positive: float, negative: float, width: int, case: Case, device: torch.device
) -> None:
    scores = torch.full((1, width), torch.nan, device=device)
    is_pair = torch.zeros(1, width, dtype=torch.bool, device=device)
    totals = torch.tensor([[positive], [negative]], device=device)
    terms = case.terms(*totals, scores, is_pair, **case.options)
    if case.terms is forms.multi_similarity_terms:
        exact = 0.0 if negative == EMPTY else F.softplus(torch.tensor(negative)).item() / 50
        assert_close(terms.values, torch.tensor([exact]), rtol=1e-6)
        assert terms.counted.tolist() == [1]
    else:
        assert not terms.values.any()
        assert terms.counted.tolist() == [0]
        assert not terms.grad_negative.any()
    assert not terms.grad_positive.any()
    assert terms.grad_scores is None or not terms.grad_scores.any()


@cases
def test_a_query_without_negatives(case: Case, device: torch.device) -> None:
    """Its only positive is certain: 0, but for the attraction of MultiSimilarity."""
    scores = torch.tensor([[0.3, torch.nan]], device=device, dtype=torch.float64)
    is_pair = torch.tensor([[True, False]], device=device)
    positive = case.maps.positive[0] * scores[:, 0] + case.maps.positive[1]
    terms = case.terms(positive, torch.full_like(positive, EMPTY), scores, is_pair, **case.options)
    if case.terms is forms.multi_similarity_terms:
        assert_close(terms.values, F.softplus(positive) / 2, rtol=1e-15)
    else:
        assert not any(t.any() for t in (terms.values, *terms[2:4]))
        assert terms.grad_scores is None or not terms.grad_scores.any()
        averaged = case.terms in (forms.nt_xent_terms, forms.info_nce_terms)
        assert terms.counted.tolist() == [int(averaged)]


@cases
def test_large_exponents_neither_overflow_nor_lose_the_derivative(case: Case, device: torch.device) -> None:
    """A negative 1000 above the positive: the loss is the difference, by as much as it is weighted."""
    scores = torch.tensor([[0.5]], device=device)
    is_pair = torch.ones(1, 1, dtype=torch.bool, device=device)
    positive = torch.tensor([case.options.get("scale", 1.0) * 0.5], device=device)
    terms = case.terms(positive, positive + 1000, scores, is_pair, **case.options)
    expected = {forms.multi_similarity_terms: 1000.5 / 50, forms.circle_terms: 1001.0}.get(case.terms, 1000.0)
    slack = F.softplus(positive).item() / 2 if case.terms is forms.multi_similarity_terms else 0.0
    assert_close(terms.values, torch.tensor([expected + slack]), rtol=1e-6)
    weight = 1 / 50 if case.terms is forms.multi_similarity_terms else 1.0
    assert_close(terms.grad_negative, torch.tensor([weight]), rtol=1e-6)


def test_tables_hold_floats_and_learned_numbers(device: torch.device) -> None:
    scale = torch.tensor(14.0, requires_grad=True, device=device)
    table = forms.softmax_maps(scale).table(torch.float64, device)
    assert table.tolist() == [[14, 0, 0], [14, 0, 0]]
    assert not table.requires_grad
    table = forms.circle_maps(0.25, 64).table(torch.float32, device)
    assert table.tolist() == [[-64, 48, 0.5], [64, -16, 0.5]]
    table = forms.multi_similarity_maps(2, 50, 0.5).table(torch.float32, device)
    assert table.tolist() == [[-2, 1, 0], [50, -25, 0]]
