"""RecallAtKLoss and SupAPLoss: published values, those of the authors' code, the dense oracle, and bad options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import assert_close, value_and_grad
from inputs import E1, E3, Batch, random_batch

from tritonloss import use_backend
from tritonloss.functional import recall_at_k_loss, sup_ap_loss
from tritonloss.losses import RecallAtKLoss, SupAPLoss

BATCH = random_batch(22, 5, 5, n_lone=3)
E3L = E3.labelled(0, 0, 0, 0, 1, 2)


def sines(n: int) -> Batch:
    """[n, 5], sin(0.7 k + 1) in the order of the rows, and four rows per class: what the authors' code was run on."""
    rows = torch.sin(0.7 * torch.arange(5 * n, dtype=torch.float64) + 1).view(n, 5)
    return Batch(rows, torch.arange(n) // 4)


@pytest.fixture(params=["eager", "triton", "reference"])
def any_backend(request: pytest.FixtureRequest, clean_state: None) -> str:
    use_backend(request.param)
    return request.param


@pytest.mark.parametrize(
    ("data", "value"), [(E1, 0.499999987895), (E3, 0.604671598574), (E3L, 0.299345499691)]
)
def test_golden_values_of_recall(data: Batch, value: float, any_backend: str, device: torch.device) -> None:
    assert_close(
        RecallAtKLoss((1, 2))(*data.on(device)).item(), value, atol=6e-13
    )  # printed to twelve digits


@pytest.mark.parametrize(
    ("n", "value", "norm"), [(12, 0.709668156241, 0.273903220042), (24, 0.890695038932, 0.149479865040)]
)
def test_recall_of_the_authors(
    n: int, value: float, norm: float, any_backend: str, device: torch.device
) -> None:
    """github.com/yash0307/RecallatK_surrogate at ed05202, src/losses.py in float64, summed over the queries.

    It counts the query itself as one that stands above, so that 1 was taken from its ranks: what is left is
    sigmoid((1 - s) / temperature) - 1, below 1e-6 where s < 0.86, in a rank.
    """
    loss, grad = value_and_grad(RecallAtKLoss(), *sines(n).on(device))
    assert_close(loss.item(), value, atol=1e-6)
    assert_close(grad.norm().item(), norm, atol=1e-6)


@pytest.mark.parametrize(
    ("n", "options", "value", "norm"),
    [
        (12, {}, 0.710556832031, 0.336219546936),
        (12, {"offset": 1.44}, 0.710332661134, 0.342633140635),
        (12, {"start": 0.0, "offset": 1.0}, 0.703653335310, 0.417208804745),
        (12, {"temperature": 0.1}, 0.743308722566, 0.386248912529),
        (24, {"temperature": 0.1, "rho": 10, "delta": 0.2}, 0.819435726575, 0.035659858565),
    ],
)
def test_sup_ap_of_the_authors(
    n: int, options: dict[str, Any], value: float, norm: float, any_backend: str, device: torch.device
) -> None:
    """github.com/elias-ramzi/ROADMAP at fed37d7, SupAP.general_forward in float64."""
    loss, grad = value_and_grad(SupAPLoss(**options), *sines(n).on(device))
    assert_close(loss.item(), value, atol=6e-13)
    assert_close(grad.norm().item(), norm, atol=6e-13)


CASES = {
    "recall": (recall_at_k_loss, {"temperature": 0.1}),
    "recall, one width per k": (
        recall_at_k_loss, {"ks": (1, 3), "rank_temperature": (0.5, 2), "temperature": 0.1},
    ),
    "SupAP": (sup_ap_loss, {"temperature": 0.1}),
    "SupAP with a line from 0 on": (sup_ap_loss, {"temperature": 0.1, "delta": 0, "offset": 1.5}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("backend", "budget"), [("eager", 1), ("eager", None), ("triton", 6144)])
def test_equals_the_definition(
    name: str, backend: str, budget: int | None, device: torch.device, clean_state: None
) -> None:
    """Value and gradient of every query; sums of at most 22 x 9 terms of about 1, a gradient over the temperature."""
    function, options = CASES[name]
    rows, labels = BATCH.on(device)
    weights = torch.linspace(-1, 2, 22, dtype=torch.float64, device=device)
    for reduction in ("mean", "none"):

        def loss(e: torch.Tensor, y: torch.Tensor, reduction: str = reduction, **more: Any) -> torch.Tensor:
            found = function(e, y, **options, reduction=reduction, **more)
            return found if reduction == "mean" else found @ weights

        with use_backend("reference"):
            expected = value_and_grad(loss, rows, labels)
        with use_backend(backend):
            actual = value_and_grad(lambda e, y, f=loss: f(e, y, memory_budget=budget), rows, labels)
        assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_recall_is_a_count_where_sigmoids_are_steps(any_backend: str, device: torch.device) -> None:
    """With temperatures of 1e-4 and 1e-3 the loss is 1 - the recalls counted by hand, half a hit at rank k."""
    rows, labels = random_batch(12, 4, 4).on(device)
    unit = rows / rows.norm(dim=1, keepdim=True)
    s = (unit @ unit.T).fill_diagonal_(-2)
    ranks = s.argsort(1, descending=True).argsort(1) + 1
    is_positive = (labels[:, None] == labels).fill_diagonal_(False)
    recalls = []
    for k in (1, 2, 4):
        hits = ((ranks < k).double() + 0.5 * (ranks == k)) * is_positive
        recalls.append(hits.sum(1).clamp(max=k) / is_positive.sum(1).clamp(max=k))
    expected = 1 - torch.stack(recalls).mean(0)[is_positive.any(1)].mean()
    assert_close(RecallAtKLoss((1, 2, 4), 1e-3, 1e-4)(rows, labels).item(), expected.item(), atol=1e-9)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"ks": ()}, ValueError, "ks is empty"),
        ({"ks": 1}, TypeError, "ks must be a sequence of ints, got int"),
        ({"ks": (1, 0)}, ValueError, "ks is 0: expected at least 1"),
        ({"ks": (1.5,)}, TypeError, "ks must be an int, got float"),
        ({"rank_temperature": 0}, ValueError, "rank_temperature is 0: expected a number above 0"),
        ({"rank_temperature": (1, 2)}, ValueError, "rank_temperature has 2 numbers: expected one, or 4"),
        ({"temperature": -1}, ValueError, "temperature is -1: expected a number above 0"),
    ],
)
def test_options_of_recall_are_checked(
    options: dict[str, Any], kind: type[Exception], message: str, device: torch.device
) -> None:
    with pytest.raises(kind, match=message):
        RecallAtKLoss(**options)
    with pytest.raises(kind, match=message):
        recall_at_k_loss(*E1.on(device), **options)


@pytest.mark.parametrize("name", ["rho", "delta", "start", "offset"])
def test_options_of_sup_ap_are_checked(name: str, device: torch.device) -> None:
    for value, kind in ((-1, ValueError), (float("inf"), ValueError), ("1", TypeError)):
        with pytest.raises(kind, match=f"{name} (is|must be)"):
            SupAPLoss(**{name: value})
        with pytest.raises(kind, match=f"{name} (is|must be)"):
            sup_ap_loss(*E1.on(device), **{name: value})
