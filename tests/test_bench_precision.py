"""The precision experiment: its roundings are those of the hardware, its R and gradient those of PNP."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from checks import assert_close, assert_same
from torch.nn import functional as F

from bench import precision
from tritonloss import losses, reference


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, 1.0),
        (1 + 2**-10, 1 + 2**-10),  # the last bit that is left
        (1 + 2**-11, 1.0),  # ties to even
        (1 + 3 * 2**-11, 1 + 2**-9),
        (1 + 2**-11 + 2**-20, 1 + 2**-10),
        (-1 - 2**-11 - 2**-20, -1 - 2**-10),
        (2 - 2**-12, 2.0),  # into the next power of two
        (0.0, 0.0),
    ],
)
def test_rounding_to_tf32(value: float, expected: float) -> None:
    assert_same(precision.rounded_to_tf32(torch.tensor([value])), torch.tensor([expected]))


def test_two_halves_have_16_bits() -> None:
    x = torch.randn(1000)
    hi, lo = precision.halves(x)
    assert float(((hi.double() + lo.double() - x.double()) / x).abs().max()) <= 2**-17


def test_ranks_and_gradient_are_those_of_pnp() -> None:
    rows = F.normalize(precision.unit_rows("half trained", 32, 16, "cpu").double(), dim=1)
    labels = torch.arange(32) // 4
    ranks, slopes = precision.ranks_and_slopes(rows @ rows.T)
    assert_close(ranks.mean(1), reference.pnp(rows, labels)[0], rtol=1e-12)
    leaf = rows.clone().requires_grad_()
    losses.PNPLoss()(leaf, labels).backward()
    grad = precision.gradient(slopes, rows, lambda a, b: a @ b.T)
    tangent = grad - (grad * rows).sum(1, keepdim=True) * rows  # what normalising leaves of it
    assert leaf.grad is not None
    assert_close(tangent, leaf.grad, atol=1e-10 * float(leaf.grad.abs().max()))


@pytest.mark.parametrize("data", precision.DATA)
def test_each_mode_is_worse_than_the_one_before(data: str, device: torch.device) -> None:
    found = precision.errors(precision.unit_rows(data, 64, 64, device.type))
    largest = [error.largest_rank for error in found.values()]
    gradients = [error.gradient for error in found.values()]
    assert list(found) == ["IEEE float32", "bf16x3", "TF32", "bfloat16"]
    assert largest == sorted(largest)
    assert gradients == sorted(gradients)
    # TF32: 2^-11 of a similarity below 1/3 by chance of rounding, times 1 / temperature.
    assert 1e-5 < found["TF32"].largest_rank < 2e-2
    assert found["IEEE float32"].largest_rank < 1e-4


def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "16", "--timed-batch", "16", "--dimension", "8"]
    monkeypatch.setattr(sys, "argv", ["precision", "--out", str(tmp_path), *sizes])
    precision.main()
    (file,) = tmp_path.glob("*.md")
    assert file.read_text() in capsys.readouterr().out
    rows = [line for line in file.read_text().splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(precision.MODES) * len(precision.DATA)
