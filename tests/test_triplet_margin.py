"""TripletMarginLoss: published values, peers, the dense oracle, and the choices of triplets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import assert_close, value_and_grad
from inputs import E1, E3, Batch, random_batch
from pytorch_metric_learning import distances as pml_distances
from pytorch_metric_learning import losses as pml_losses
from pytorch_metric_learning import reducers as pml_reducers
from torch import Tensor

from tritonloss import use_backend
from tritonloss.backends import large_classes
from tritonloss.distances import CosineSimilarity, DotProductSimilarity, LpDistance
from tritonloss.functional import triplet_margin_loss
from tritonloss.losses import TripletMarginLoss
from tritonloss.ops import soft_rank
from tritonloss.reducers import MeanReducer

BATCH = random_batch(22, 5, 5, n_lone=3)
REFERENCE = random_batch(15, 5, 5)
E3L = E3.labelled(0, 0, 0, 0, 1, 2)
# float64: sums of at most 22 x 9 x 20 terms of at most 3, each with some roundings; gradients divide by distances of
# at least 0.1.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
DISTANCES = {
    "euclidean": LpDistance(),
    "squared": LpDistance(power=2),
    "cosine": CosineSimilarity(),
    "dot": DotProductSimilarity(),
}
PML_DISTANCES = {
    "euclidean": pml_distances.LpDistance(),
    "squared": pml_distances.LpDistance(power=2),
    "cosine": pml_distances.CosineSimilarity(),
    "dot": pml_distances.DotProductSimilarity(normalize_embeddings=False),
}


@pytest.fixture(params=["eager", "triton", "reference"])
def any_backend(request: pytest.FixtureRequest, clean_state: None) -> str:
    use_backend(request.param)
    return request.param


@pytest.mark.parametrize(
    ("data", "smooth", "value"),
    [
        (E1, False, 0.399612819559),
        (E3, False, 0.443443486239),
        (E3L, False, 0.397216957538),
        (E1, True, 0.622769488212),
        (E3, True, 0.666111166491),
        (E3L, True, 0.579171581377),
    ],
)
def test_golden_values(
    data: Batch, smooth: bool, value: float, any_backend: str, device: torch.device
) -> None:
    loss = TripletMarginLoss(smooth_loss=smooth)(*data.on(device))
    assert_close(loss.item(), value, atol=6e-13)  # printed to twelve digits


@pytest.mark.parametrize("name", DISTANCES)
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("source", ["labels", "triplets", "pairs", "reference"])
def test_equals_pytorch_metric_learning(
    name: str, smooth: bool, source: str, clean_state: None, device: torch.device
) -> None:
    rows, labels = BATCH.on(device)
    options: dict[str, Any] = {}
    if source == "reference":
        options = dict(zip(("ref_emb", "ref_labels"), REFERENCE.on(device), strict=True))
    elif source != "labels":
        indices = ([0, 0, 4, 9, 9], [1, 2, 5, 8, 7], [4, 9, 16, 0, 21], [3, 3, 2, 2, 1])
        mined = tuple(torch.tensor(index, device=device) for index in indices)
        options = {"indices_tuple": mined[:3] if source == "triplets" else (*mined[:2], mined[0], mined[3])}
    ours = TripletMarginLoss(0.3, smooth_loss=smooth, distance=DISTANCES[name])
    theirs = pml_losses.TripletMarginLoss(0.3, smooth_loss=smooth, distance=PML_DISTANCES[name])
    expected = value_and_grad(lambda e, y: theirs(e, y, **options), rows, labels)
    # Its softplus is the identity from 20 on, where products of rows that are not normalised lie: e^-20 is missing.
    close = {"rtol": 3e-9, "atol": 3e-9} if smooth and name == "dot" else CLOSE
    for backend in ("eager", "triton") if source == "labels" else ("eager",):
        with use_backend(backend):
            assert_close(value_and_grad(lambda e, y: ours(e, y, **options), rows, labels), expected, **close)


@pytest.mark.parametrize("reducer", ["MeanReducer", "SumReducer", "AvgNonZeroReducer"])
def test_reducers_are_of_triplets(reducer: str, clean_state: None, device: torch.device) -> None:
    if not hasattr(pml_reducers, reducer):
        pytest.skip("no such reducer there")
    rows, labels = BATCH.on(device)
    made = getattr(pml_reducers, reducer)
    actual = TripletMarginLoss(0.3, reducer=made())(rows, labels)
    assert_close(actual, pml_losses.TripletMarginLoss(0.3, reducer=made())(rows, labels), **CLOSE)


@pytest.mark.parametrize("name", DISTANCES)
@pytest.mark.parametrize("triplets", ["all", "hard", "semihard"])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("budget", [None, 5 * 22 * 8])
def test_equals_the_definition(
    name: str, triplets: Any, smooth: bool, budget: int | None, device: torch.device, clean_state: None
) -> None:
    rows, labels = BATCH.on(device)
    options: dict[str, Any] = {
        "margin": 0.3, "smooth_loss": smooth, "triplets": triplets, "distance": DISTANCES[name],
    }  # fmt: skip
    for reduction in ("mean_nonzero", "none"):

        def loss(e: Tensor, y: Tensor, reduction: Any = reduction) -> Tensor:
            found = triplet_margin_loss(e, y, **options, reduction=reduction, memory_budget=budget)
            return (found * torch.arange(1, 1 + found.numel(), device=device)).sum()

        with use_backend("reference"):
            expected = value_and_grad(loss, rows, labels)
        for backend in ("eager", "triton") if budget is None else ("eager",):
            with use_backend(backend):
                # Weighted by up to 22: ten times CLOSE.
                assert_close(value_and_grad(loss, rows, labels), expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("triplets", ["all", "hard", "semihard"])
def test_equals_sentence_transformers(triplets: Any, clean_state: None, device: torch.device) -> None:
    """Its losses take the cosine distance, 1 - s, and with "all" the mean over what is above 1e-16."""
    st = pytest.importorskip("sentence_transformers.losses", exc_type=ImportError)
    kind = {"all": "BatchAll", "hard": "BatchHard", "semihard": "BatchSemiHard"}[triplets]
    cosine = st.BatchHardTripletLossDistanceFunction.cosine_distance
    theirs = getattr(st, f"{kind}TripletLoss")(None, distance_metric=cosine, margin=0.3)
    method = {"all": "batch_all_triplet_loss", "hard": "batch_hard_triplet_loss",
              "semihard": "batch_semi_hard_triplet_loss"}[triplets]  # fmt: skip
    rows = random_batch(20, 5, 5).rows.to(device)
    labels = torch.arange(20, device=device) % 5  # it counts a row without a positive in the mean
    expected = value_and_grad(lambda e, y: getattr(theirs, method)(y, e), rows, labels)
    reduction = "mean_nonzero" if triplets == "all" else "mean"
    actual = value_and_grad(
        lambda e, y: triplet_margin_loss(
            e, y, margin=0.3, triplets=triplets, distance=CosineSimilarity(), reduction=reduction
        ),
        rows,
        labels,
    )
    assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_large_classes_equal_the_direct_loop(
    backend: str, monkeypatch: pytest.MonkeyPatch, device: torch.device, clean_state: None
) -> None:
    rows = random_batch(40, 3, 4).rows.to(device)
    labels = torch.arange(40, device=device) % 2
    costs = []

    def pays(*arguments: Any) -> bool:
        costs.append(arguments)
        return True

    with use_backend(backend):
        monkeypatch.setenv("TRITONLOSS_LARGE_CLASSES", "0")
        expected = value_and_grad(TripletMarginLoss(0.1), rows, labels)
        monkeypatch.setenv("TRITONLOSS_LARGE_CLASSES", "1")
        monkeypatch.setattr(large_classes, "sorting_pays", pays)
        actual = value_and_grad(TripletMarginLoss(0.1), rows, labels)
    assert costs
    assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("smooth", [False, True])
def test_gradcheck(backend: str, smooth: bool, device: torch.device, clean_state: None) -> None:
    """No difference of the batch is within 1e-4 of the kink: finite differences of 1e-6 see a smooth function."""
    rows, labels = random_batch(9, 3, 3).on(device)
    criterion = TripletMarginLoss(0.3, smooth_loss=smooth)
    with use_backend(backend):
        assert torch.autograd.gradcheck(
            lambda e: criterion(e, labels), rows.clone().requires_grad_(), fast_mode=True
        )


def test_duplicates_have_a_finite_gradient(any_backend: str, device: torch.device) -> None:
    rows = torch.ones(4, 3, dtype=torch.float64, device=device)
    loss, grad = value_and_grad(TripletMarginLoss(), rows, torch.tensor([0, 0, 1, 1], device=device))
    assert_close(loss.item(), 0.05, atol=1e-7)  # the root of the rounding of a product
    assert grad.isfinite().all()


def test_reference_set_has_a_gradient(device: torch.device, clean_state: None) -> None:
    rows, labels = BATCH.on(device)
    others, other_labels = REFERENCE.on(device)
    found = []
    for backend in ("reference", "eager", "triton"):
        leaf = others.detach().clone().requires_grad_()
        with use_backend(backend):
            TripletMarginLoss(0.3)(rows, labels, ref_emb=leaf, ref_labels=other_labels).backward()
        found.append(leaf.grad)
    assert found[0].abs().max() > 1e-3
    for grad in found[1:]:
        assert_close(grad, found[0], **CLOSE)


def test_terms_are_means_of_the_queries(any_backend: str, device: torch.device) -> None:
    rows, labels = BATCH.on(device)
    term = TripletMarginLoss(0.3).loss_terms(rows, labels)["loss"]
    sums = triplet_margin_loss(rows, labels, margin=0.3, reduction="none")
    assert term["losses"].shape == (22,)
    above = sums / term["losses"]
    is_query = sums > 0
    assert_close(above[is_query], above[is_query].round(), rtol=1e-12)
    assert_close(sums.sum() / above[is_query].sum(), TripletMarginLoss(0.3)(rows, labels), **CLOSE)


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [0, 0, 0, 0]])
def test_no_triplet_is_a_zero_with_a_graph(labels: list[int], any_backend: str, device: torch.device) -> None:
    for triplets in ("all", "hard", "semihard"):
        criterion = TripletMarginLoss(triplets=triplets, reducer=MeanReducer())
        loss, grad = value_and_grad(criterion, *E1.labelled(*labels).on(device))
        assert loss.item() == 0
        assert not grad.any()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"swap": True}, ValueError, "swap is True: expected False"),
        ({"triplets_per_anchor": 100}, ValueError, "triplets_per_anchor is 100: expected 'all'"),
        ({"margin": float("nan")}, ValueError, "margin is nan"),
        ({"margin": float("inf")}, ValueError, "margin is inf"),
        ({"margin": "1"}, TypeError, "margin must be a number, got str"),
        ({"smooth_loss": 1}, TypeError, "smooth_loss must be a bool, got int"),
        ({"triplets": "easy"}, ValueError, "triplets is 'easy': expected one of all, hard, semihard"),
        ({"distance": LpDistance(1)}, TypeError, "distance must be LpDistance of normalised rows"),
        ({"distance": LpDistance(power=3)}, TypeError, "distance must be LpDistance of normalised rows"),
    ],
)
def test_options_are_checked(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        TripletMarginLoss(**options)


def test_arguments_are_checked(device: torch.device) -> None:
    rows, labels = BATCH.on(device)
    mined = tuple(torch.zeros(1, dtype=torch.int64, device=device) for _ in range(3))
    with pytest.raises(ValueError, match="indices_tuple names triplets: expected None with triplets='hard'"):
        TripletMarginLoss(triplets="hard")(rows, labels, mined)
    with pytest.raises(ValueError, match="ref_labels are required with ref_emb"):
        TripletMarginLoss()(rows, labels, ref_emb=rows)
    with pytest.raises(ValueError, match="labels are required"):
        TripletMarginLoss()(rows)
    with pytest.raises(ValueError, match="positive_ranks is True: expected False with surrogate 'hinge"):
        soft_rank(rows, rows, labels, labels, surrogate="hinge 0.5", positive_ranks=True)
    with pytest.raises(ValueError, match="surrogate is 'hinge': expected one of sigmoid"):
        soft_rank(rows, rows, labels, labels, surrogate="hinge")
