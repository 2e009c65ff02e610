"""The dense oracles of the log-sum-exp losses: right values, and pytorch-metric-learning as a peer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from checks import assert_close, value_and_grad
from pytorch_metric_learning import losses as pml
from torch import Tensor
from torch.nn import functional as F

from tritonloss import reference

E1 = torch.tensor([[1, 0], [0.8, 0.6], [0, 1], [0.6, 0.8]], dtype=torch.float64)
ANGLES = torch.deg2rad(torch.tensor([0, 20, 70, 50, 90, 110], dtype=torch.float64))
E3 = torch.stack([ANGLES.cos(), ANGLES.sin()], 1)
BATCHES = {
    "E1": (E1, torch.tensor([0, 0, 1, 1])),
    "E3": (E3, torch.tensor([0, 0, 0, 1, 1, 1])),
    "E3L": (E3, torch.tensor([0, 0, 0, 0, 1, 2])),
}


def mean_above_zero(losses: Tensor) -> Tensor:
    return losses[losses > 0].mean() if (losses > 0).any() else losses.sum()


class Case(NamedTuple):
    """A loss as its oracle and its default reduction, the peer, and options that are no defaults."""

    losses: Callable[..., Tensor]
    reduce: Callable[[Tensor], Tensor]
    peer: Callable[..., torch.nn.Module]
    options: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.reduce(self.losses(*args, **kwargs))


CASES = {
    "nt_xent": Case(reference.nt_xent, torch.mean, pml.NTXentLoss, {"temperature": 0.3}),
    "sup_con": Case(reference.sup_con, mean_above_zero, pml.SupConLoss, {"temperature": 0.4}),
    "multi_similarity": Case(
        reference.multi_similarity,
        torch.mean,
        pml.MultiSimilarityLoss,
        {"alpha": 3, "beta": 20, "base": 0.3},
    ),
    # The peer's softplus is the identity from 20 on, which errs by e^-20: exponents stay below that.
    "circle": Case(reference.circle, mean_above_zero, pml.CircleLoss, {"m": 0.3, "gamma": 3}),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.mark.parametrize(
    ("name", "batch", "value"),
    [
        ("nt_xent", "E1", 1.221855983496),
        ("nt_xent", "E3", 3.225816391602),
        ("nt_xent", "E3L", 1.329135030850),
        ("sup_con", "E1", 0.966801729697),
        ("sup_con", "E3", 2.975620037438),
        ("sup_con", "E3L", 2.564346943594),
        ("multi_similarity", "E1", 0.498811128881),
        ("multi_similarity", "E3", 0.806681463446),
        ("multi_similarity", "E3L", 0.639374888574),
        ("circle", "E1", 28.864830089207),
        ("circle", "E3", 53.815343326789),
        ("circle", "E3L", 32.406666519586),
    ],
)
def test_right_values(name: str, batch: str, value: float) -> None:
    assert CASES[name](*BATCHES[batch]).item() == pytest.approx(
        value, abs=1e-11
    )  # printed to twelve decimals


# Labels of 12 rows of which two are alone in their class.
LABELS = torch.tensor([3, 0, 0, 1, 7, 1, 1, 0, 2, 2, 9, 0])
# Exponents and their slopes are below 20, their roundings below 4e-15: the product, and a margin of ten.
PEER = {"rtol": 1e-12, "atol": 1e-12}


def assert_as_peer(
    case: Case, options: dict[str, Any], rows: Tensor, labels: Tensor | None, **arguments: Any
) -> None:
    """Value and gradient of the rows, and of the keys where there are any."""
    peer = case.peer(**options)
    keys = arguments.pop("ref_emb", None)
    ours, theirs = [], []
    for loss, results in (
        (lambda e, k: case(e, labels, ref_emb=k, **options, **arguments), ours),
        (lambda e, k: peer(e, labels, ref_emb=k, **arguments), theirs),
    ):
        leaves = [t.clone().requires_grad_() for t in (rows, keys) if t is not None]
        value = loss(leaves[0], leaves[1] if keys is not None else None)
        results += [value, *torch.autograd.grad(value, leaves)]
    assert_close(ours, theirs, **PEER)


def rows_of(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@cases
@pytest.mark.parametrize("seed", [0, 1])
def test_labels_with_lone_classes(seed: int, case: Case) -> None:
    assert_as_peer(case, case.options, rows_of(12, seed), LABELS)


@cases
def test_reference_set(case: Case) -> None:
    """Queries of a class that no key has, keys of a class that no query has."""
    ref_labels = torch.tensor([0, 5, 1, 0, 2, 2, 1, 9])
    assert_as_peer(case, case.options, rows_of(12), LABELS, ref_emb=rows_of(8, seed=1), ref_labels=ref_labels)


TRIPLETS = tuple(torch.tensor(t) for t in ((0, 4, 1, 1, 1, 7), (8, 8, 5, 5, 9, 11), (1, 2, 3, 4, 3, 0)))
PAIRS = (*(torch.tensor(t) for t in ((0, 3, 3, 3, 7), (2, 5, 5, 6, 8))), *TRIPLETS[::2])


@cases
@pytest.mark.parametrize("mined", [TRIPLETS, PAIRS], ids=["triplets", "pairs"])
@pytest.mark.parametrize("with_keys", [False, True], ids=["rows", "keys"])
def test_mined_indices(with_keys: bool, mined: tuple[Tensor, ...], case: Case) -> None:
    """With pairs that occur twice, queries with one kind of pair only, and queries with none."""
    keys = {"ref_emb": rows_of(12, seed=1), "ref_labels": LABELS} if with_keys else {}
    assert_as_peer(case, case.options, rows_of(12), LABELS, indices_tuple=mined, **keys)


@cases
def test_a_single_triplet(case: Case) -> None:
    """It is a batch like any other; the peer, which returns 0, is asked for it twice where that is the same."""
    triplet = tuple(torch.tensor([i]) for i in (0, 1, 2))
    value = case(rows_of(3), indices_tuple=triplet, **case.options)
    assert value > 0
    if case.losses is not reference.nt_xent:
        twice = tuple(t.repeat(2) for t in triplet)
        expected = case.peer(**case.options)(rows_of(3), torch.arange(3), twice)
        assert_close(value, expected, **PEER)


@cases
@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 2]], ids=["one class", "lone rows"])
def test_batches_of_one_kind_of_pair(labels: list[int], case: Case) -> None:
    """SupCon and Circle are 0, NTXent as well, MultiSimilarity has the other term."""
    rows, y = rows_of(3), torch.tensor(labels)
    losses = case.losses(rows, y, **case.options)
    if case.losses is reference.multi_similarity:
        assert_as_peer(case, case.options, rows, y)
    else:
        assert not losses.any()


@pytest.mark.parametrize("positives", ["mean", "sum"])
def test_info_nce_with_one_positive_is_cross_entropy(positives: str) -> None:
    """Of the queries against more keys than queries; in the other direction, the keys without a query are left out."""
    queries, keys = F.normalize(rows_of(5), dim=1), rows_of(8, seed=1)
    logits = queries @ F.normalize(keys, dim=1).T / 0.05
    losses, is_query = reference.info_nce(queries, ref_emb=keys, positives=positives)
    assert is_query.all()
    assert_close(losses, F.cross_entropy(logits, torch.arange(5), reduction="none"), **PEER)
    back, is_query = reference.info_nce(
        keys, torch.arange(8), ref_emb=queries, ref_labels=torch.arange(5), positives=positives
    )
    assert is_query.tolist() == [True] * 5 + [False] * 3
    assert_close(back[:5], F.cross_entropy(logits.T[:5], torch.arange(5), reduction="none"), **PEER)
    assert not back[5:].any()


@pytest.mark.parametrize("positives", ["mean", "sum"])
def test_info_nce_with_several_positives(positives: str) -> None:
    """One query after the other; the query is no key of its own."""
    rows = rows_of(12)
    losses, is_query = reference.info_nce(rows, LABELS, positives=positives)
    s = F.cosine_similarity(rows[:, None], rows, dim=2) / 0.05
    for q in range(12):
        own = [j for j in range(12) if j != q and LABELS[j] == LABELS[q]]
        others = [j for j in range(12) if j != q]
        assert is_query[q] == bool(own)
        if own:
            shares = [math.exp(s[q, i]) / sum(math.exp(s[q, j]) for j in others) for i in own]
            mean = -sum(math.log(share) for share in shares) / len(own)
            expected = mean if positives == "mean" else -math.log(sum(shares))
            assert losses[q].item() == pytest.approx(expected, rel=1e-12)
        else:
            assert losses[q] == 0


@cases
def test_gradients_are_finite_where_sums_are_empty(case: Case) -> None:
    _, grad = value_and_grad(lambda rows, labels: case.losses(rows, labels).sum(), rows_of(12), LABELS)
    assert grad.isfinite().all()
    assert grad.any()
