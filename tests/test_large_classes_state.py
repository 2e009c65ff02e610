"""The algorithms of large classes: their switch, and what they keep from call to call."""

from __future__ import annotations

import pytest
import torch
from checks import assert_close, assert_same, value_and_grad

from tritonloss import use_backend
from tritonloss.backends import large_classes
from tritonloss.losses import PNPLoss


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_the_switch_leaves_the_direct_loop(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what the loop of the backend gives; the grid differs from it, within its error."""
    for name in ("grid_pays", "sorting_pays"):
        monkeypatch.setattr(large_classes, name, lambda *_: True)
    rows = torch.randn(48, 5, device=device)
    labels = torch.arange(48, device=device) // 16

    def result() -> tuple[torch.Tensor, torch.Tensor]:
        with use_backend(backend):
            return value_and_grad(PNPLoss(), rows, labels)

    on_grid = result()
    monkeypatch.setenv("TRITONLOSS_LARGE_CLASSES", "0")
    switched_off = result()
    monkeypatch.setattr(large_classes, "choose", lambda *_: None)
    assert_same(switched_off, result())
    # The error of the ranks is below 2e-6, the temperature in the gradient 0.01, and some sums round otherwise.
    assert_close(switched_off, on_grid, rtol=1e-4, atol=1e-4)
    assert not torch.equal(switched_off[1], on_grid[1])


@pytest.mark.parametrize("value", ["1", "", "yes"])
def test_any_other_value_leaves_them_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (4096, 512, "sigmoid", torch.float32, torch.device("cuda"))
    assert large_classes.may_pay(*arguments)
    monkeypatch.setenv("TRITONLOSS_LARGE_CLASSES", value)
    assert large_classes.may_pay(*arguments)
    monkeypatch.setenv("TRITONLOSS_LARGE_CLASSES", "0")
    assert not large_classes.may_pay(*arguments)


def test_no_tensor_of_a_device_is_kept() -> None:
    """It could lie in the memory of a CUDA graph. "meta" stands for a device."""
    grid = large_classes.grid_of_range(-1, 1, torch.float32, all_inside=True)
    like = torch.empty(0, device="meta")
    first, second = grid.polynomials(like), grid.polynomials(like)
    assert first.device.type == second.device.type == "meta"
    assert first is not second
    host = torch.empty(0)
    assert grid.polynomials(host) is grid.polynomials(host)


def test_what_is_kept_serves_outside_of_inference_mode() -> None:
    large_classes._polynomials.cache_clear()
    grid = large_classes.grid_of_range(-1, 1, torch.float64, all_inside=True)
    like = torch.empty(0, dtype=torch.float64)
    with torch.inference_mode():
        kept = grid.polynomials(like)
    assert not kept.is_inference()
    # Row k is the coefficient of place^k: the basis polynomials sum to 1.
    assert_close(kept.sum(1), torch.eye(12, dtype=torch.float64)[0], atol=1e-10)
