"""`rank_counts`, the kernel and both eager algorithms, on one block of scores: integers, so equal to the last bit."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from checks import assert_same
from torch import Tensor

from tritonloss.backends import eager_metrics, triton_metrics
from tritonloss.ops.streaming import empty_scores

ALGORITHMS: dict[str, Callable[..., None]] = {
    "eager": eager_metrics.rank_counts,
    "comparing": eager_metrics.by_comparing,
    "sorting": eager_metrics.by_sorting,
    "triton": triton_metrics.rank_counts,
}
# Below, at and above a tile of 256 keys, and rows that are no multiple of the 16 elements of a stride.
KEYS = [1, 15, 17, 256, 257, 600]
# One tile of each width, and several of eight.
WIDTHS = [1, 2, 3, 5, 8, 9, 20]


@pytest.fixture(params=ALGORITHMS)
def algorithm(request: pytest.FixtureRequest) -> Callable[..., None]:
    return ALGORITHMS[request.param]


def block(keys: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scores of five values, some of them -inf, in padded rows; bounds of the same values, and some +inf."""
    generator = torch.Generator().manual_seed(keys * width)
    drawn = torch.randint(-3, 3, (5, keys), generator=generator).to(device, dtype)
    scores = empty_scores(5, keys, drawn).copy_(drawn.masked_fill_(drawn == -3, -torch.inf))
    bounds = torch.randint(-2, 4, (5, width), generator=generator).to(device, dtype)
    return scores, bounds.masked_fill_(bounds == 3, torch.inf)


def counted(algorithm: Callable[..., None], scores: Tensor, bounds: Tensor, strict: bool) -> Tensor:
    counts = torch.full(bounds.shape, -7, dtype=torch.int32, device=bounds.device)
    algorithm(scores, bounds, counts, strict=strict)
    return counts


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("keys", KEYS)
def test_counts(
    keys: int, width: int, strict: bool, algorithm: Callable[..., None], device: torch.device
) -> None:
    for dtype in (torch.float32, torch.float64):
        scores, bounds = block(keys, width, dtype, device)
        above = scores[:, None] > bounds[..., None] if strict else scores[:, None] >= bounds[..., None]
        assert_same(counted(algorithm, scores, bounds, strict), above.sum(2).int())


@pytest.mark.parametrize("strict", [True, False])
def test_tiles_of_the_comparing_algorithm(
    strict: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, bounds = block(257, 9, torch.float32, device)
    whole = counted(eager_metrics.by_comparing, scores, bounds, strict)
    for tile in (1, 35, 5 * 256):
        monkeypatch.setattr(eager_metrics, "TILE", {"cpu": tile, "cuda": tile})
        assert_same(counted(eager_metrics.by_comparing, scores, bounds, strict), whole)


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_large_classes_are_sorted(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"tritonloss.backends.{name}_metrics")
    used: list[str] = []
    for algorithm in ("by_comparing", "by_sorting"):
        monkeypatch.setattr(module, algorithm, lambda *_, algorithm=algorithm, **__: used.append(algorithm))
    limit = module.SORT_WIDTH if name == "triton" else module.of_device(module.SORT_WIDTH, device)
    scores = torch.zeros(2, 16, device=device)
    for width in (limit, limit + 1):
        counted(module.rank_counts, scores, torch.zeros(2, width, device=device), strict=True)
    assert used == ["by_comparing", "by_sorting"]


def test_nothing_is_written_beside_the_counts(algorithm: Callable[..., None], device: torch.device) -> None:
    scores, bounds = block(257, 9, torch.float32, device)
    before = scores.clone(), bounds.clone()
    guard = torch.full((7, 9), -7, dtype=torch.int32, device=device)
    algorithm(scores, bounds, guard[1:-1], strict=True)
    assert (guard[[0, -1]] == -7).all()
    assert (guard[1:-1] >= 0).all()
    assert_same((scores, bounds), before)


def test_scores_without_a_padded_stride_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        counted(
            triton_metrics.rank_counts,
            torch.zeros(2, 17, device=device),
            torch.zeros(2, 1, device=device),
            True,
        )
