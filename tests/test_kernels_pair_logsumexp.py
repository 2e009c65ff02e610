"""The block functions of `pair_logsumexp`, kernels and eager, on one block of scores against float64 formulas."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from checks import assert_as_exact_as, assert_close, assert_same
from torch import Tensor

from tritonloss.kernels.pair_logsumexp import BLOCK_OWN, TILE_ROWS
from tritonloss.ops.streaming import empty_scores

# Below, at and above a stride of 16, a tile of positives (128), one of negatives (512 in float64, 1024) and one of the
# backward kernel (512, 2048).
COLUMNS = {torch.float64: [1, 17, 129, 513], torch.float32: [127, 1025, 2100]}
MAPS = {"linear": [[-6.0, 2.5, 0.0], [14.0, -3.0, 0.0]], "circle": [[-20.0, 12.0, 0.8], [20.0, -8.0, 0.8]]}
maps = pytest.mark.parametrize("kind", MAPS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@pytest.fixture(params=["eager", "triton"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"tritonloss.backends.{request.param}_logsumexp")


def ranges_of(n: int) -> list[tuple[int, int, int, int]]:
    """Positives and hidden columns at every edge of a row of n columns; the one, the other or both empty."""
    third, half = n // 3, n // 2
    return [
        (0, 0, 0, 0),
        (n, n, n, n),
        (0, n, 0, 0),
        (0, n, half, half + 1),
        (0, half, 0, 1),
        (half, n, n - 1, n),
        (third, third + 1, third, third + 1),
        (third, min(third + 5, n), half, n),
        (half, min(half + 5, n), 0, third),
        (0, half, 0, n),
        (third, third, half, half + 1),
        (half, n + 40, -3, 2),
    ]


class Block(NamedTuple):
    scores: Tensor
    ranges: Tensor
    maps: Tensor
    grad_positive: Tensor
    grad_negative: Tensor
    grad_positive_scores: Tensor

    def to(self, dtype: torch.dtype) -> Block:
        """A copy whose rows are padded as the walk pads them; what no column belongs to holds NaN."""
        scores = empty_scores(*self.scores.shape, self.scores.to(dtype)).copy_(self.scores)
        return Block(scores, self.ranges, *(t.to(dtype) for t in self[2:]))


def block(n: int, kind: str, device: torch.device, seed: int = 0) -> Block:
    """Cosines, and gradients; those of the slots past the positives of a row, and of hidden ones, are NaN."""
    generator = torch.Generator().manual_seed(seed)
    # The interpreter takes its time: of longer rows every second one.
    ranges = torch.tensor(ranges_of(n)[1::2] if n > 200 else ranges_of(n))
    rows, width = len(ranges), n + 3
    scores = (torch.rand(rows, n, dtype=torch.float64, generator=generator) * 2 - 1).float().double()
    totals = torch.randn(2, rows, dtype=torch.float64, generator=generator).float().double()
    pairs = torch.randn(rows, width, dtype=torch.float64, generator=generator).float().double()
    column = ranges[:, :1] + torch.arange(width)
    is_hidden = (column >= ranges[:, 2:3]) & (column < ranges[:, 3:])
    pairs[(column >= ranges[:, 1:2].clamp(max=n)) | is_hidden] = torch.nan
    numbers = torch.tensor(MAPS[kind], dtype=torch.float64)
    return Block(*(t.to(device) for t in (scores, ranges, numbers, *totals, pairs)))


class Sides(NamedTuple):
    """Which columns are positives, negatives, hidden: [rows, N] bool."""

    own: Tensor
    other: Tensor
    hidden: Tensor


def sides_of(b: Block) -> Sides:
    column = torch.arange(b.scores.shape[1], device=b.scores.device)
    start, stop, hidden_start, hidden_stop = b.ranges[:, :, None].unbind(1)
    hidden = (column >= hidden_start) & (column < hidden_stop)
    own = (column >= start) & (column < stop)
    return Sides(own & ~hidden, ~own & ~hidden, hidden)


def exponents(scores: Tensor, numbers: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """x and its slope."""
    scale, offset, width = numbers
    y = scale * scores + offset
    if kind == "linear":
        return y, torch.ones_like(y) * scale
    factor = torch.relu(y / abs(scale) + width)
    return y * factor, factor * scale


def expected_sums(b: Block, kind: str) -> tuple[Tensor, Tensor]:
    own, other, _ = sides_of(b)
    sums = []
    for mask, numbers in zip((own, other), b.maps, strict=True):
        x, _ = exponents(b.scores, numbers, kind)
        sums.append(torch.logsumexp(torch.where(mask, x, -torch.inf), 1))
    return sums[0], sums[1]


def expected_grad(b: Block, kind: str) -> Tensor:
    own, other, _ = sides_of(b)
    grad = torch.zeros_like(b.scores)
    for mask, numbers, total, weight in zip(
        (own, other), b.maps, expected_sums(b, kind), (b.grad_positive, b.grad_negative), strict=True
    ):
        x, slope = exponents(b.scores, numbers, kind)
        total = torch.where(total == -torch.inf, 0, total)
        grad += torch.where(mask, weight[:, None] * slope * torch.exp(x - total[:, None]), 0)
    for row, (start, *_) in enumerate(b.ranges.tolist()):
        columns = own[row].nonzero().squeeze(1)
        grad[row, columns] += b.grad_positive_scores[row, columns - start]
    return grad


def forward(module: ModuleType, b: Block, kind: str) -> tuple[Tensor, Tensor]:
    sums = b.maps.new_full((2, len(b.scores)), torch.nan)
    module.pair_logsumexp_forward(b.scores, b.ranges, b.maps, kind, *sums)
    return sums[0], sums[1]


def backward(
    module: ModuleType,
    b: Block,
    kind: str,
    sums: tuple[Tensor, Tensor] | None = None,
    with_scores: bool = True,
) -> Tensor:
    grad = empty_scores(*b.scores.shape, b.scores)
    sums = expected_sums(b, kind) if sums is None else sums
    pairs = b.grad_positive_scores if with_scores else None
    module.pair_logsumexp_backward(
        b.scores, b.ranges, b.maps, kind, *sums, b.grad_positive, b.grad_negative, pairs, grad
    )
    return grad


def assert_agree(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Infinities and NaN included."""
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


# Exponents of up to 40 err by 40 * 1e-16, their exponentials relatively by as much, times slopes of up to 40.
FLOAT64 = 1e-12


def test_tiles_are_as_the_widths_above_suppose() -> None:
    assert (BLOCK_OWN.value, TILE_ROWS.value) == (128, 8)


@maps
@pytest.mark.parametrize("n", COLUMNS[torch.float64])
def test_float64(n: int, kind: str, module: ModuleType, device: torch.device) -> None:
    b = block(n, kind, device).to(torch.float64)
    for actual, expected in zip(forward(module, b, kind), expected_sums(b, kind), strict=True):
        assert_agree(actual, expected, FLOAT64)
    assert_agree(backward(module, b, kind), expected_grad(b, kind), FLOAT64)


@maps
@pytest.mark.parametrize("n", COLUMNS[torch.float32])
def test_float32(n: int, kind: str, module: ModuleType, device: torch.device) -> None:
    """At most twice the error of dense float32; an empty sum is -inf on both sides."""
    exact, b = block(n, kind, device), block(n, kind, device).to(torch.float32)
    sums = forward(module, b, kind)
    for actual, rival, truth in zip(sums, expected_sums(b, kind), expected_sums(exact, kind), strict=True):
        assert_same(actual == -torch.inf, truth == -torch.inf)
        assert_as_exact_as(*(t[truth != -torch.inf] for t in (actual, rival, truth)))
    assert_as_exact_as(backward(module, b, kind, sums), expected_grad(b, kind), expected_grad(exact, kind))


@maps
def test_the_derivative_is_that_of_the_sums(kind: str, module: ModuleType, device: torch.device) -> None:
    """Against autograd, with the factor of the circle map held constant."""
    b = block(20, kind, device)
    own, other, _ = sides_of(b)
    leaf = b.scores.clone().requires_grad_()
    sums = []
    for mask, numbers in zip((own, other), b.maps, strict=True):
        x = numbers[0] * leaf + numbers[1]
        if kind == "circle":
            x = x * torch.relu(x / abs(numbers[0]) + numbers[2]).detach()
        has_any = mask.any(1, keepdim=True)
        terms = torch.where(mask, x, -torch.inf)
        sums.append(torch.where(has_any[:, 0], torch.logsumexp(torch.where(has_any, terms, 0), 1), 0))
    (grad,) = torch.autograd.grad(sums, leaf, [b.grad_positive, b.grad_negative])
    assert_agree(backward(module, b.to(torch.float64), kind, with_scores=False), grad, FLOAT64)


@pytest.mark.parametrize(
    ("scale", "dtype"), [(1e3, torch.float32), (1e6, torch.float32), (1e6, torch.float64)]
)
def test_exponents_far_beyond_the_range_of_exp(
    scale: float, dtype: torch.dtype, module: ModuleType, device: torch.device
) -> None:
    """The largest term decides; nothing overflows, whichever tile the largest stands in."""
    b = block(1100, "linear", device).to(dtype)
    b.maps.copy_(torch.tensor([[-scale, 0.0, 0.0], [scale, scale, 0.0]]))
    eps = torch.finfo(dtype).eps
    sums = forward(module, b, "linear")
    for actual, expected in zip(sums, expected_sums(b, "linear"), strict=True):
        assert_close(actual, expected, rtol=8 * eps, atol=8 * eps)
    # The rounding of an exponent of up to 2 * scale is the relative error of its power, whose slope is the scale.
    error = backward(module, b, "linear", sums) - expected_grad(b, "linear")
    assert error.abs().max() <= scale * min(1.0, 32 * 2 * scale * eps)


# NumPy reports what a device computes without a word.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered|All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "dtype"), [("linear", torch.float32), ("circle", torch.float32), ("linear", torch.float64)]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_act_as_in_float64(
    value: float, kind: str, dtype: torch.dtype, module: ModuleType, device: torch.device
) -> None:
    """In a column that is a positive, a negative or hidden, first, within or last, as the ranges of the row have it."""
    b = block(120, kind, device).to(dtype)
    columns = [0, 119, 41, 60, 41, 41, 40, 41, 119, 0, 0, 119]
    b.scores[torch.arange(len(columns), device=device), columns] = value
    exact = b._replace(scores=b.scores.double(), maps=b.maps.double())
    sums, truth = forward(module, b, kind), expected_sums(exact, kind)
    for actual, expected in zip(sums, truth, strict=True):
        assert_agree(actual, expected, 64 * torch.finfo(dtype).eps)
    assert all(total.isfinite().any() for total in truth)
    totals = tuple(t.to(dtype) for t in truth)
    grads = backward(module, b, kind, totals, with_scores=False)
    exact = exact._replace(grad_positive_scores=torch.zeros_like(exact.grad_positive_scores))
    # Exponents of up to 40, slopes of up to 40.
    assert_agree(grads, expected_grad(exact, kind), 4000 * torch.finfo(dtype).eps)


@dtypes
def test_a_row_of_infinities(dtype: torch.dtype, module: ModuleType, device: torch.device) -> None:
    """A sum whose exponents are all -inf is -inf, as one of nothing, and all its derivatives are 0."""
    b = block(120, "linear", device).to(dtype)
    b.maps[0, 0] = 6
    b.scores.fill_(-torch.inf)
    assert all((total == -torch.inf).all() for total in forward(module, b, "linear"))
    assert not backward(module, b, "linear", with_scores=False).any()


def test_hidden_scores_are_not_read(module: ModuleType, device: torch.device) -> None:
    b = block(120, "circle", device).to(torch.float64)
    sums = forward(module, b, "circle")
    grad = backward(module, b, "circle", sums)
    b.scores[sides_of(b).hidden] = torch.nan
    assert_same(forward(module, b, "circle"), sums)
    assert_same(backward(module, b, "circle", sums), grad)
    assert not grad[sides_of(b).hidden].any()


@dtypes
def test_large_sums_of_equal_terms(dtype: torch.dtype, module: ModuleType, device: torch.device) -> None:
    """1099 negatives of exponent 0 and one positive: ln 1099 and 0, to the last digits."""
    b = block(1100, "linear", device).to(dtype)
    b.maps.zero_()[:, 0] = 1
    b.scores.zero_()
    b.ranges.copy_(torch.tensor([0, 1, 0, 0]))
    positive, negative = forward(module, b, "linear")
    assert not positive.any()
    assert_close(negative, torch.full_like(negative, 1099).log(), rtol=4 * torch.finfo(dtype).eps)


def test_nothing_is_written_beside_the_outputs(module: ModuleType, device: torch.device) -> None:
    """Neither to the inputs nor to the padding of the gradient; rows may be far apart."""
    b = block(17, "circle", device).to(torch.float64)
    rows = len(b.scores)
    wide = torch.full((rows, 64), torch.nan, dtype=torch.float64, device=device)
    wide[:, :17] = b.scores
    b = b._replace(scores=wide[:, :17])
    before = [t.clone() for t in b]
    guard = torch.full((rows + 2, 48), 7.0, dtype=torch.float64, device=device)
    sums = torch.full((2, rows + 2), 7.0, dtype=torch.float64, device=device)
    module.pair_logsumexp_forward(b.scores, b.ranges, b.maps, "circle", sums[0, 1:-1], sums[1, 1:-1])
    module.pair_logsumexp_backward(
        b.scores, b.ranges, b.maps, "circle", *sums[:, 1:-1], *b[3:], guard[1:-1, :17]
    )
    assert_same([sums[:, 0], sums[:, -1]], [torch.full_like(sums[:, 0], 7)] * 2)
    assert (guard[[0, -1]] == 7).all()
    assert (guard[:, 17:] == 7).all()
    for now, then in zip(b, before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
    assert_agree(guard[1:-1, :17], expected_grad(b, "circle"), FLOAT64)


def test_blocks_without_positives_or_without_columns(module: ModuleType, device: torch.device) -> None:
    b = block(40, "linear", device).to(torch.float64)
    b.ranges.zero_()
    positive, negative = forward(module, b, "linear")
    assert (positive == -torch.inf).all()
    assert_agree(negative, expected_sums(b, "linear")[1], FLOAT64)
    assert_agree(backward(module, b, "linear"), expected_grad(b, "linear"), FLOAT64)
    empty = b._replace(scores=b.scores[:, :0])
    assert all((total == -torch.inf).all() for total in forward(module, empty, "linear"))


def test_scores_without_a_padded_stride_are_refused(device: torch.device) -> None:
    module = importlib.import_module("tritonloss.backends.triton_logsumexp")
    b = block(17, "linear", device)
    with pytest.raises(ValueError, match="multiple of 16"):
        module.pair_logsumexp_forward(b.scores, b.ranges, b.maps, "linear", b.grad_positive, b.grad_negative)
