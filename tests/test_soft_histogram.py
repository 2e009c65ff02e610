"""The primitive `soft_histogram` against brute force: values, gradients, which pairs count, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from checks import assert_close, assert_same
from torch import Tensor
from torch.nn import functional as F

from tritonloss.backends import backend_module
from tritonloss.layout import ClassLayout
from tritonloss.ops import running_sum, soft_histogram
from tritonloss.ops.soft_histogram import Tables

# --- brute force ---


class Problem(NamedTuple):
    queries: Tensor
    keys: Tensor
    start: Tensor
    count: Tensor
    position: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Problem:
        """Leaves of their own, in this dtype."""
        queries, keys = (t.detach().to(dtype, copy=True).requires_grad_() for t in (self.queries, self.keys))
        return self._replace(queries=queries, keys=keys)


def brute_force(
    problem: Problem, bins: int, *, per_query: bool = False, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """Every node's triangle over every pair."""
    queries, keys, start, count, position = problem
    place = (queries @ keys.T).clamp(-1, 1)
    place = (1 - place) * bins / 2 if descending else (1 + place) * bins / 2
    masses = (1 - (place[..., None] - torch.arange(bins + 1, device=place.device)).abs()).clamp(min=0)
    own = (torch.arange(len(queries), device=place.device) if position is None else position)[:, None]
    key = torch.arange(len(keys), device=place.device)
    counts = ((key != own) if per_query else (key > own)) & (count > 0)[:, None]
    is_positive = (key >= start[:, None]) & (key < (start + count)[:, None])
    positives, negatives = (
        (masses * kind[..., None]).sum(1) for kind in (counts & is_positive, counts & ~is_positive)
    )
    return (positives, negatives) if per_query else (positives.sum(0), negatives.sum(0))


def unit(rows: int, dim: int, device: torch.device) -> Tensor:
    return F.normalize(torch.randn(rows, dim, dtype=torch.float64)).to(device)


def self_compared(sizes: list[int], dim: int, device: torch.device) -> Problem:
    layout = ClassLayout.from_labels(torch.repeat_interleave(torch.tensor(sizes)))
    rows = unit(sum(sizes), dim, device)
    return Problem(rows, rows, layout.start.to(device), layout.query_count.to(device))


def separate(n_keys: int, *queries: tuple[int, int, int], device: torch.device) -> Problem:
    """(start, count, position) of each query."""
    start, count, position = torch.tensor(queries, device=device).unbind(1)
    return Problem(
        unit(len(queries), 4, device), unit(n_keys, 4, device), start.clone(), count.clone(), position.clone()
    )


PROBLEMS: dict[str, Callable[[torch.device], Problem]] = {
    "classes of many sizes": lambda device: self_compared([3, 1, 4, 2, 1, 5], 4, device),
    "some of the keys": lambda device: separate(9, (0, 3, 2), (3, 4, 6), (7, 2, 7), device=device),
    "none of the keys": lambda device: separate(9, (0, 3, -1), (8, 1, -1), (4, 0, -1), device=device),
    "one class": lambda device: self_compared([6], 3, device),
    "lone rows": lambda device: self_compared([1, 1, 1], 3, device),
}
problems = pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS.keys())
modes = pytest.mark.parametrize(
    "mode",
    [{}, {"per_query": True}, {"descending": True}, {"per_query": True, "descending": True}],
    ids=["batch", "per query", "batch, down", "per query, down"],
)


def evaluate(problem: Problem, histograms: Callable[..., Any], bins: int, **options: Any) -> list[Tensor]:
    """Both histograms and the gradients of queries and keys, for fixed random weights of the nodes."""
    positives, negatives = histograms(
        *((problem, bins) if histograms is brute_force else (*problem[:4], bins)), **options
    )
    generator = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in (positives, negatives)
    ]
    torch.autograd.backward([positives, negatives], weights)
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in problem[:2]]
    return [positives.detach(), negatives.detach(), *grads]


def tolerance(problem: Problem, bins: int, dtype: torch.dtype) -> float:
    """A similarity of unit rows is off by D + 1 roundings, its place by bins / 2 of these and one of its own size, and
    every node collects from all pairs; a gradient sums as many slopes, of size bins / 2. Factor 4 for the weights.
    """
    n_pairs, dim = problem.queries.shape[0] * problem.keys.shape[0], problem.keys.shape[1]
    return 4 * n_pairs * bins * (dim + 3) * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("backend", "bins", "dtype"),
    [
        *(("eager", bins, dtype) for bins in (1, 7, 100) for dtype in (torch.float64, torch.float32)),
        ("triton", 1, torch.float64),
        ("triton", 7, torch.float32),
        ("triton", 100, torch.float64),
    ],
    indirect=["backend"],
)
@modes
@problems
def test_equals_brute_force(
    make: Callable[..., Problem],
    mode: dict[str, bool],
    bins: int,
    dtype: torch.dtype,
    backend: str,
    device: torch.device,
) -> None:
    problem = make(device).to(dtype)
    exact = evaluate(problem.to(torch.float64), brute_force, bins, **mode)
    actual = evaluate(problem, soft_histogram, bins, position=problem.position, **mode)
    assert actual[0].dtype == torch.float64
    assert actual[2].dtype == dtype
    for a, e in zip(actual, exact, strict=True):
        assert_close(a, e, atol=tolerance(problem, bins, dtype))


@modes
def test_blocks_do_not_matter(mode: dict[str, bool], backend: str, device: torch.device) -> None:
    """A block of the whole matrix, and blocks of 3 rows, over edges of 16 keys."""
    problem = self_compared([30, 1, 4, 1, 20], 4, device)
    row_bytes = problem.keys.shape[0] * 8
    whole, blocks = (
        evaluate(problem.to(torch.float64), soft_histogram, 10, memory_budget=budget, **mode)
        for budget in (1 << 20, 3 * row_bytes)
    )
    for a, b in zip(whole, blocks, strict=True):
        assert_close(a, b, atol=tolerance(problem, 10, torch.float64))


def test_pairs_are_counted_exactly(backend: str, device: torch.device) -> None:
    problem = self_compared([5, 1, 4, 1], 3, device).to(torch.float32)
    positives, negatives = soft_histogram(*problem[:4], 13)
    # 10 + 6 positive pairs. Behind the rows of the first class lie 10 + 9 + 8 + 7 + 6 keys, behind those of the second
    # 4 + 3 + 2 + 1; the lone rows are no queries.
    assert (positives.sum(), negatives.sum()) == (16, 40 + 10 - 16)


def test_lone_rows_last_makes_every_triplet_count(backend: str, device: torch.device) -> None:
    layout = ClassLayout.from_labels(torch.tensor([7, 3, 3, 9, 0, 0, 0])).lone_rows_last()
    assert layout.order.tolist() == [4, 5, 6, 1, 2, 0, 3]
    assert layout.start.tolist() == [0, 0, 0, 3, 3, 5, 6]
    assert layout.count.tolist() == [3, 3, 3, 2, 2, 1, 1]
    rows = unit(7, 3, device)
    positives, negatives = soft_histogram(
        rows, rows, layout.start.to(device), layout.query_count.to(device), 4
    )
    assert (positives.sum(), negatives.sum()) == (3 + 1, 3 * 2 + 5 * 2)


def test_similarities_outside_the_range(backend: str, device: torch.device) -> None:
    """They count as the nearer end and have no gradient; at the ends themselves the gradient passes."""
    queries = torch.tensor([[1.0]], device=device, requires_grad=True)
    keys = torch.tensor([[1.5], [1.0], [0.3], [-1.0], [-7.0]], device=device, requires_grad=True)
    start, count = torch.tensor([0], device=device), torch.tensor([5], device=device)
    positives, negatives = soft_histogram(queries, keys, start, count, 4, position=start - 1)
    assert_close(positives, torch.tensor([2, 0, 0.4, 0.6, 2.0]), atol=1e-6)  # 0.3 in float32
    assert negatives.sum() == 0
    positives[1:].sum().backward()
    assert_same(keys.grad, torch.tensor([[0.0], [0.0], [0.0], [2.0], [0.0]], device=device))


def test_gradient_at_a_node_is_that_of_the_bin_above(backend: str, device: torch.device) -> None:
    keys = torch.tensor([[-0.5], [0.0], [1.0]], device=device, requires_grad=True)
    start, count = torch.tensor([0], device=device), torch.tensor([3], device=device)
    one = torch.ones(1, 1, device=device)
    for descending, expected in ((False, [20.0, 200.0, 2000.0]), (True, [-2000.0, -200.0, -2.0])):
        keys.grad = None
        histograms = soft_histogram(one, keys, start, count, 4, position=start - 1, descending=descending)
        # Slopes 2 (w[r + 1] - w[r]) of the four bins: 2, 20, 200, 2000.
        weights = torch.tensor([0.0, 1, 11, 111, 1111], dtype=torch.float64, device=device)
        (histograms.positives * weights).sum().backward()
        assert keys.grad is not None
        assert keys.grad.flatten().tolist() == expected


@pytest.mark.parametrize("per_query", [False, True])
def test_nan_reaches_its_histograms_only(per_query: bool, backend: str, device: torch.device) -> None:
    rows = unit(6, 3, device)
    rows[5, 1] = torch.nan
    layout = ClassLayout.from_labels(torch.tensor([0, 0, 0, 1, 1, 1]))
    start, count = layout.start.to(device), layout.count.to(device)
    positives, negatives = soft_histogram(rows[:2], rows, start[:2], count[:2], 10, per_query=per_query)
    assert negatives.isnan().all()
    assert positives.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_than_2_to_the_24_pairs_in_a_bin(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """A table that already holds 2^25 + 1 pairs at one place, which float32 cannot count, takes 40 more."""
    score, bins, before = 0.123, 10, 2**25 + 1
    fraction = (torch.tensor(score, dtype=dtype) * 5 + 5).double().item() - 5
    tables = Tables(1, bins, torch.float64, device)
    tables.counts[0, 1, 5] = before
    tables.fractions[0, 1, 5] = before * fraction
    scores = torch.full((4, 16), score, dtype=dtype, device=device)[:, :10]
    ranges = torch.tensor([[0, 0, 0, 0]] * 4, device=device)
    backend_module(backend, device).soft_histogram_forward(
        scores, ranges, 0, False, tables.counts, tables.fractions
    )
    expected = torch.zeros(bins + 1, dtype=torch.float64)
    expected[5], expected[6] = (before + 40) * (1 - fraction), (before + 40) * fraction
    assert tables.histograms()[0].sum() == before + 40
    assert_close(tables.histograms()[0, 1], expected, atol=0, rtol=1e-8)


def test_eager_counts_a_whole_bin_of_2_to_the_24_pairs(device: torch.device) -> None:
    """Blocks of one value, 2^24 + 2^21 pairs: each node within 1e-6, as the sum of its float32 fractions is not."""
    tables, value = Tables(1, 10, torch.float64, device), torch.tensor(0.1234567)
    scores, ranges = value.expand(512, 4096).to(device), torch.zeros(512, 4, dtype=torch.int64, device=device)
    for _ in range(9):
        backend_module("eager", device).soft_histogram_forward(
            scores, ranges, 0, False, tables.counts, tables.fractions
        )
    pairs = 9 * 2**21
    fraction = 5 * value.double().item() + 5 - 5
    assert_close(
        tables.histograms()[0, 1, 5:7], torch.tensor([1 - fraction, fraction]).double() * pairs, rtol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", [{}, {"per_query": True}], ids=["batch", "per query"])
def test_same_bits_in_every_run(
    mode: dict[str, bool], dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    torch.use_deterministic_algorithms(True)
    problem = self_compared([3, 1, 2], 5, device)
    first = evaluate(problem.to(dtype), soft_histogram, 20, **mode)
    for _ in range(19 if device.type == "cuda" else 2):
        for a, b in zip(evaluate(problem.to(dtype), soft_histogram, 20, **mode), first, strict=True):
            assert_same(a, b)


@modes
def test_gradcheck(mode: dict[str, bool], backend: str, device: torch.device) -> None:
    """Random similarities are farther from every node than the step of 1e-6."""
    problem = separate(6, (0, 2, 0), (2, 3, 3), (5, 1, -1), device=device).to(torch.float64)
    place = (problem.queries.detach() @ problem.keys.detach().T + 1) * 2.5
    assert float((place - place.round()).abs().min()) > 1e-4

    def both(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return soft_histogram(queries, keys, *problem[2:4], 5, position=problem.position, **mode)

    # One random direction suffices for the slow interpreter.
    assert torch.autograd.gradcheck(both, (problem.queries, problem.keys), fast_mode=backend == "triton")


@pytest.mark.parametrize(
    ("backend", "per_query", "budget"),
    [("eager", False, 1 << 20), ("eager", True, 700), ("triton", True, 1 << 20), ("triton", False, 700)],
    indirect=["backend"],
)
def test_opcheck(per_query: bool, budget: int, compiler: None, backend: str, device: torch.device) -> None:
    problem = self_compared([3, 1, 2, 10], 4, device).to(torch.float64)
    n = problem.queries.shape[0]
    options = (
        None, *problem[2:4], problem.position, 10, per_query, False, False, "", 0, n, budget, backend, "",
    )  # fmt: skip
    operator = torch.ops.tritonloss.histogram
    torch.library.opcheck(operator.default, (*problem[:2], [], False, False, *options))
    histograms, *gradients = operator(*problem[:2], [], False, False, *options)
    assert histograms.shape == ((n, 2, 11) if per_query else (2, 11))
    assert [gradient.numel() for gradient in gradients] == [0, 0]
    rows = [tensor.detach() for tensor in problem[:2]]
    upstream = [torch.randn(histograms.shape, dtype=torch.float64, device=device)]
    for needs in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(
            operator.default,
            (*rows, upstream, *needs, *options),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("needed", ["queries", "keys"])
def test_gradient_of_one_side(needed: str, backend: str, device: torch.device) -> None:
    problem = separate(7, (0, 2, 1), (2, 3, 3), device=device).to(torch.float64)
    both = evaluate(problem, soft_histogram, 10, position=problem.position)
    one = problem.to(torch.float64)
    getattr(one, "keys" if needed == "queries" else "queries").requires_grad_(False)
    result = evaluate(one, soft_histogram, 10, position=problem.position)
    index = 2 if needed == "queries" else 3
    assert_same(result[index], both[index])
    assert result[5 - index].abs().max() == 0


@pytest.mark.parametrize("per_query", [False, True])
def test_strided_inputs_and_gradients(per_query: bool, backend: str, device: torch.device) -> None:
    problem = self_compared([3, 4], 4, device)
    rows = problem.queries.new_empty(7, 9)[:, ::2][:, :4].copy_(problem.queries).requires_grad_()
    plain = problem.queries.clone().requires_grad_()
    for leaf in (rows, plain):
        positives, negatives = soft_histogram(leaf, leaf, *problem[2:4], 10, per_query=per_query)
        # The gradient of a sum is one element with strides of 0.
        (positives.sum(-1).sum() + negatives.cumsum(-1).sum()).backward()
    assert_same(rows.grad, plain.grad)


@pytest.mark.parametrize("per_query", [False, True])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(0, 0), (0, 3)])
def test_no_query(n_queries: int, n_keys: int, per_query: bool, backend: str, device: torch.device) -> None:
    queries, keys = (torch.zeros(n, 2, device=device, requires_grad=True) for n in (n_queries, n_keys))
    empty = torch.zeros(n_queries, dtype=torch.int64, device=device)
    positives, negatives = soft_histogram(queries, keys, empty, empty, 3, per_query=per_query)
    assert positives.shape == negatives.shape == ((0, 4) if per_query else (4,))
    (positives.sum() + negatives.sum()).backward()
    assert keys.grad is not None
    assert keys.grad.abs().sum() == 0


def test_refusals(backend: str, device: torch.device) -> None:
    problem = self_compared([2, 2], 3, device).to(torch.float64)
    with pytest.raises(ValueError, match="bins is 0"):
        soft_histogram(*problem[:4], 0)
    with pytest.raises(ValueError, match="position is None for 4 queries and 3 keys"):
        soft_histogram(problem.queries, problem.keys[:3], *problem[2:4], 10)
    with pytest.raises(ValueError, match="memory_budget is 0"):
        soft_histogram(*problem[:4], 10, memory_budget=0)
    loss = soft_histogram(*problem[:4], 10).positives[:5].square().sum()
    (grad,) = torch.autograd.grad(loss, problem.queries, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("n", [1, 2, 128, 129, 1000])
def test_running_sum(n: int) -> None:
    """In float64 exactly for small integers, whatever the order of the additions."""
    values = torch.randint(9, (3, n), dtype=torch.float64)
    assert_same(running_sum(values), values.cumsum(-1))
    assert_same(running_sum(values[0]), values[0].cumsum(-1))
