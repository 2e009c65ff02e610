"""What every test starts from: where kernels run, a clean state, and memory that cannot be mistaken for a result."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

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


def correct_interpreter() -> None:
    """Give Triton's interpreter of 3.6 and before the arithmetic of a device, and the arguments of its own autotuner.

    Its minimum and maximum of a NaN and a number are NaN, its fused multiply-add rounds twice, and that of 3.2 takes
    the options of a launch for arguments of the kernel.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")

    def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = np.promote_types(z.data.dtype, np.float64)  # the product of two float32 is exact
        with np.errstate(invalid="ignore", over="ignore"):
            total = (x.data.astype(wide) * y.data + z.data).astype(z.data.dtype)
        return interpreter.TensorHandle(total, z.dtype.scalar)

    builder = interpreter.InterpreterBuilder
    builder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
    builder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
    builder.create_fma = fused
    launch_options = ["num_buffers_warp_spec", "num_consumer_groups", "reg_dec_producer", "reg_inc_consumer"]
    getattr(interpreter, "RESERVED_KWS", []).extend(launch_options)  # a list of 3.2 only


def speed_up_interpreter() -> None:
    """Let it list the functions of Triton's language once, and not at every call of a function within a kernel.

    Where it lists them, it takes those that are builtin, and stands in for them; which ones are does not change.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    core = importlib.import_module("triton.language.core")

    @functools.cache
    def builtin_names(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def members(package: Any) -> list[tuple[str, Any]]:
        return [(name, getattr(package, name)) for name in builtin_names(package)]

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": members})


if INTERPRETED and importlib.util.find_spec("triton"):
    speed_up_interpreter()
    triton_version = tuple(map(int, importlib.import_module("triton").__version__.split(".")[:2]))
    if triton_version <= (3, 6):
        correct_interpreter()

settings.register_profile("fixed", derandomize=True, deadline=None, database=None, max_examples=25)
settings.register_profile("random", deadline=None, database=None, max_examples=500)
settings.load_profile("fixed")  # pytest --hypothesis-profile=random searches further


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
