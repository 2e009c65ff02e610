"""What every test starts from: where kernels run, a clean state, and memory that cannot be mistaken for a result."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from interpreter import prepare_interpreter

# NVML knows whether there is a GPU without starting CUDA.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if not torch.cuda.is_available():
    # Read when a kernel is decorated, so before anything imports triton: kernels run on CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# It imports triton, and lists functions by their identity: before `poisoned_memory` stands in for some of them.
importlib.import_module("torch._dynamo")
if torch.__version__ < "2.10":
    # From then on fullgraph=True alone lets operators into the graph whose output's size depends on the data.
    torch._dynamo.config.capture_dynamic_output_shape_ops = True


prepare_interpreter()

settings.register_profile("fixed", derandomize=True, deadline=None, database=None, max_examples=25)
settings.register_profile("random", deadline=None, database=None, max_examples=500)
settings.load_profile("fixed")  # pytest --hypothesis-profile=random searches further


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--aot-full", action="store_true", help="every ahead-of-time build of every architecture"
    )


def pytest_configure() -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The interpreter is slow: what holds for every loss is tested of the kernels of those that ask for it."""
    if INTERPRETED:
        repeated = [item for item in items if repeats_kernels(item)]
        config.hook.pytest_deselected(items=repeated)
        items[:] = [item for item in items if item not in set(repeated)]


def repeats_kernels(item: pytest.Item) -> bool:
    from registry import LOSSES

    parameters = getattr(getattr(item, "callspec", None), "params", {})
    loss = parameters.get("loss") if "loss" in getattr(item, "fixturenames", ()) else None
    case = LOSSES.get(loss) if isinstance(loss, str) else None
    return case is not None and not case.interpreted and parameters.get("backend") == "triton"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tests compute: the GPU if there is one, else the CPU, where the interpreter runs the kernels."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(params=["eager", "triton"])
def backend(request: pytest.FixtureRequest, clean_state: None) -> str:
    """Each streaming backend in turn, chosen for the test."""
    from tritonloss import use_backend

    use_backend(request.param)
    return request.param


@pytest.fixture(autouse=True)
def clean_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fixed seed, no settings from outside, and what a test switches is switched back."""
    from tritonloss import use_backend

    for name in ("TRITONLOSS_BACKEND", "TRITONLOSS_MEMORY_BUDGET", "TRITONLOSS_PRODUCTS"):
        monkeypatch.delenv(name, raising=False)
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    use_backend("auto")
    yield
    use_backend("auto")
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def compiler(clean_state: None) -> Iterator[None]:
    """torch.compile without anything that another test compiled, and without `poisoned_memory`."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


ALLOCATORS = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised floating memory holds NaN: an output that nobody wrote cannot pass, nor padding that is read."""
    if "compiler" in request.fixturenames:
        return
    for owner, name in ALLOCATORS:
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))


def poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point():
            with torch.no_grad():
                tensor.fill_(torch.nan)
        return tensor

    return poisoned
