"""The factorised sigmoid of `soft_rank`: relative errors against float64, on embeddings and at the limits of its range.

A tile is summed in one of four ways: with ratios and a reciprocal for two keys; key by key; counted; left out. Every
test runs with the interpreter's arithmetic and, without a GPU, with one that errs as much as the instructions behind
FAST_MATH may.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import test_kernels_soft_rank as kernel_tests
import torch
import triton
import triton.language as tl
from test_kernels_soft_rank import Block, backward, forward, padded_rows
from torch import Tensor

from tritonloss.kernels import surrogates as surrogates_module

# In units of 2^-23: by the PTX manual 2 for each exponential (one of the key, two of the positive) and 1 for the
# reciprocal; 4 for the denominator and the quotients; the rest for the sums, whose error grows with the square root of
# their terms.
RANK_ERROR = 2e-6  # 17 units
SLOPE_ERROR = 1e-5
SMALLEST = 2.0**-126  # what is below may be 0, each time


@triton.jit
def loose_reciprocal(x, FAST_MATH: tl.constexpr):
    """rcp.approx.ftz at its worst: one unit in the last place off, up or down by a bit of the result."""
    result = 1.0 / x
    up = (result.to(tl.int32, bitcast=True) & 4) != 0
    result *= tl.where(up, 1.0 + 2.0**-23, 1.0 - 2.0**-23)
    return tl.where(result < 1.1754944e-38, 0.0, result)


@triton.jit
def loose_power_of_two(x, FAST_MATH: tl.constexpr):
    """ex2.approx.ftz at its worst: a relative error of 2^-22."""
    result = tl.exp2(tl.minimum(x, 127.0, propagate_nan=tl.PropagateNan.ALL))
    up = (result.to(tl.int32, bitcast=True) & 4) != 0
    result *= tl.where(up, 1.0 + 2.0**-22, 1.0 - 2.0**-22)
    return tl.where(x > 127, float("inf"), tl.where(result < 1.1754944e-38, 0.0, result))


@pytest.fixture(autouse=True, params=["IEEE", "fast"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if request.param == "fast" and torch.version.hip is not None:
        pytest.skip("the fast form is for NVIDIA")
    monkeypatch.setattr(kernel_tests, "FAST_MATH", request.param == "fast")
    if device.type == "cpu" and request.param == "fast":
        monkeypatch.setattr(surrogates_module, "reciprocal", loose_reciprocal)
        monkeypatch.setattr(surrogates_module, "power_of_two", loose_power_of_two)


def block_of(rows: Tensor, of_rows: list[tuple[int, int]], device: torch.device) -> Block:
    """Float32 scores [rows, n], and the range of the positives of each row.

    Scores are rounded to 23 bits of the largest one, so that float32 holds every difference: else the rounding of a
    difference, which is the resolution of the scores themselves, would be measured with the kernel.
    """
    largest = rows[rows.isfinite()].abs().max().clamp(min=1)
    grid = 2.0 ** (torch.ceil(torch.log2(largest)) - 23)
    scores = padded_rows(*rows.shape, torch.empty(0, dtype=torch.float32, device=device), math.nan)
    scores.copy_(torch.round(rows.double() / grid) * grid)
    start, count = torch.tensor(of_rows, dtype=torch.int64, device=device).T.contiguous()
    return Block(scores, start, count, count.cumsum(0) - count, int(count.sum()))


def is_negative(b: Block) -> Tensor:
    column, first = torch.arange(b.scores.shape[1]), b.start.cpu()[:, None]
    return (column < first) | (column >= first + b.count.cpu()[:, None])


def derivative(x: Tensor) -> Tensor:
    """Of the sigmoid. Autograd's s (1 - s) cancels where s is nearly 1."""
    return torch.sigmoid(x) * torch.sigmoid(-x)


def exact_forward(b: Block) -> dict[str, Tensor]:
    scores, negative = b.scores.double().cpu(), is_negative(b)
    of = [scores[r, negative[r]] - scores[r, ~negative[r]][:, None] for r in range(len(scores))]
    return {
        "ranks": torch.cat([torch.sigmoid(x).sum(1) for x in of]),
        "slopes": torch.cat([derivative(x).sum(1) for x in of]),
    }


def exact_negative_grad(b: Block, weights: Tensor) -> Tensor:
    """d sum(weights * ranks) / d scores [rows, n], right where a key is a negative."""
    scores, negative = b.scores.double().cpu(), is_negative(b)
    rows = []
    for r, row in enumerate(scores):
        weight = weights.double().cpu()[b.pairs(r), None]
        rows.append((weight * derivative(row - row[~negative[r]][:, None])).sum(0))
    return torch.stack(rows)


def assert_exact(b: Block, block_p: int, block_n: int) -> dict[str, Tensor]:
    """Ranks and slopes against float64, relative to each of them."""
    outputs = forward(b, "sigmoid", block_p, block_n)
    exact = exact_forward(b)
    for name, bound in (("ranks", RANK_ERROR), ("slopes", SLOPE_ERROR)):
        actual, expected = outputs[name].double().cpu(), exact[name]
        slack = SMALLEST * b.scores.shape[1]
        excess = (actual - expected).abs() - (bound * expected.abs() + slack)
        worst = int(excess.argmax())
        assert excess[worst] <= 0, f"{name}[{worst}] is {actual[worst]:.9g}, exactly {expected[worst]:.9g}"
    return outputs


# --- embeddings ---


def embeddings(kind: str, n_classes: int, per_class: int, dim: int) -> Tensor:
    """Unit rows [n_classes * per_class, dim], those of a class together; float64."""
    centre = torch.randn(n_classes, 1, dim, dtype=torch.float64) / dim**0.5
    noise = torch.randn(n_classes, per_class, dim, dtype=torch.float64) / dim**0.5
    if kind == "collapsed":
        rows = torch.ones(dim, dtype=torch.float64) + 1e-3 * noise
    else:
        rows = centre * {"random": 0.0, "half trained": 1.0, "trained": 4.0}[kind] + noise
    return torch.nn.functional.normalize(rows.reshape(-1, dim))


@pytest.mark.parametrize("temperature", [0.01, 0.001])
@pytest.mark.parametrize("kind", ["random", "half trained", "trained", "collapsed"])
def test_embeddings(kind: str, temperature: float, device: torch.device) -> None:
    n_classes, n_queries = (150, 6) if device.type == "cpu" else (2000, 2000)
    rows = embeddings(kind, n_classes, 4, 128)
    queries = torch.arange(n_queries) * (4 * n_classes // n_queries)
    b = block_of(rows[queries] @ rows.T / temperature, [(int(q) // 4 * 4, 4) for q in queries], device)
    outputs = assert_exact(b, 4, 128)
    grads = {name: torch.randn_like(outputs["ranks"]) for name in ("ranks", "positives")}
    grad = backward(b, outputs, grads, "sigmoid", 4, 128).double().cpu()
    # Relative to the gradient with every weight positive: weights of both signs may cancel.
    exact, size = exact_negative_grad(b, grads["ranks"]), exact_negative_grad(b, grads["ranks"].abs())
    assert ((grad - exact).abs() <= SLOPE_ERROR * size + 100 * SMALLEST)[is_negative(b)].all()


@triton.jit
def no_sigmoid(difference, FAST_MATH: tl.constexpr):
    """In place of the form for one key at a time."""
    return difference * float("nan"), difference * float("nan")


@pytest.mark.parametrize("kind", ["random", "half trained", "trained", "collapsed"])
def test_embeddings_take_the_common_path(
    kind: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A query is among its own positives, 100 temperatures above the others before training."""
    if device.type != "cpu":
        pytest.skip("a compiled kernel keeps its functions")
    monkeypatch.setattr(surrogates_module, "sigmoid", no_sigmoid)
    rows = embeddings(kind, 150, 4, 512)
    queries = torch.arange(0, 600, 100)
    b = block_of(rows[queries] @ rows.T / 0.01, [(int(q), 4) for q in queries], device)
    outputs = forward(b, "sigmoid", 4, 128)
    grads = {name: torch.full_like(outputs["ranks"], 1e-4) for name in ("ranks", "positives")}
    for result in (outputs["ranks"], outputs["slopes"], backward(b, outputs, grads, "sigmoid", 4, 128)):
        assert result.isfinite().all()


# --- the limits of the ranges ---


@pytest.mark.parametrize("spread", [0.0, 5.0, 40.0, 52.0, 70.0, 90.0, 400.0])
def test_keys_anywhere_around_positives_of_any_spread(spread: float, device: torch.device) -> None:
    """Rows whose keys all lie at one distance above the lowest positive, so that nothing larger hides their error."""
    distances = [
        -400,
        -100,
        -87.4,
        -80,
        -60,
        -45,
        -20,
        -1,
        0,
        1,
        20,
        43,
        44.5,
        48,
        49.5,
        57.5,
        70,
        86,
        89,
        135,
        600,
    ]
    rows = torch.tensor(distances)[:, None] + torch.rand(len(distances), 44) * 0.5
    rows[:, 20:24] = spread * torch.tensor([0.4, 0.0, 1.0, 0.7])
    assert_exact(block_of(rows, [(20, 4)] * len(distances), device), 4, 16)


WEIGHTS = {
    "equal": lambda: torch.ones(4),
    "of a mean": lambda: torch.full((4,), 2.0**-20),
    "of both signs": lambda: torch.randn(4),
    "down to 2^-100": lambda: 2 ** (-100 * torch.rand(4)),
    "up to 2^31": lambda: 2 ** (31 * torch.rand(4)),
    "beyond 2^32": lambda: 2 ** (20 * torch.rand(4) + 20),
    "some 0": lambda: torch.tensor([0.0, 1.0, 0.0, 1e-9]),
}


@pytest.mark.parametrize("arithmetic", ["fast"], indirect=True)  # the larger errors; it takes 2 s a case
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("spread", [0.0, 50.0, 90.0])
def test_gradients_of_keys_anywhere_around_positives(
    spread: float, weights: Callable[[], Tensor], device: torch.device
) -> None:
    """As above; in the second half of the rows any two keys share a reciprocal."""
    distances = torch.tensor([-400, -87.4, -80, -45, -1, 0, 20, 30, 36, 39, 41, 43, 44.5, 57, 86, 135])
    alike = distances[:, None].expand(-1, 40)
    rows = torch.cat([alike, distances[torch.randint(len(distances), alike.shape)]])
    rows = rows + 0.5 * torch.rand(rows.shape)
    rows[:, 20:24] = spread * torch.tensor([0.4, 0.0, 1.0, 0.7])
    b = block_of(rows, [(20, 4)] * len(rows), device)
    outputs = forward(b, "sigmoid", 4, 16)
    weight = torch.cat([weights()[torch.randperm(4)] for _ in rows]).to(device)
    grads = {"ranks": weight, "positives": torch.zeros_like(weight)}
    grad = backward(b, outputs, grads, "sigmoid", 4, 16).double().cpu()
    # Relative to the gradient with every weight positive, beside what float32 rounds to 0 before it meets a weight.
    exact, size = exact_negative_grad(b, weight), exact_negative_grad(b, weight.abs())
    slack = 4 * SMALLEST * float(weight.abs().max().clamp(min=1))
    assert ((grad - exact).abs() <= SLOPE_ERROR * size + slack)[is_negative(b)].all()


def test_one_key_at_a_time(device: torch.device) -> None:
    """The rounding of an exponent, 1.3e-6 at a distance of 30 and more further away, does not average out."""
    rows = torch.full((40, 34), -1e4)
    rows[:, 0] = 0.0
    rows[:, 33] = torch.linspace(-85.0, 85.0, 40)
    b = block_of(rows, [(0, 1)] * 40, device)
    b.scores[:, 33] = rows[:, 33]  # differences to 0 need no rounding
    assert_exact(b, 1, 16)


@pytest.mark.parametrize("size", [10.0, 100.0, 1000.0])
def test_a_few_keys_that_decide(size: float, device: torch.device) -> None:
    """Three keys anywhere, among many far below: tiles of every kind in a row, and ranks of every size."""
    rows = torch.full((12, 100), -3 * size) - torch.rand(12, 100)
    columns = torch.randint(4, 100, (12, 3))
    rows.scatter_(1, columns, size * (torch.rand(12, 3) - 0.5))
    rows[:, :4] = 0.3 * size * torch.rand(12, 4)
    assert_exact(block_of(rows, [(0, 4)] * 12, device), 4, 16)


def test_scores_far_from_zero(device: torch.device) -> None:
    """Scores of 1000, as at a temperature of 0.001, whose differences are of the size of one."""
    rows = 1000 + torch.randn(6, 90)
    assert_exact(block_of(rows, [(7, 4)] * 6, device), 4, 16)


def test_saturated_tiles_are_counted(device: torch.device) -> None:
    """Exactly: summed, each of the 9728 ones would be 1 within a rounding. What else is in the row is summed."""
    rows = torch.full((1, 10_240), 95.0)
    rows[:, :512] = -200.0
    rows[:, :2] = torch.tensor([0.0, 3.0])
    b = block_of(rows, [(0, 2)], device)
    for with_slopes in (True, False):
        assert forward(b, "sigmoid", 2, 512, with_slopes=with_slopes)["ranks"].tolist() == [9728.0] * 2
    rows[:, 2] = 1.5
    assert_exact(block_of(rows, [(0, 2)], device), 2, 512)


# --- numbers that are none ---


@pytest.mark.parametrize("level", [-500.0, 0.0, 95.0], ids=["left out", "summed", "counted"])
@pytest.mark.parametrize("column", [16, 24, 39])
def test_a_nan_is_not_lost_in_a_tile(level: float, column: int, device: torch.device) -> None:
    rows = torch.full((2, 48), level)
    rows[:, 2:4] = torch.tensor([0.0, 1.0])
    rows[0, column] = math.nan
    b = block_of(rows, [(2, 2)] * 2, device)
    outputs = forward(b, "sigmoid", 2, 16)
    for name in ("ranks", "slopes"):
        assert outputs[name].isnan().tolist() == [True, True, False, False]
    grads = {name: torch.ones_like(outputs["ranks"]) for name in ("ranks", "positives")}
    grad = backward(b, outputs, grads, "sigmoid", 2, 16)
    assert grad[:, 4:].isnan().nonzero().tolist() == [[0, column - 4]]


@pytest.mark.parametrize("level", [-500.0, 0.0, 95.0], ids=["left out", "summed", "counted"])
def test_a_nan_positive_is_not_lost(level: float, device: torch.device) -> None:
    for spread in (1.0, 90.0):
        rows = torch.full((1, 48), level)
        rows[:, 2:5] = torch.tensor([0.0, math.nan, -spread])
        b = block_of(rows, [(2, 3)], device)
        outputs = forward(b, "sigmoid", 4, 16)
        assert outputs["ranks"].isnan().tolist() == [False, True, False]
        assert outputs["slopes"].isnan().tolist() == [False, True, False]
        ones = {name: torch.ones_like(outputs["ranks"]) for name in ("ranks", "positives")}
        grad = backward(b, outputs, ones, "sigmoid", 4, 16)
        assert grad[:, 5:].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_infinite_scores(device: torch.device) -> None:
    """A key above everything counts 1, one below 0, and a positive above everything has the rank 0."""
    rows = torch.zeros(3, 40)
    rows[:, 1] = -2.0
    rows[0, 20], rows[1, 20], rows[2, 1] = math.inf, -math.inf, math.inf
    b = block_of(rows, [(0, 2)] * 3, device)
    ranks = forward(b, "sigmoid", 2, 16)["ranks"].double().cpu()
    low = 1 / (1 + math.exp(-2))
    expected = [1 + 37 / 2, 1 + 37 * low, 37 / 2, 37 * low, 38 / 2, 0.0]
    torch.testing.assert_close(ranks, torch.tensor(expected).double(), rtol=RANK_ERROR, atol=0)
