"""Devices without all of torch, and a default device that is not that of the data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_close
from inputs import random_batch
from registry import LOSSES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tritonloss import distances, functional, losses, metrics, types, use_backend

torchgen = pytest.importorskip("torchgen")
yaml = pytest.importorskip("yaml")

# Kernels that serve any device, because they call others.
COMPOSITE = {
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
}
ROWS, LABELS = random_batch(40, 8, 6)
ROWS = ROWS.float()
PAIRS = tuple(torch.tensor(rows) for rows in ([0, 1], [2, 3], [0, 1], [5, 6]))


def rows() -> Tensor:
    return ROWS.clone().requires_grad_()


def of_registry(name: str) -> Callable[[], Tensor]:
    with torch.device("cpu"):
        module = LOSSES[name].module(6, ROWS)
    return lambda: copy.deepcopy(module)(rows(), LABELS)


TARGETS = (LABELS[:, None] == LABELS[:3]).float()
OF_SCORES = losses.SOPRCLoss(3)
# Rows of two large classes: the sigmoid goes to a grid, the one-side Huber is sorted.
LARGE = torch.cat([ROWS] * 15)
CALLS: dict[str, Callable[[], Tensor]] = {
    **{name: of_registry(name) for name in LOSSES},
    "SOPRCLoss, scores": lambda: copy.deepcopy(OF_SCORES)(rows()[:, :3], TARGETS),
    "SOPRCLoss, large classes": lambda: losses.SOPRCLoss(1, use_memory=False, prior="batch")(
        LARGE[:, 0].clone().requires_grad_(), LARGE[:, 1]
    ),
    "PNPLoss, large classes": lambda: losses.PNPLoss(variant="Ib")(
        LARGE[:160].clone().requires_grad_(), LARGE[:160, 1] > 0
    ),
    "HistogramLoss, pairs": lambda: losses.HistogramLoss()(rows(), None, PAIRS),
    "HistogramLoss, distance": lambda: losses.HistogramLoss(distance=distances.CosineSimilarity(power=2))(
        rows(), LABELS
    ),
    "FastAPLoss, distance": lambda: losses.FastAPLoss(distance=distances.LpDistance(power=1))(rows(), LABELS),
    "mean_average_precision": lambda: metrics.mean_average_precision(ROWS, LABELS),
    "ndcg": lambda: metrics.ndcg(ROWS, LABELS),
    "exact_prior": lambda: functional.exact_prior([3, 4]).sum(),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Callable[[], Tensor]:
    return CALLS[request.param]


def differentiate(loss: Tensor) -> Tensor:
    if loss.requires_grad:
        loss.backward()
    return loss.detach()


class Recorder(TorchDispatchMode):
    """What runs below autograd: operators of aten with the dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}
        self.first: dict[str, set[torch.dtype]] = {}  # of the first tensor only

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
        dtypes = [leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)]
        name = str(function).removeprefix("aten.").removesuffix(".default")
        self.dtypes.setdefault(name, set()).update(dtypes)
        self.first.setdefault(name, set()).update(dtypes[:1])
        return result


@cache
def native_functions() -> dict[str, Any]:
    folder = Path(torchgen.__file__).parent / "packaged/ATen/native"
    entries = yaml.safe_load((folder / "native_functions.yaml").read_text())
    return {entry["func"].split("(")[0]: entry for entry in entries}


def kernels(operator: str) -> set[str]:
    """The dispatch keys for which torch has a kernel of it."""
    entry = native_functions()[operator]
    keys = {key.strip() for listed in entry.get("dispatch", {}) for key in listed.split(",")}
    if "structured_delegate" in entry:
        keys |= kernels(entry["structured_delegate"])
    return keys or {"CompositeImplicitAutograd"}


@pytest.fixture
def incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for a device that lacks what MPS and XPU may lack."""
    monkeypatch.setattr(types, "COMPLETE", ())
    use_backend("eager")


def test_every_operator_has_a_kernel_for_mps(call: Callable[[], Tensor], incomplete: None) -> None:
    with Recorder() as recorder:
        differentiate(call())
    assert len(recorder.dtypes) > 5
    assert not [name for name in recorder.dtypes if not kernels(name) & {"MPS", *COMPOSITE}]
    assert not [name for name, dtypes in recorder.dtypes.items() if torch.float64 in dtypes]
    # Those of MPS took no int64 for long, and XPU runs some of them on the CPU.
    sums = {"index_add", "index_add_", "scatter_add_", "scatter_reduce_.two", "bincount"}
    assert not [name for name in sums if recorder.first.get(name, set()) & {torch.int64}]
    assert "segment_reduce" not in recorder.dtypes


def test_the_same_loss_without_float64(call: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend("eager")
    exact = differentiate(call())
    monkeypatch.setattr(types, "COMPLETE", ())
    # A few roundings of float32 in sums of at most 1600 pairs, relative to sums of positive terms.
    assert_close(differentiate(call()), exact, rtol=1e-5)


def test_every_tensor_is_made_on_the_device_of_the_data(call: Callable[[], Tensor]) -> None:
    """Tensors of a default device that has no numbers can't be mixed with those of the CPU."""
    use_backend("eager")
    expected = differentiate(call())
    made: list[Tensor] = []
    torch.set_default_device("meta")
    try:
        made.append(differentiate(call()))
    finally:
        torch.set_default_device(None)
    assert_close(made[0], expected)
