"""`soft_rank` on given scores and `memory_rank`, against brute force."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from checks import assert_as_exact_as, assert_close, assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tritonloss import use_backend
from tritonloss.backends import backend_module
from tritonloss.ops import Ranking, memory_rank, soft_rank_scores

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


@pytest.mark.parametrize("kept", [True, False])
@surrogates
def test_a_row_without_positives_has_no_gradient(
    surrogate: str, kept: bool, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a panel with other rows, and with columns that are neither, from the first one on."""
    if not kept:
        monkeypatch.setattr(backend_module("eager", device), "KEPT_BYTES", 0)
    scores = torch.tensor([[0.3, 0.4, 0.2], [0.2, 0.4, 0.6], [0.7, 0.1, 0.2]], dtype=torch.float64)
    kind = torch.tensor([[1, 0, 0], [2, 0, 0], [2, 2, 2]])  # positive, negative, neither
    scores, kind = scores.to(device), kind.to(device)
    ranks, _, grad = evaluate(
        lambda s: soft_rank_scores(s, kind == 1, kind == 0, surrogate=surrogate, temperature=0.3), scores
    )
    assert ranks.isfinite().all()
    assert grad[0].all()
    assert_same(grad[1:], torch.zeros_like(grad[1:]))


def test_strides(backend: str, device: torch.device) -> None:
    scores, positives, negatives = matrix(6, 9, device)
    expected = evaluate(lambda s: soft_rank_scores(s, positives, negatives), scores)
    turned = [t.T.contiguous().T for t in (scores, positives, negatives)]
    assert_same(evaluate(lambda s: soft_rank_scores(s, *turned[1:]), turned[0]), expected)


def test_bounded_number_of_positives(backend: str, device: torch.device) -> None:
    scores, positives, negatives = matrix(5, 9, device)
    ranks, positive_scores, *_ = soft_rank_scores(scores, positives, negatives)
    bounded = soft_rank_scores(scores, positives, negatives, max_class_size=9)
    assert_same(bounded.ranks[: len(ranks)], ranks)
    assert_same(bounded.scores[: len(ranks)], positive_scores)
    assert not bounded.ranks[len(ranks) :].any()
    with pytest.raises(RuntimeError, match="max_class_size"):
        soft_rank_scores(scores, positives, negatives, max_class_size=1)


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


def remembered(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(device)
    return scores, torch.randn(rows, 30, generator=generator, dtype=torch.float64).to(device)


@pytest.mark.parametrize("cube", [None, 1], ids=["all at once", "a score at a time"])
@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 0.3])
def test_memory_rank_equals_the_definition(
    temperature: float, cube: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, memory = remembered(4, 13, device)
    memory[:, 0] = scores[:, 0]  # ties: neither value nor slope
    if cube is not None:
        monkeypatch.setattr(importlib.import_module("tritonloss.ops.memory_rank"), "CUBE_BYTES", cube)
    sums, slopes = memory_rank(scores, memory, temperature=temperature)
    leaf = scores.clone().requires_grad_()
    expected = one_side_sigmoid(leaf[:, :, None] - memory[:, None], temperature).sum(2)
    (expected_slopes,) = torch.autograd.grad(expected.sum(), leaf)
    assert_close(sums, expected.detach(), atol=30 * 2.0**-50)
    # 1 - tanh^2 of the definition is rounding error times the slope 1 / (2 temperature) where tanh saturates.
    assert_close(slopes, expected_slopes, atol=30 * 2.0**-50 / temperature)


def test_memory_rank_holds_few_differences_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, memory = remembered(4, 13, device)
    monkeypatch.setattr(
        importlib.import_module("tritonloss.ops.memory_rank"), "CUBE_BYTES", 4 * 4 * 30 * 8 * 5
    )
    widths = []

    def spy(x: Tensor) -> Tensor:
        widths.append(x.shape[1])
        return exp(x)

    exp = torch.exp
    monkeypatch.setattr(torch, "exp", spy)
    memory_rank(scores, memory)
    assert widths == [5, 5, 3]


@pytest.mark.parametrize("shape", [(0, 3, 30), (4, 0, 30), (4, 3, 0)])
def test_memory_rank_of_nothing(shape: tuple[int, int, int], device: torch.device) -> None:
    rows, columns, entries = shape
    sums, slopes = memory_rank(
        torch.ones(rows, columns, device=device), torch.ones(rows, entries, device=device)
    )
    assert sums.shape == slopes.shape == (rows, columns)
    assert not sums.any()
    assert not slopes.any()


def test_memory_rank_in_float32(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(4, 16, generator=generator).to(device)
    memory = torch.rand(4, 100, generator=generator).to(device)
    exact = one_side_sigmoid(scores.double()[:, :, None] - memory.double()[:, None], 1e-3).sum(2)
    rival = one_side_sigmoid(scores[:, :, None] - memory[:, None], 1e-3).sum(2)
    assert_as_exact_as(memory_rank(scores, memory)[0], rival, exact)


@pytest.mark.parametrize("bound", [None, 6])
@pytest.mark.parametrize("budget", [1, 1 << 20])
def test_the_operator_is_registered_in_full(
    budget: int, bound: int | None, device: torch.device, compiler: None
) -> None:
    scores, positives, negatives = matrix(3, 6, device)
    count = positives.sum(1)
    ranking = Ranking("sigmoid", 0.3, max_class_size=bound, memory_budget=budget)
    options = ranking.options(
        scores, slice(0, 3), torch.zeros_like(count), count, masks=(positives, negatives)
    )
    operator = torch.ops.tritonloss.rank.default
    arguments = None, [], False, False, *options
    torch.library.opcheck(operator, (scores, *arguments))
    torch.library.opcheck(operator, (scores.detach().requires_grad_(), *arguments))
    n_pairs = 18 if bound else int(count.sum())
    given = [torch.randn(n_pairs, dtype=torch.float64, device=device) for _ in range(2)]
    given.append(torch.empty(0, dtype=torch.float64, device=device))  # there are no positive ranks
    torch.library.opcheck(operator, (scores, None, given, True, False, *options))
