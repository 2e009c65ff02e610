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
from tritonloss.ops import products


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


def test_rounding_towards_zero() -> None:
    ulp = 2.0**-23
    x = torch.tensor([1 + 0.9 * ulp, -1 - 0.9 * ulp, 1 + ulp, 0.0, -3e-20], dtype=torch.float64)
    found = precision.towards_zero(x)
    assert_same(found[:4], torch.tensor([1, -1, 1 + ulp, 0], dtype=torch.float64))
    assert_same(found.float().double(), found)
    assert bool((found.abs() <= x.abs()).all())


def test_sums_of_a_tensor_core() -> None:
    """One and a sum of 16 numbers, each too small beside it: added in one group they are not lost."""
    a = torch.full((1, 32), 2.0**-13, dtype=torch.bfloat16)
    a[0, 0] = 1
    b = torch.full((32, 1), 2.0**-11, dtype=torch.bfloat16)
    b[0] = 1
    small = 2.0**-24
    out = torch.full((1, 1), 8.0)
    precision.tensor_core(16)(out, a, b, 2.0, 0.0)
    assert float(out) == 2 * (1 + 14 * small + 16 * small)  # 15 of them, rounded down to 14, then 16
    precision.tensor_core(1)(out, a, b, 3.0, 0.5)
    assert (
        float(out) == 4 + 32 * small
    )  # one by one all are lost; 30 is rounded to what float32 holds beside 4


def test_split_products_are_as_exact_as_ieee() -> None:
    """For every input and kind of embeddings R is at most 1.6 times as wrong, and the gradient by 1e-5 of its norm."""
    found = precision.accumulation(256, 128, precision.DEPTH, "cpu")
    assert list(found) == ["bfloat16", "float16", "float32"]
    for by_data in found.values():
        assert list(by_data) == ["random", "half trained", "trained", "collapsed"]
        for of in by_data.values():
            assert of["split"].largest_rank <= 1.6 * of["ieee"].largest_rank
            assert of["split"].gradient <= 1e-5
            assert of["ieee"].gradient <= 1e-5


@pytest.mark.parametrize("dtype", precision.INPUTS.values(), ids=str)
def test_smaller_groups_are_rounded_more_often(dtype: torch.dtype) -> None:
    rows = precision.embeddings("half trained", 128, 256, dtype, "cpu")
    errors = {}
    for depth in (4, 16, 256):
        with precision.multiplying(precision.tensor_core(depth)):
            errors[depth] = precision.split_errors(rows, "split")
    median = {depth: error.median_rank for depth, error in errors.items()}
    assert median[256] < median[16] < median[4] < 6 * median[16]
    assert all(error.gradient <= 1e-5 for error in errors.values())


def test_emulation_is_taken_back() -> None:
    with precision.multiplying(precision.tensor_core(4)):
        assert products.split_unusable(torch.device("cpu")) is None
    assert products.split_unusable(torch.device("cpu")) is not None


def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "16", "--split-batch", "16", "--timed-batch", "16", "--dimension", "8"]
    monkeypatch.setattr(sys, "argv", ["precision", "--out", str(tmp_path), *sizes])
    precision.main()
    (file,) = tmp_path.glob("*.md")
    assert file.read_text() in capsys.readouterr().out
    rows = [line for line in file.read_text().splitlines() if line.startswith("|")]
    of_modes = 2 + len(precision.MODES) * len(precision.DATA)
    assert len(rows) == of_modes + 2 + len(precision.INPUTS) * (1 + len(precision.DATA))
