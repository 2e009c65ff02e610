"""Estimates: the figures to reach on an H200, how they move with sizes and devices, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import tritonloss
from tritonloss import losses, tune
from tritonloss.estimates import DEVICES, LOSSES, Estimate, estimate, main
from tritonloss.ops.panels import gradient_work, products_of, score_work


def one_after_another(found: Estimate) -> float:
    """Seconds if nothing overlapped: neither reading and multiplying, nor reading and the kernels' arithmetic."""
    return found.products_seconds + found.traffic_seconds + found.issue_seconds


@pytest.mark.parametrize(
    ("n", "dtype", "seconds"),
    [
        (32768, torch.bfloat16, 18e-3),
        (131072, torch.bfloat16, 0.3),
        (32768, torch.float32, 27e-3),
        (131072, torch.float32, 0.42),
    ],
)
def test_figures_to_reach(n: int, dtype: torch.dtype, seconds: float) -> None:
    found = estimate(losses.PNPLoss, n, 512, dtype=dtype)
    assert found.seconds <= seconds
    assert found.seconds <= one_after_another(found)
    assert found.bound == "products"
    if n == 131072:
        assert found.panels.rows == 2048
        assert found.memory <= 4e9


def test_ieee_is_bound_by_the_float32_units() -> None:
    found = estimate("PNPLoss", 131072, 512, products="ieee")
    flop = 6 * 131072**2 * 512
    assert found.flop == flop
    assert found.products_seconds == pytest.approx(flop / (0.8 * 66.9e12))
    assert found.seconds > 0.9
    assert found.bound == "products"


def test_by_hand() -> None:
    """One panel that fits L2, so that all that is read is read once."""
    n, d = 1024, 64
    found = estimate("PNPLoss", n, d, per_class=3, dtype=torch.float32, products="ieee")
    pairs, entries = n * n, n * d
    scores, forward, backward = 4 * pairs + 8 * entries, 4 * pairs, 8 * pairs
    gradient = (4 + 20) * pairs + entries * (4 + 8)  # the gradient plus its transpose, multiplied once
    assert found.bytes == scores + forward + backward + gradient
    assert found.flop == 4 * pairs * d
    move, issue = 0.8 * 4.8e12, 2 * 3 * 7.1 * pairs / (0.8 * 33.5e12)
    assert found.issue_seconds == pytest.approx(issue)
    assert found.traffic_seconds == pytest.approx(found.bytes / move)
    multiply = 2 * pairs * d / (0.8 * 66.9e12)
    stages = [
        max(multiply, scores / move),
        max(issue / 2, forward / move),
        max(issue / 2, backward / move),
        max(multiply, gradient / move),
    ]
    assert found.seconds == pytest.approx(sum(stages))
    assert found.memory == 8 * pairs + entries * (4 + 4 + 4 + 4)


def test_a_forward_pass_is_part_of_a_step() -> None:
    step, forward = estimate("PNPLoss", 8192, 256), estimate("PNPLoss", 8192, 256, backward=False)
    assert forward.flop * 5 == step.flop  # 2D of 10D: a gradient has two terms
    assert forward.seconds < step.seconds / 2
    assert forward.memory < step.memory


def test_large_classes_are_bound_by_the_kernels() -> None:
    assert estimate("PNPLoss", 32768, 128, per_class=32).bound == "kernel issue"


def test_little_memory_costs_traffic() -> None:
    tall = estimate("PNPLoss", 131072, 512)
    low = estimate("PNPLoss", 131072, 512, panel_rows=64)
    assert low.bytes > 3 * tall.bytes
    assert low.bound == "traffic"
    assert low == replace(estimate("PNPLoss", 131072, 512, memory_budget=64 * 131072 * 8))


def test_passes_between_the_products() -> None:
    """Beside the reading and writing of scores, gradients and rows."""
    n, d = 16384, 64
    pairs = n * n
    for dtype, passes in ((torch.bfloat16, 16), (torch.float16, 16), (torch.float32, 8)):
        found = estimate("PNPLoss", n, d, dtype=dtype)
        of = products_of("split", dtype)
        sizes = n, n, d, of, DEVICES["H200"].l2
        work = [score_work(found.panels, *sizes), gradient_work(found.panels, *sizes, meet_themselves=True)]
        assert found.bytes - sum(part.bytes for part in work) == (12 + passes) * pairs


def test_proxies() -> None:
    found = estimate(losses.ProxyAnchorLoss, 1024, 64, classes=100)
    assert found.flop == 10 * 1024 * 100 * 64
    assert estimate("ProxyAnchorLoss", 1024, 64, per_class=8).flop == 10 * 1024 * 128 * 64


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_and_device(loss: str, device: str) -> None:
    found = estimate(loss, 4096, 128, device=device.lower())
    assert 0 < found.seconds < math.inf
    assert found.memory > 0
    text = str(found)
    assert text.startswith(f"{loss}, N = 4096, D = 128, bfloat16, forward and backward, on {device}\n")
    assert f"bound by {found.bound}" in text


def test_what_is_known_is_a_loss_of_the_package() -> None:
    """By its own name, or by the one that it derives from."""
    assert set(LOSSES) <= set(tune.LOSSES)
    assert tritonloss.estimate is estimate


class MyLoss(losses.PNPLoss):
    """Costs what its base costs."""


def test_classes_instances_and_names_are_the_same() -> None:
    expected = estimate("PNPLoss", 64, 8)
    for loss in (losses.PNPLoss, losses.PNPLoss(), MyLoss, MyLoss()):
        assert estimate(loss, 64, 8) == expected


def test_a_described_device() -> None:
    half = replace(DEVICES["H200"], name="half", bandwidth=2.4e12)
    assert estimate("PNPLoss", 64, 8, device=half).traffic_seconds == pytest.approx(
        2 * estimate("PNPLoss", 64, 8).traffic_seconds
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "TripletLoss"}, r"^loss is 'TripletLoss': expected one of PNPLoss, "),
        ({"loss": torch.nn.Linear}, r"^loss is <class .*Linear'>: expected one of"),
        ({"device": "TPU"}, r"^device is 'TPU': expected one of A100, .*, or a DeviceSpec$"),
        ({"products": "auto"}, r"^products is 'auto'"),
        ({"dtype": torch.int32}, r"dtype torch.int32"),
        ({"n": 0}, r"^n is 0: expected at least 1$"),
        ({"d": 0}, r"^d is 0"),
        ({"per_class": 0}, r"^per_class is 0"),
        ({"classes": 0}, r"^classes is 0"),
        ({"memory_budget": 0}, r"^memory_budget is 0"),
        ({"panel_rows": -1}, r"^panel_rows is -1"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate(**{"loss": "PNPLoss", "n": 8, "d": 8, **arguments})


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "SmoothAPLoss",
            "4096",
            "128",
            "--device",
            "RTX 4060",
            "--dtype",
            "float16",
            "--forward",
            "--per-class",
            "8",
        ]
    )
    expected = estimate(
        "SmoothAPLoss", 4096, 128, device="RTX 4060", dtype=torch.float16, backward=False, per_class=8
    )
    assert capsys.readouterr().out == f"{expected}\n"


def test_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["PNPLoss", "0", "128"])
    assert "n is 0: expected at least 1" in capsys.readouterr().err
