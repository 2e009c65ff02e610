"""What users of other libraries bring along: their names, their numbers, their shapes. Every case was a report."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from checks import assert_close, assert_same
from registry import LOSSES
from torch import Tensor, nn
from torch.nn import functional as F

from tritonloss import distances, functional, losses, metrics, reducers, regularizers, use_backend
from tritonloss.gradient_cache import cached_step
from tritonloss.losses import ProxyAnchorLoss, SemiVarianceRegularizer, SOPRCLoss

ROWS, LABELS = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 4


# --- numbers ---


INTEGERS = [np.int64(3), np.int32(3), np.array([3, 1]).max(), torch.tensor(3), torch.arange(4).max()]


@pytest.mark.parametrize("n", INTEGERS, ids=lambda n: f"{type(n).__name__} {n.dtype}")
def test_integers_of_numpy_and_torch(n: Any) -> None:
    calls: dict[str, Callable[[Any], Any]] = {
        "num_bins": lambda n: losses.HistogramLoss(num_bins=n)(ROWS, LABELS),
        "num_bins, FastAP": lambda n: functional.fastap_loss(ROWS, LABELS, num_bins=n),
        "num_classes": lambda n: ProxyAnchorLoss(n + 1, n + 2, weight_init_func=nn.init.ones_)(ROWS, LABELS),
        "memory_size": lambda n: SOPRCLoss(n + 1, memory_size=n)(ROWS, LABELS),
        "max_class_size": lambda n: losses.PNPLoss(max_class_size=n)(ROWS, LABELS),
        "memory_budget": lambda n: functional.smooth_ap_loss(ROWS, LABELS, memory_budget=n),
        "InfoNCE": lambda n: functional.info_nce_loss(ROWS, labels=LABELS, max_class_size=n, memory_budget=n),
        "SupCon": lambda n: functional.sup_con_loss(ROWS, LABELS, max_class_size=n, memory_budget=n),
        "TripletMargin": lambda n: losses.TripletMarginLoss(max_class_size=n)(ROWS, LABELS),
        "semi-variance": lambda n: SemiVarianceRegularizer(max_class_size=n, memory_budget=n)(ROWS, LABELS),
        "size": lambda n: functional.interpolate_scores(ROWS[0], n),
        "ks": lambda n: metrics.recall_at_k(ROWS, LABELS, ks=n),
        "k": lambda n: metrics.ndcg(ROWS, LABELS, k=n),
        "chunk_size": lambda n: cached_step(
            nn.Linear(5, 5), lambda e, y: e.sum() * 0, ROWS, LABELS, chunk_size=n
        ),
    }
    for name, call in calls.items():
        assert_same(call(n), call(3)), name


@pytest.mark.parametrize(
    "value", [torch.tensor([3]), torch.tensor(3.0), np.float64(3), "3", True, np.bool_(True)]
)
def test_no_integer(value: Any) -> None:
    with pytest.raises(TypeError, match=f"num_bins must be an int, got {type(value).__name__}"):
        losses.FastAPLoss(num_bins=value)


@pytest.mark.parametrize("score_range", [np.array([0.0, 1.0]), torch.tensor([0.0, 1.0]), [0, 1], (0, 1)])
def test_ranges_of_numpy_and_torch(score_range: Any) -> None:
    targets = (LABELS == 0).long()
    found = SOPRCLoss(score_range=score_range)(ROWS[:, 0], targets)
    assert_same(found, SOPRCLoss(score_range=(0.0, 1.0))(ROWS[:, 0], targets))
    assert_same(
        functional.interpolate_scores(ROWS[0], 4, score_range=score_range),
        functional.interpolate_scores(ROWS[0], 4, score_range=(0.0, 1.0)),
    )


@pytest.mark.parametrize(
    "score_range", [np.array([1.0, 0.0]), np.array(1.0), np.array([0.0, np.nan]), "no", (0,)]
)
def test_no_range(score_range: Any) -> None:
    with pytest.raises(ValueError, match="score_range"):
        SOPRCLoss(score_range=score_range)


# --- shapes and devices ---


@pytest.mark.parametrize("criterion", [SOPRCLoss(), SOPRCLoss(5), SemiVarianceRegularizer()])
@pytest.mark.parametrize("targets", [LABELS, torch.zeros(12), torch.zeros(12, dtype=torch.int64)])
def test_scores_of_a_binary_head(criterion: nn.Module, targets: Tensor) -> None:
    with pytest.raises(ValueError, match=re.escape("got [12, 1] with [12]: take scores.squeeze(1)")):
        criterion(ROWS[:, :1], targets)


def test_logits_of_a_classifier_have_a_form() -> None:
    targets = F.one_hot(LABELS, 4)
    per_class = [SOPRCLoss()(ROWS[:, c], targets[:, c]) for c in range(4)]
    # The mean over the classes, of float32 losses of size 1.
    assert_close(SOPRCLoss(4)(ROWS[:, :4], targets), torch.stack(per_class).mean(), atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_rows_without_numbers(name: str) -> None:
    module = LOSSES[name].module(4, ROWS).to("meta")
    with pytest.raises(ValueError, match="embeddings must have numbers, got a tensor on the meta device"):
        module(ROWS.to("meta"), LABELS.to("meta"))


def test_metrics_of_rows_without_numbers() -> None:
    with pytest.raises(ValueError, match="queries must have numbers"):
        metrics.mean_average_precision(ROWS.to("meta"), LABELS.to("meta"))


@pytest.mark.parametrize("weight", [torch.empty(0), torch.tensor(1.0), torch.ones(2, 3, 5)])
@pytest.mark.parametrize("call", [lambda m: m(ROWS, LABELS), lambda m: m.get_logits(ROWS)])
def test_a_weight_that_is_no_matrix(weight: Tensor, call: Callable[[nn.Module], object]) -> None:
    """What sharding of parameters leaves."""
    criterion = ProxyAnchorLoss(4, 5)
    criterion.weight = nn.Parameter(weight)
    expected = f"must be a tensor [num_classes, embedding_size], got shape {list(weight.shape)}"
    with pytest.raises(ValueError, match="weight, the proxies, " + re.escape(expected)):
        call(criterion)


# --- targets ---


@pytest.mark.parametrize("criterion", [SOPRCLoss(5), SemiVarianceRegularizer()])
def test_unknown_targets(criterion: nn.Module, backend: str) -> None:
    targets = (ROWS > 0).float()
    targets[3, 2] = torch.nan
    state = {name: value.clone() for name, value in criterion.state_dict().items()}
    with pytest.raises(ValueError, match=r"targets must be numbers, got NaN: .* positives=\(targets > 0\).T"):
        criterion(ROWS, targets)
    assert_same(criterion.state_dict(), state)


def test_unknown_targets_as_masks() -> None:
    targets = (ROWS > 0).float()
    targets[3, 2] = torch.nan
    by_masks = SOPRCLoss(5)(ROWS.T, positives=(targets > 0).T, negatives=(targets <= 0).T)
    assert_same(SOPRCLoss(5, check_label_range=False)(ROWS, targets), by_masks)
    known = torch.cat([ROWS[:3, 2], ROWS[4:, 2]]), torch.cat([targets[:3, 2], targets[4:, 2]])
    per_class = [SOPRCLoss()(ROWS[:, c], targets[:, c]) if c != 2 else SOPRCLoss()(*known) for c in range(5)]
    assert_close(by_masks, torch.stack(per_class).mean(), atol=1e-6)


# --- the weight of Eq. 9 ---


@pytest.mark.parametrize("form", ["targets", "masks"])
def test_the_scale_of_logits_does_not_take_over(form: str) -> None:
    targets = (ROWS > 0).float()
    masks = {"positives": (targets > 0).T, "negatives": (targets <= 0).T}
    for scale in (1, 3, 100):
        terms = (
            SOPRCLoss(5).loss_terms(scale * ROWS, targets)
            if form == "targets"
            else SOPRCLoss(5).loss_terms((scale * ROWS).T, **masks)
        )
        assert list(terms) == ["loss"]
        assert float(terms["loss"]["losses"]) <= 1


def test_embeddings_have_eq_9_by_default() -> None:
    assert_same(SOPRCLoss(4)(ROWS, LABELS), SOPRCLoss(4, w_var=1)(ROWS, LABELS))
    assert SOPRCLoss(5, w_var=1)(3 * ROWS, (ROWS > 0).float()) > SOPRCLoss(5)(3 * ROWS, (ROWS > 0).float())


# --- names ---


@pytest.mark.parametrize(
    ("module", "name", "there"),
    [
        (losses, "ContrastiveLoss", "PNPLoss"),
        (losses, "ArcFaceLoss", "SOPRCLoss"),
        (distances, "SNRDistance", "LpDistance"),
        (reducers, "ClassWeightedReducer", "MeanReducer"),
        (regularizers, "SparseCentersRegularizer", "LpRegularizer"),
    ],
)
def test_names_that_are_elsewhere(module: Any, name: str, there: str) -> None:
    original = module.__name__.replace("tritonloss", "pytorch_metric_learning")
    with pytest.raises(AttributeError, match=rf"{there}.*a {name} of {original} can stand beside"):
        getattr(module, name)
    assert not hasattr(module, "__wrapped__")


def test_proxies_of_version_2() -> None:
    criterion = ProxyAnchorLoss(4, 5)
    with pytest.raises(AttributeError, match="its parameter is `weight`"):
        criterion.proxies = nn.Parameter(torch.ones(4, 5))
    assert [name for name, _ in criterion.named_parameters()] == ["weight"]


@pytest.mark.parametrize("prefix", ["", "criterion."])
def test_a_checkpoint_of_version_2(prefix: str) -> None:
    criterion = ProxyAnchorLoss(4, 5)
    module = nn.ModuleDict({"criterion": criterion}) if prefix else criterion
    before = criterion.weight.detach().clone()
    state = {f"{prefix}proxies": torch.ones(4, 5)}
    with pytest.raises(RuntimeError, match=r"ProxyAnchorLoss\.convert_pml_state_dict"):
        module.load_state_dict(state)
    assert_same(criterion.weight.detach(), before)
    module.load_state_dict(criterion.convert_pml_state_dict(state, prefix))
    assert_same(criterion.weight.detach(), torch.ones(4, 5))


# --- transforms of torch.func ---


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "grad": lambda f: torch.func.grad(f)(ROWS),
    "vjp": lambda f: torch.func.vjp(f, ROWS)[1](torch.ones(())),
    "jvp": lambda f: torch.func.jvp(f, (ROWS,), (ROWS,)),
    "jacrev": lambda f: torch.func.jacrev(f)(ROWS),
    "vmap": lambda f: torch.func.vmap(f)(ROWS[None]),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", [*LOSSES, "FastAP, another power", "SOPRC of scores", "terms of proxies"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused_by_name(name: str, transform: str) -> None:
    use_backend("eager")
    calls: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        "FastAP, another power": lambda: (
            lambda r: losses.FastAPLoss(distance=distances.LpDistance())(r, LABELS)
        ),
        "SOPRC of scores": lambda: lambda r: SOPRCLoss(5)(r, (ROWS > 0).long()),
        "terms of proxies": lambda: (lambda m: lambda r: m.loss_terms(r, LABELS)["pos_loss"]["losses"].sum())(
            ProxyAnchorLoss(4, 5)
        ),
    }
    if name in LOSSES:
        module = LOSSES[name].module(4, ROWS)
        function: Callable[[Tensor], Tensor] = lambda r: module(r, LABELS)  # noqa: E731
    else:
        function = calls[name]()
    with pytest.raises(RuntimeError, match=r"use_backend\('reference'\)"):
        TRANSFORMS[transform](function)
