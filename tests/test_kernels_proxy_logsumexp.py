"""The block functions of `proxy_logsumexp`, kernels and eager, on one block of scores against float64 formulas."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from checks import assert_as_exact_as, assert_close, assert_same
from torch import Tensor

from tritonloss.ops.streaming import empty_scores

FIRST = 3  # the class of the block's first row
ROWS = 4
# Below, at and above one tile of 1024 columns, and rows that are not a multiple of the 16 elements of a stride.
COLUMNS = [1, 15, 16, 17, 1000, 1024, 1025, 2100]


@pytest.fixture(params=["eager", "triton"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"tritonloss.backends.{request.param}")


class Block(NamedTuple):
    scores: Tensor
    labels: Tensor
    offsets: Tensor
    grad_positive: Tensor
    grad_negative: Tensor

    def to(self, dtype: torch.dtype) -> Block:
        """A copy whose rows are padded as the walk pads them."""
        scores = empty_scores(*self.scores.shape, self.scores.to(dtype)).copy_(self.scores)
        rest = [t if t is self.labels else t.to(dtype) for t in self[1:]]
        return Block(scores, *rest)


def block(columns: int, device: torch.device, spread: float = 10.0, seed: int = 0) -> Block:
    """Scores of standard deviation `spread`; classes 0 .. 9, of which the block has rows for 3 .. 6; a few left out."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).float().double()

    labels = torch.randint(0, 10, (columns,), generator=generator)
    offsets = normal(columns)
    offsets[torch.rand(columns, generator=generator) < 0.1] = -torch.inf
    parts = spread * normal(ROWS, columns), labels.int(), offsets, normal(ROWS), normal(ROWS)
    return Block(*(t.to(device) for t in parts))


def expected_sums(b: Block) -> tuple[Tensor, Tensor]:
    """ln(1 + sum) of the own and of the other columns, in the dtype of the block: [rows] each."""
    is_own = b.labels == FIRST + torch.arange(len(b.scores), device=b.labels.device)[:, None]
    one = torch.zeros_like(b.scores[:, :1])
    own = torch.where(is_own, b.offsets - b.scores, -torch.inf)
    other = torch.where(is_own, -torch.inf, b.offsets + b.scores)
    return tuple(torch.logsumexp(torch.cat([one, x], 1), 1) for x in (own, other))


def expected_grad(b: Block) -> Tensor:
    leaf = b.scores.detach().requires_grad_()
    sums = expected_sums(b._replace(scores=leaf))
    return torch.autograd.grad(sums, leaf, [b.grad_positive, b.grad_negative])[0]


def forward(module: ModuleType, b: Block) -> tuple[Tensor, Tensor]:
    sums = b.offsets.new_full((2, ROWS), torch.nan)
    module.proxy_logsumexp_forward(b.scores, FIRST, b.labels, b.offsets, *sums)
    return sums[0], sums[1]


def backward(module: ModuleType, b: Block) -> Tensor:
    grad = empty_scores(*b.scores.shape, b.scores)
    sums = expected_sums(b)
    module.proxy_logsumexp_backward(
        b.scores, FIRST, b.labels, b.offsets, *sums, b.grad_positive, b.grad_negative, grad
    )
    return grad


# Exponents of up to 50 err by 50 * 1e-16, and their exponentials relatively by as much; a margin of a hundred.
FLOAT64 = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("spread", [0.1, 10.0])
def test_float64(columns: int, spread: float, module: ModuleType, device: torch.device) -> None:
    b = block(columns, device, spread).to(torch.float64)
    assert_close(forward(module, b), expected_sums(b), **FLOAT64)
    assert_close(backward(module, b), expected_grad(b), **FLOAT64)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("spread", [0.1, 10.0])
def test_float32(columns: int, spread: float, module: ModuleType, device: torch.device) -> None:
    exact, b = block(columns, device, spread), block(columns, device, spread).to(torch.float32)
    for actual, rival, truth in zip(forward(module, b), expected_sums(b), expected_sums(exact), strict=True):
        assert_as_exact_as(actual, rival, truth)
    assert_as_exact_as(backward(module, b), expected_grad(b), expected_grad(exact))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [1e3, 1e6])
def test_exponents_far_beyond_the_range_of_exp(
    spread: float, dtype: torch.dtype, module: ModuleType, device: torch.device
) -> None:
    """The largest term decides; nothing overflows, whichever tile the largest stands in."""
    b = block(2100, device, spread).to(dtype)
    # The rounding of an exponent of 5 * spread is its error in the gradient: relative to 1, so absolute here.
    rounding = 5 * spread * torch.finfo(dtype).eps
    assert_close(forward(module, b), expected_sums(b), rtol=4 * torch.finfo(dtype).eps)
    assert_close(backward(module, b), expected_grad(b), atol=8 * rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_sums_keep_their_digits(dtype: torch.dtype, module: ModuleType, device: torch.device) -> None:
    """ln(1 + 1e-13) is 1e-13, not 0."""
    b = block(17, device).to(dtype)
    size = torch.tensor([[-30.0], [-20.0], [-10.0], [-3.0]], dtype=dtype, device=device)
    is_own = b.labels == FIRST + torch.arange(ROWS, device=device)[:, None]
    b.scores.copy_(torch.where(is_own, -size, size))
    terms = torch.exp((b.offsets + size).double())
    exact = [torch.log1p((terms * side).sum(1)) for side in (is_own, ~is_own)]
    # An exponent of -30 plus an offset of order 1 is rounded by 32 * eps / 2, its exponential as much again.
    assert_close(forward(module, b), exact, rtol=64 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("side", ["no own", "only own"])
def test_one_side_empty(side: str, module: ModuleType, device: torch.device) -> None:
    b = block(20, device).to(torch.float64)
    b.labels.fill_(-1 if side == "no own" else FIRST)
    positive, negative = forward(module, b)
    assert_close((positive, negative), expected_sums(b), **FLOAT64)
    if side == "no own":
        assert not positive.any()
    else:
        assert positive[0] > 0
        assert not positive[1:].any()
        assert negative[0] == 0
    assert_close(backward(module, b), expected_grad(b), **FLOAT64)


def test_every_column_left_out(module: ModuleType, device: torch.device) -> None:
    b = block(1030, device).to(torch.float32)
    b.offsets.fill_(-torch.inf)
    assert not any(t.any() for t in forward(module, b))
    assert not backward(module, b).any()


def test_any_label_is_safe(module: ModuleType, device: torch.device) -> None:
    """Labels are compared, never used as an address."""
    b = block(1030, device).to(torch.float64)
    extreme = [-(2**31), 2**31 - 1, -1, 10**9]
    b.labels.copy_(torch.tensor(extreme, device=device).repeat(258)[:1030])
    assert_close(forward(module, b), expected_sums(b), **FLOAT64)
    assert_close(backward(module, b), expected_grad(b), **FLOAT64)


def test_nothing_is_written_beside_the_outputs(module: ModuleType, device: torch.device) -> None:
    """Neither to the inputs nor to the padding of the gradient."""
    b = block(17, device).to(torch.float64)
    before = [t.clone() for t in b]
    guard = torch.full((ROWS + 2, 48), 7.0, dtype=torch.float64, device=device)
    sums = torch.full((2, ROWS + 2), 7.0, dtype=torch.float64, device=device)
    module.proxy_logsumexp_forward(b.scores, FIRST, b.labels, b.offsets, sums[0, 1:-1], sums[1, 1:-1])
    module.proxy_logsumexp_backward(
        b.scores, FIRST, b.labels, b.offsets, *sums[:, 1:-1], *b[3:], guard[1:-1, :17]
    )
    assert_same([sums[:, 0], sums[:, -1]], [torch.full_like(sums[:, 0], 7)] * 2)
    assert (guard[[0, -1]] == 7).all()
    assert (guard[:, 17:] == 7).all()
    assert_same(list(b), before)


def test_nan_of_a_column_reaches_its_rows_only(module: ModuleType, device: torch.device) -> None:
    b = block(1030, device).to(torch.float32)
    b.offsets.clamp_(min=-1)
    b.scores[2, 5] = torch.nan
    positive, negative = forward(module, b)
    is_nan = (positive + negative).isnan()
    assert is_nan.tolist() == [False, False, True, False]
    assert backward(module, b)[[0, 1, 3]].isfinite().all()


def test_scores_without_a_padded_stride_are_refused(device: torch.device) -> None:
    module = importlib.import_module("tritonloss.backends.triton")
    b = block(17, device)
    with pytest.raises(ValueError, match="multiple of 16"):
        module.proxy_logsumexp_forward(b.scores, FIRST, b.labels, b.offsets, b.grad_positive, b.grad_negative)
