"""`soft_rank` on given scores and `memory_rank`, against brute force."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checks import assert_as_exact_as, assert_close, assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tritonloss import use_backend
from tritonloss.ops import memory_rank, soft_rank_scores

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "one_side_huber": lambda x: torch.where(x <= -1, 0, torch.where(x > 0, 1 + 2 * x, (1 + x) ** 2)),
}
surrogates = pytest.mark.parametrize("surrogate", STEPS)


def matrix(rows: int, columns: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, positives, negatives; about a third of the columns is neither, and a row may lack either."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    kind = torch.randint(3, (rows, columns), generator=generator)
    return tuple(t.to(device) for t in (scores, kind == 0, kind == 1))  # type: ignore[return-value]


def brute_force(
    scores: Tensor, positives: Tensor, negatives: Tensor, surrogate: str, temperature: float
) -> tuple[Tensor, Tensor]:
    ranks = [scores.flatten()[:0]]
    for row, positive, negative in zip(scores, positives, negatives, strict=True):
        difference = (row[negative] - row[positive][:, None]) / temperature
        ranks.append(STEPS[surrogate](difference).sum(1))
    return torch.cat(ranks), scores[positives]


def evaluate(function: Callable[[Tensor], tuple[Tensor, ...]], scores: Tensor) -> tuple[Tensor, ...]:
    """Outputs, and the gradient of the scores for fixed weights of both."""
    leaf = scores.detach().clone().requires_grad_()
    ranks, positive_scores, *_ = function(leaf)
    weights = torch.linspace(-1, 1, len(ranks), dtype=ranks.dtype, device=ranks.device)
    (ranks @ weights + positive_scores @ weights.flip(0)).backward()
    assert leaf.grad is not None
    return ranks.detach(), positive_scores.detach(), leaf.grad


@surrogates
@pytest.mark.parametrize(("rows", "columns"), [(7, 13), (1, 40), (5, 1), (0, 4), (3, 0)])
def test_equals_brute_force(
    rows: int, columns: int, surrogate: str, backend: str, device: torch.device
) -> None:
    scores, positives, negatives = matrix(rows, columns, device)
    actual = evaluate(
        lambda s: soft_rank_scores(s, positives, negatives, surrogate=surrogate, temperature=0.3), scores
    )
    expected = evaluate(lambda s: brute_force(s, positives, negatives, surrogate, 0.3), scores)
    # Sums of N terms of at most 10, derivatives divided by 0.3.
    assert_close(actual, expected, atol=1e-15 * 100 * max(1, columns))


@given(
    kinds=st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), max_size=4), seed=st.integers(0, 9)
)
def test_any_masks(kinds: list[list[int]], seed: int) -> None:
    """Also where a row has no positive or no negative, and where a column is both: then it is a positive."""
    kind = torch.tensor(kinds, dtype=torch.int64).reshape(-1, 6)
    scores = torch.randn(kind.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    positives, negatives = kind & 1 == 1, kind & 2 == 2
    expected = evaluate(lambda s: brute_force(s, positives, negatives & ~positives, "sigmoid", 0.3), scores)
    for name in ("eager", "triton"):
        with use_backend(name):
            actual = evaluate(lambda s: soft_rank_scores(s, positives, negatives, temperature=0.3), scores)
        assert_close(actual, expected, atol=1e-12)


@surrogates
def test_unused_columns_are_not_read(surrogate: str, backend: str, device: torch.device) -> None:
    scores, positives, negatives = matrix(4, 9, device)
    clean = evaluate(lambda s: soft_rank_scores(s, positives, negatives, surrogate=surrogate), scores)
    scores[~(positives | negatives)] = torch.nan
    dirty = evaluate(lambda s: soft_rank_scores(s, positives, negatives, surrogate=surrogate), scores)
    assert_same(dirty, clean)
    assert not dirty[2][~(positives | negatives)].any()


def test_blocks_do_not_change_the_result(backend: str, device: torch.device) -> None:
    scores, positives, negatives = matrix(40, 9, device)
    whole, row_by_row = (
        evaluate(lambda s, b=budget: soft_rank_scores(s, positives, negatives, memory_budget=b), scores)
        for budget in (None, 1)
    )
    # Another block is added up in another order: a few roundings of sums of 9 terms, over the temperature.
    assert_close(row_by_row, whole, rtol=1e-13, atol=1e-13)


def test_strides(backend: str, device: torch.device) -> None:
    scores, positives, negatives = matrix(6, 9, device)
    expected = evaluate(lambda s: soft_rank_scores(s, positives, negatives), scores)
    turned = [t.T.contiguous().T for t in (scores, positives, negatives)]
    assert_same(evaluate(lambda s: soft_rank_scores(s, *turned[1:]), turned[0]), expected)


def test_bounded_number_of_positives(backend: str, device: torch.device) -> None:
    scores, positives, negatives = matrix(5, 9, device)
    ranks, positive_scores, *_ = soft_rank_scores(scores, positives, negatives)
    bounded = soft_rank_scores(scores, positives, negatives, max_positives=9)
    assert_same(bounded.ranks[: len(ranks)], ranks)
    assert_same(bounded.scores[: len(ranks)], positive_scores)
    assert not bounded.ranks[len(ranks) :].any()
    with pytest.raises(RuntimeError, match="max_positives"):
        soft_rank_scores(scores, positives, negatives, max_positives=1)


def test_gradcheck(backend: str, device: torch.device) -> None:
    scores, positives, negatives = matrix(3, 6, device)
    function = lambda s: soft_rank_scores(s, positives, negatives, temperature=0.5)[:2]  # noqa: E731
    assert torch.autograd.gradcheck(function, scores.requires_grad_())


def test_refuses(device: torch.device) -> None:
    scores, positives, negatives = matrix(3, 6, device)
    with pytest.raises(ValueError, match="surrogate"):
        soft_rank_scores(scores, positives, negatives, surrogate="step")
    with pytest.raises(ValueError, match="temperature"):
        soft_rank_scores(scores, positives, negatives, temperature=0)
    ranks, *_ = soft_rank_scores(scores.requires_grad_(), positives, negatives)
    (grad,) = torch.autograd.grad(ranks.sum(), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


def one_side_sigmoid(x: Tensor, temperature: float) -> Tensor:
    return torch.where(x < 0, torch.tanh(-x / (2 * temperature)), 0)


@pytest.mark.parametrize("budget", [None, 1])
@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 0.3])
def test_memory_rank_equals_the_definition(
    temperature: float, budget: int | None, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(50, generator=generator, dtype=torch.float64).to(device)
    memory = torch.randn(4, 30, generator=generator, dtype=torch.float64).to(device)
    memory[:, 0] = scores[:4]  # ties: neither value nor slope
    row = torch.arange(50, device=device) % 4

    def value_and_slope(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = scores.clone().requires_grad_()
        value = function(leaf)
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    actual = value_and_slope(
        lambda s: memory_rank(s, memory, row, temperature=temperature, memory_budget=budget)
    )
    expected = value_and_slope(lambda s: one_side_sigmoid(s[:, None] - memory[row], temperature).sum(1))
    assert_close(actual[0], expected[0], atol=30 * 2.0**-50)
    # 1 - tanh^2 of the definition is rounding error times the slope 1 / (2 temperature) where tanh saturates.
    assert_close(actual[1], expected[1], atol=30 * 2.0**-50 / temperature)


def test_memory_rank_in_float32(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(64, generator=generator).to(device)
    memory = torch.rand(4, 100, generator=generator).to(device)
    row = torch.arange(64, device=device) % 4
    exact = one_side_sigmoid(scores.double()[:, None] - memory.double()[row], 1e-3).sum(1)
    rival = one_side_sigmoid(scores[:, None] - memory[row], 1e-3).sum(1)
    assert_as_exact_as(memory_rank(scores, memory, row), rival, exact)


@pytest.mark.parametrize("name", ["soft_rank_scores", "memory_rank", "semi_variance"])
def test_operators_are_registered_in_full(name: str, device: torch.device) -> None:
    scores, positives, negatives = matrix(3, 6, device)
    scores.requires_grad_()
    start, count = torch.tensor([0, 0, 2], device=device), torch.tensor([2, 2, 0], device=device)
    arguments = {
        "soft_rank_scores": (scores, positives, negatives, "sigmoid", 0.3, -1, 1 << 20, True, "eager"),
        "memory_rank": (scores[:, 0].detach().requires_grad_(), scores.detach(), start, 0.3, 1 << 20, True),
        "semi_variance": (scores, start, count, scores[0, :2].detach(), 0, -1, 1 << 20),
    }[name]
    torch.library.opcheck(getattr(torch.ops.tritonloss, name).default, arguments)
