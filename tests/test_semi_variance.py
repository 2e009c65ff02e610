"""SemiVarianceRegularizer: Eq. 9 against plain torch, in all forms."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from checks import assert_as_exact_as, assert_close, value_and_grad
from hypothesis import given
from hypothesis import strategies as st
from inputs import random_batch
from torch import Tensor
from torch.nn import functional as F

from tritonloss import use_backend
from tritonloss.losses import SemiVarianceRegularizer
from tritonloss.ops import semi_variance

POSITIVE, NEGATIVE = [0.2, 0.5, 0.9], [-0.3, 0.15, 0.45, 0.55]


def equation_9(
    positive: Tensor, negative: Tensor, weights: tuple[float, float], normalize: str, detach_mean: bool
) -> Tensor:
    """From the pooled scores of positive and of negative pairs."""
    total = positive.sum() * 0
    for scores, weight, sign in ((positive, weights[0], -1), (negative, weights[1], 1)):
        mean = scores.mean().detach() if detach_mean else scores.mean()
        beyond = scores[sign * (scores - mean) > 0]
        n = len(scores) if normalize == "count_all" else max(1, len(beyond))
        total = total + weight * (beyond - mean).square().sum() / n
    return total


def of_embeddings(rows: Tensor, labels: Tensor, **options: object) -> Tensor:
    """Equation 9 over all queries that have a positive and a negative, in the plainest way."""
    rows = F.normalize(rows, dim=1)
    positive, negative = [], []
    for q in range(len(rows)):
        same = [j for j in range(len(rows)) if labels[j] == labels[q] and j != q]
        other = [j for j in range(len(rows)) if labels[j] != labels[q]]
        if same and other:
            positive += [rows[j] @ rows[q] for j in same]
            negative += [rows[j] @ rows[q] for j in other]
    if not positive:
        return rows.sum() * 0
    return equation_9(torch.stack(positive), torch.stack(negative), **options)  # type: ignore[arg-type]


OPTIONS = [{"normalize": n, "detach_mean": d} for n in ("count_all", "selected") for d in (False, True)]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


@pytest.mark.parametrize(("normalize", "value"), [("count_all", 0.2502980324), ("selected", 0.4818923611)])
def test_golden_values(normalize: str, value: float, device: torch.device) -> None:
    scores = torch.tensor(POSITIVE + NEGATIVE, dtype=torch.float64, device=device)
    targets = torch.tensor([1] * 3 + [0] * 4, device=device)
    regularizer = SemiVarianceRegularizer(normalize=normalize)
    for given_targets in (targets, targets.bool(), 2 * targets - 1, targets.float()):
        assert_close(regularizer(scores, given_targets).item(), value, atol=6e-11)
    masks = (targets[None] == 1, targets[None] == 0)
    assert_close(regularizer(scores[None], positives=masks[0], negatives=masks[1]).item(), value, atol=6e-11)
    column = regularizer(scores[:, None], targets[:, None])
    assert_close(column.item(), value, atol=6e-11)


@every_option
@given(labels=st.lists(st.integers(0, 3), max_size=10), seed=st.integers(0, 9))
def test_any_labels_equal_the_definition(options: dict[str, object], labels: list[int], seed: int) -> None:
    rows = torch.randn(len(labels), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    targets = torch.tensor(labels, dtype=torch.int64)
    expected = value_and_grad(lambda e, y: of_embeddings(e, y, weights=(1, 5), **options), rows, targets)
    for name in ("eager", "reference"):
        with use_backend(name):
            actual = value_and_grad(SemiVarianceRegularizer(**options), rows, targets)
        # Means and squares of at most 100 numbers of at most 2; a gradient of normalisation divides by a norm of 0.1.
        assert_close(actual, expected, atol=1e-12)


@every_option
def test_gradcheck(options: dict[str, object], device: torch.device) -> None:
    rows, labels = random_batch(9, 3, 3, n_lone=1).on(device)
    regularizer = SemiVarianceRegularizer((2.0, 3.0), **options)
    if not options["detach_mean"]:
        assert torch.autograd.gradcheck(lambda e: regularizer(e, labels), rows)
    mask = labels[:, None] == labels
    expected = value_and_grad(lambda e, y: of_embeddings(e, y, weights=(2, 3), **options), rows, labels)
    assert_close(value_and_grad(regularizer, rows, labels), expected, atol=1e-13)
    assert mask.any()


def test_operator_leaves_a_row_out_of_its_own_positives(device: torch.device) -> None:
    """Rows of any length: a short one is less similar to itself than the level."""
    rows = random_batch(8, 3, 1).rows.to(device) * torch.linspace(0.1, 2, 8, device=device)[:, None]
    start = torch.tensor([0, 0, 0, 3, 3, 5, 5, 5], device=device)
    count = torch.tensor([3, 3, 3, 2, 2, 0, 0, 0], device=device)
    levels = torch.tensor([0.5, -0.2], dtype=torch.float64, device=device)
    squares, selected = torch.zeros(2, dtype=torch.float64), torch.zeros(2)
    for q in range(5):
        for j in range(8):
            is_positive = start[q] <= j < start[q] + count[q]
            score = float(rows[q] @ rows[j])
            deviation = max(0.0, 0.5 - score if is_positive else score + 0.2)
            if j != q:
                squares[0 if is_positive else 1] += deviation**2
                selected[0 if is_positive else 1] += deviation > 0
    spread = semi_variance(rows, start, count, levels)
    assert_close(spread.squares, squares, rtol=1e-13)
    assert_close(spread.selected, selected)


def test_streams_in_blocks_of_one_row(device: torch.device) -> None:
    rows, labels = random_batch(30, 4, 6, n_lone=2).on(device)
    whole = value_and_grad(SemiVarianceRegularizer(), rows, labels)
    for options in ({"memory_budget": 1}, {"memory_budget": 1, "max_class_size": 30}):
        assert_close(
            value_and_grad(SemiVarianceRegularizer(**options), rows, labels), whole, rtol=1e-12, atol=1e-14
        )


def test_float32_is_as_exact_as_dense(device: torch.device) -> None:
    rows, labels = random_batch(48, 16, 10).on(device)
    low = rows.detach().float()
    regularizer = SemiVarianceRegularizer()
    exact = value_and_grad(
        lambda e, y: of_embeddings(e, y, weights=(1, 5), normalize="count_all", detach_mean=False),
        low.double(),
        labels,
    )
    with use_backend("reference"):
        rival = value_and_grad(regularizer, low, labels)
    for a, r, e in zip(value_and_grad(regularizer, low, labels), rival, exact, strict=True):
        assert_as_exact_as(a, r, e)


@pytest.mark.parametrize("bound", [None, 4])
@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [0, 0, 0, 0]])
def test_nothing_to_spread(labels: list[int], bound: int | None, device: torch.device) -> None:
    """Rows that are no queries have slots where there is a bound, and scores on both sides of 0."""
    rows = random_batch(4, 3, 1).rows.to(device)
    targets = torch.tensor(labels, device=device)
    loss, grad = value_and_grad(SemiVarianceRegularizer(max_class_size=bound), rows, targets)
    assert loss.item() == 0
    assert not grad.any()


def test_dtypes(device: torch.device) -> None:
    rows, labels = random_batch(12, 4, 3).on(device)
    for dtype in (torch.float16, torch.bfloat16):
        loss, grad = value_and_grad(SemiVarianceRegularizer(), rows.to(dtype), labels)
        assert loss.dtype == grad.dtype == dtype
        exact = SemiVarianceRegularizer()(rows.detach().to(dtype).double(), labels)
        assert_close(loss.double(), exact, rtol=torch.finfo(dtype).eps)


def test_second_derivative_is_refused(device: torch.device) -> None:
    rows, labels = random_batch(6, 3, 2).on(device)
    (grad,) = torch.autograd.grad(SemiVarianceRegularizer()(rows, labels), rows, create_graph=True)
    with pytest.raises(
        RuntimeError, match="derivative"
    ):  # torch's own text, where the class means come first
        grad.sum().backward()


def regularize(*args: object, **masks: object) -> Tensor:
    return SemiVarianceRegularizer()(*args, **masks)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "weights", lambda s, y: SemiVarianceRegularizer((1.0,))),
        (ValueError, "weights", lambda s, y: SemiVarianceRegularizer((1.0, -1.0))),
        (ValueError, "normalize", lambda s, y: SemiVarianceRegularizer(normalize="all")),
        (ValueError, "both masks", lambda s, y: regularize(s[None])),
        (ValueError, "both masks", lambda s, y: regularize(s[None], positives=y[None])),
        (ValueError, "expected one of the two", lambda s, y: regularize(s, y, positives=y)),
        (ValueError, "expected embeddings", lambda s, y: regularize(s, y[:-1])),
        (TypeError, "bool", lambda s, y: regularize(s[None], positives=y[None].int(), negatives=y[None])),
        (ValueError, r"\[Q, N\]", lambda s, y: regularize(s, positives=y, negatives=y)),
        (ValueError, "shape", lambda s, y: regularize(s[None], positives=y[None, 1:], negatives=y[None])),
        (TypeError, "floating", lambda s, y: regularize(y, y)),
        (TypeError, "targets must be a tensor", lambda s, y: regularize(s, [1, 0])),
    ],
)
def test_what_is_refused(error, match, call, device) -> None:
    scores = torch.tensor(POSITIVE + NEGATIVE, device=device)
    with pytest.raises(error, match=match):
        call(scores, torch.tensor([True] * 3 + [False] * 4, device=device))


def test_copies_give_the_same(device: torch.device) -> None:
    rows, labels = random_batch(12, 4, 3).on(device)
    regularizer = SemiVarianceRegularizer((2.0, 3.0), normalize="selected")
    for copied in (copy.deepcopy(regularizer), pickle.loads(pickle.dumps(regularizer))):
        assert copied(rows, labels) == regularizer(rows, labels)
    assert "selected" in repr(regularizer)
