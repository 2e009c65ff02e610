"""pytorch-metric-learning 2.9.0 around and inside these losses: its miners, samplers, distances, reducers, wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_close, assert_same, value_and_grad
from inputs import random_batch
from pytorch_metric_learning import distances as pml_distances
from pytorch_metric_learning import losses as pml_losses
from pytorch_metric_learning import miners as pml_miners
from pytorch_metric_learning import reducers as pml_reducers
from pytorch_metric_learning import regularizers as pml_regularizers
from pytorch_metric_learning.samplers import MPerClassSampler
from registry import LOSSES
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tritonloss import losses, use_backend
from tritonloss.indices import as_indices, miner_weights
from tritonloss.losses import FastAPLoss, HistogramLoss, PNPLoss, ProxyAnchorLoss, SmoothAPLoss

BATCH = random_batch(24, 6, 5, n_lone=2)
N_CLASSES = 7
# The rounding of a float64 similarity of 6 terms over tau^2 = 1e-4 in a gradient, over 24 rows.
FLOAT64 = {"rtol": 1e-9, "atol": 1e-9}


def proxy_anchor(**options: Any) -> ProxyAnchorLoss:
    torch.manual_seed(0)
    return ProxyAnchorLoss(N_CLASSES, 6, **options).double()


# The losses that use an index tuple. Their values against PML's own are in the tests of each loss.
MINED: dict[str, Callable[..., nn.Module]] = {
    "SmoothAPLoss": SmoothAPLoss,
    "FastAPLoss": FastAPLoss,
    "ProxyAnchorLoss": proxy_anchor,
    "HistogramLoss": HistogramLoss,
    "NTXentLoss": losses.NTXentLoss,
    "CircleLoss": losses.CircleLoss,
}
MINERS = {
    "BatchHardMiner": pml_miners.BatchHardMiner,
    "BatchEasyHardMiner": pml_miners.BatchEasyHardMiner,
    "MultiSimilarityMiner": pml_miners.MultiSimilarityMiner,
    "PairMarginMiner": lambda: pml_miners.PairMarginMiner(pos_margin=0.9, neg_margin=0.1),
    "TripletMarginMiner": pml_miners.TripletMarginMiner,
    "AngularMiner": lambda: pml_miners.AngularMiner(angle=60),
    "UniformHistogramMiner": lambda: pml_miners.UniformHistogramMiner(distance=pml_distances.LpDistance()),
}


@pytest.mark.parametrize("miner", MINERS)
@pytest.mark.parametrize("name", MINED)
def test_miners(name: str, miner: str, device: torch.device) -> None:
    """What each miner returns, triplets or pairs, is taken as it is; values and gradients are the reference's."""
    rows, labels = BATCH.on(device)
    mined = MINERS[miner]()(rows, labels)
    assert sum(len(entry) for entry in mined) > 0
    criterion = MINED[name]().to(device)
    actual = value_and_grad(lambda x, y: criterion(x, y, mined), rows, labels)
    with use_backend("reference"):
        expected = value_and_grad(lambda x, y: criterion(x, y, mined), rows, labels)
    assert_close(actual, expected, **FLOAT64)
    without = value_and_grad(criterion, rows, labels)
    weights = miner_weights(as_indices(mined), len(rows), dtype=rows.dtype, device=device)
    assert name == "HistogramLoss" or weights.min() < 1
    assert actual[0] != without[0]


@pytest.mark.parametrize(
    ("criterion", "given"),
    [
        (PNPLoss, pml_distances.CosineSimilarity),
        (SmoothAPLoss, pml_distances.CosineSimilarity),
        (HistogramLoss, pml_distances.CosineSimilarity),
        (FastAPLoss, lambda: pml_distances.LpDistance(power=2)),
        (proxy_anchor, pml_distances.CosineSimilarity),
    ],
)
def test_default_distances_may_be_given_as_those_of_pml(criterion: Any, given: Any) -> None:
    """Recognised, so that the same blocks are computed: bit for bit."""
    expected = value_and_grad(criterion(), *BATCH)
    assert_same(value_and_grad(criterion(distance=given()), *BATCH), expected)


@pytest.mark.parametrize(
    "distance",
    [
        pml_distances.LpDistance(),
        pml_distances.DotProductSimilarity(normalize_embeddings=False),
        pml_distances.SNRDistance(),
    ],
    ids=lambda distance: type(distance).__name__,
)
def test_other_distances(distance: nn.Module) -> None:
    """ProxyAnchorLoss takes any. Its peer agrees where no tuple is given."""
    ours, peer = proxy_anchor(distance=distance), pml_losses.ProxyAnchorLoss(N_CLASSES, 6, distance=distance)
    peer.proxies.data = ours.weight.detach().clone()
    actual, expected = (value_and_grad(criterion, *BATCH) for criterion in (ours, peer))
    assert_close(actual, expected, **FLOAT64)
    assert_close(ours.weight.grad, peer.proxies.grad, **FLOAT64)


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.regularized])
def test_regularizers(name: str) -> None:
    options = {"embedding_regularizer": pml_regularizers.LpRegularizer(), "embedding_reg_weight": 3.0}
    plain, both = (LOSSES[name].module(N_CLASSES, BATCH.rows, **o) for o in ({}, options))
    penalty = value_and_grad(lambda x, y: 3 * x.norm(dim=1).mean(), *BATCH)
    expected = [a + b for a, b in zip(value_and_grad(plain, *BATCH), penalty, strict=True)]
    assert_close(list(value_and_grad(both, *BATCH)), expected, rtol=1e-12, atol=1e-12)


def test_a_weight_regularizer() -> None:
    plain = proxy_anchor()
    both = proxy_anchor(weight_regularizer=pml_regularizers.RegularFaceRegularizer(), weight_reg_weight=2.0)
    penalty = 2 * pml_regularizers.RegularFaceRegularizer()(plain.weight)
    assert_close(both(*BATCH), plain(*BATCH) + penalty, rtol=1e-12)


@pytest.mark.parametrize("make", [SmoothAPLoss, FastAPLoss])
def test_reducers(make: Callable[..., nn.Module]) -> None:
    """Each query's loss, as PML's reducers see it. No loss is 0, so that both means are the same."""
    expected = value_and_grad(make(), *BATCH)
    for reducer in (pml_reducers.MeanReducer(), pml_reducers.AvgNonZeroReducer()):
        assert_close(value_and_grad(make(reducer=reducer), *BATCH), expected, rtol=1e-12, atol=1e-14)
    per_query = make().loss_terms(*BATCH)
    ((_, term),) = per_query.items()
    kept = term["losses"][term["losses"] > term["losses"].median()]
    threshold = pml_reducers.ThresholdReducer(low=float(term["losses"].median()))
    assert_close(make(reducer=threshold)(*BATCH), kept.mean(), rtol=1e-12)


def test_divisor_reducers() -> None:
    expected = value_and_grad(proxy_anchor(), *BATCH)
    divisor = pml_reducers.DivisorReducer
    for reducer in (divisor(), pml_reducers.MultipleReducers({"pos_loss": divisor(), "neg_loss": divisor()})):
        assert_close(value_and_grad(proxy_anchor(reducer=reducer), *BATCH), expected, rtol=1e-12, atol=1e-14)


def test_multiple_losses() -> None:
    """Losses of both packages, a miner for some, and weights: the weighted sum."""
    torch.manual_seed(0)
    miner = pml_miners.MultiSimilarityMiner()
    parts = [PNPLoss(variant="Ds"), proxy_anchor(), pml_losses.TripletMarginLoss()]
    criterion = pml_losses.MultipleLosses(parts, miners=[None, miner, None], weights=[1, 0.5, 2])
    mined = miner(*BATCH)

    def expected(x: Tensor, y: Tensor) -> Tensor:
        return parts[0](x, y) + 0.5 * parts[1](x, y, mined) + 2 * parts[2](x, y)

    assert_close(value_and_grad(criterion, *BATCH), value_and_grad(expected, *BATCH), rtol=1e-12, atol=1e-12)
    assert [name for name, _ in criterion.named_parameters()] == ["losses.1.weight"]


def test_multiple_losses_by_name() -> None:
    criterion = pml_losses.MultipleLosses(
        {"rank": SmoothAPLoss(), "bins": FastAPLoss()}, weights={"rank": 2, "bins": 3}
    )
    assert_close(criterion(*BATCH), 2 * SmoothAPLoss()(*BATCH) + 3 * FastAPLoss()(*BATCH), rtol=1e-12)


WITHOUT_REFERENCES = [name for name, loss in LOSSES.items() if not loss.references]
SHARED = [name for name, loss in LOSSES.items() if loss.references and hasattr(pml_losses, name)]


@pytest.mark.parametrize("name", [*WITHOUT_REFERENCES, "InfoNCELoss"])
def test_wrappers_of_version_2_go_by_the_name_of_the_class(name: str) -> None:
    """Version 2.9 refuses its own losses of these names just so. Two views of a batch need no wrapper."""
    criterion = LOSSES[name].module(12, BATCH.rows)
    with pytest.raises(Exception, match=f"SelfSupervisedLoss not supported for {name}"):
        pml_losses.SelfSupervisedLoss(criterion)
    with pytest.raises(Exception, match=f"CrossBatchMemory not supported for {name}"):
        pml_losses.CrossBatchMemory(criterion, embedding_size=6)
    views = BATCH.rows[:12], BATCH.rows[12:]
    loss = criterion(torch.cat(views), torch.arange(12).repeat(2))
    with use_backend("reference"):
        expected = LOSSES[name].module(12, BATCH.rows)(torch.cat(views), torch.arange(12).repeat(2))
    assert_close(loss, expected, rtol=1e-9)


class SelfSupervised(pml_losses.SelfSupervisedLoss):
    """SelfSupervisedLoss as version 3 has it: without the list of names."""

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        pass


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("symmetric", [True, False])
def test_self_supervised_loss_with_a_reference_set(name: str, symmetric: bool) -> None:
    def value_of(criterion: nn.Module) -> tuple[Tensor, Tensor]:
        wrapper = pml_losses.SelfSupervisedLoss(criterion, symmetric=symmetric)
        return value_and_grad(lambda x, _: wrapper(x[:12], x[12:]), BATCH.rows[:24], None)

    expected = value_of(getattr(pml_losses, name)())
    # Circle there is off by e^-20.
    assert_close(value_of(getattr(losses, name)()), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", SHARED)
def test_cross_batch_memory(name: str) -> None:
    wrappers = [
        pml_losses.CrossBatchMemory(getattr(module, name)(), embedding_size=6, memory_size=40)
        for module in (losses, pml_losses)
    ]
    for step in range(3):
        rows, labels = random_batch(20, 6, 5, seed=step)
        actual, expected = (value_and_grad(wrapper.double(), rows, labels) for wrapper in wrappers)
        assert_close(actual, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", WITHOUT_REFERENCES)
def test_self_supervised_loss_without_the_list_of_names(name: str) -> None:
    views = BATCH.rows[:12], BATCH.rows[12:]
    expected = LOSSES[name].module(12, BATCH.rows)(torch.cat(views), torch.arange(12).repeat(2))
    assert_same(SelfSupervised(LOSSES[name].module(12, BATCH.rows))(*views), expected)
    # ref_emb is refused; SOPRCLoss has no argument `embeddings`, because its rows may be scores.
    with pytest.raises(
        (TypeError, ValueError), match=r"does not support ref_emb|keyword argument 'embeddings'"
    ):
        SelfSupervised(LOSSES[name].module(12, BATCH.rows), symmetric=False)(*views)


def test_m_per_class_sampler() -> None:
    """Classes with fewer rows than asked for are repeated, so a batch holds duplicates: every loss takes them."""
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3])
    rows = torch.randn(len(labels), 6, dtype=torch.float64)
    sampler = MPerClassSampler(labels, m=4, batch_size=12, length_before_new_iter=36)
    for batch_rows, batch_labels in DataLoader(TensorDataset(rows, labels), 12, sampler=sampler):
        assert batch_labels.bincount().max() == 4
        for loss in LOSSES.values():
            value, grad = value_and_grad(loss.module(4, rows), batch_rows, batch_labels)
            with use_backend("reference"):
                expected = value_and_grad(loss.module(4, rows), batch_rows, batch_labels)
            assert_close((value, grad), expected, **FLOAT64)
