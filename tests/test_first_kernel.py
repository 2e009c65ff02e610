"""Whether kernels work is seen at the first use of a device, where "auto" can still do without them."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import python
from torch.utils._python_dispatch import TorchDispatchMode

from tritonloss import __main__, backends
from tritonloss.backends import backend_module, eager, resolve_backend, triton_unusable
from tritonloss.backends import triton as triton_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
NO_COMPILER = "Failed to find C compiler. Please specify via CC environment variable"


class FirstKernel:
    """Stands for the small kernel on a GPU: raises what it is given, or answers what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices: list[torch.device] = []
        self.answer: str | None = None
        self.capturing = False
        monkeypatch.setattr(backends, "_checked", {})
        monkeypatch.setattr(backends, "_warned", False)
        monkeypatch.setattr(triton_backend, "INTERPRETED", False)
        monkeypatch.setattr(triton_backend, "self_check", self)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def __call__(self, device: torch.device) -> str | None:
        self.devices.append(device)
        return self.answer


@pytest.fixture
def first_kernel(monkeypatch: pytest.MonkeyPatch) -> FirstKernel:
    return FirstKernel(monkeypatch)


def test_a_device_is_tried_once(first_kernel: FirstKernel) -> None:
    for _ in range(3):
        assert resolve_backend("auto", CUDA) == resolve_backend("triton", torch.device("cuda")) == "triton"
    assert first_kernel.devices == [CUDA]
    assert resolve_backend("auto", torch.device("cuda", 0)) == "triton"
    assert len(first_kernel.devices) == 2
    assert resolve_backend("eager", torch.device("cuda", 2)) == "eager"
    assert resolve_backend("auto", CPU) == "eager"
    assert len(first_kernel.devices) == 2


def test_where_it_fails_auto_is_eager_and_says_so_once(first_kernel: FirstKernel) -> None:
    first_kernel.answer = NO_COMPILER
    with pytest.warns(RuntimeWarning) as caught:
        assert backend_module("auto", CUDA) is eager
    (warning,) = caught
    for said in (NO_COMPILER, "python -m tritonloss", "TRITONLOSS_BACKEND=eager", "TRITON_CACHE_DIR"):
        assert said in str(warning.message)
    first_kernel.answer = None
    assert backend_module("auto", CUDA) is eager
    with pytest.raises(RuntimeError, match=f"'triton' was asked for, but {NO_COMPILER}"):
        resolve_backend("triton", CUDA)
    assert first_kernel.devices == [CUDA]


def test_the_report_names_the_reason(first_kernel: FirstKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Stand-in GPU")
    first_kernel.answer = NO_COMPILER
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert f"cuda:0 (Stand-in GPU): eager, because {NO_COMPILER}" in list(__main__.report())


class AnyMode(TorchDispatchMode):
    """As the mode of fake tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_nothing_is_launched_during_capture_or_tracing(
    first_kernel: FirstKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known by then decides; what is not is found out afterwards."""
    first_kernel.answer = NO_COMPILER
    first_kernel.capturing = True
    assert triton_unusable(CUDA) is None
    first_kernel.capturing = False
    with AnyMode():
        assert triton_unusable(CUDA) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert triton_unusable(CUDA) is None
    assert first_kernel.devices == []
    assert triton_unusable(CUDA) == NO_COMPILER
    first_kernel.capturing = True
    assert triton_unusable(CUDA) == NO_COMPILER
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert triton_unusable(CUDA) == NO_COMPILER


# --- the kernel itself ---


def test_the_kernel_runs_here(device: torch.device) -> None:
    assert triton_backend.self_check(device) is None


class Launches:
    """In place of the kernel: each launch does the next of these."""

    def __init__(self, *launches: Callable[..., None]) -> None:
        self.launches = list(launches)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: self.launches.pop(0)(*args, **options)


def raising(error: Exception) -> Callable[..., None]:
    def launch(*_: Any, **__: Any) -> None:
        raise error

    return launch


def computing(factor: float) -> Callable[..., None]:
    def launch(scores: torch.Tensor, sums: torch.Tensor, **_: Any) -> None:
        sums.copy_(factor * torch.sigmoid(scores - scores[:, None]).sum(1))

    return launch


def stand_in(monkeypatch: pytest.MonkeyPatch, *launches: Callable[..., None]) -> str | None:
    kernels = Launches(*launches)
    monkeypatch.setattr(triton_backend.check, "sums_of_sigmoids", kernels)
    found = triton_backend.self_check(CPU)
    assert kernels.launches == []
    return found


def test_right_numbers_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """2e-6 is what reciprocals and exponentials of the kernels may err by."""
    assert stand_in(monkeypatch, computing(1 + 2e-6)) is None


@pytest.mark.parametrize("factor", [1 + 3e-5, 0, torch.inf, torch.nan])
def test_wrong_numbers_are_refused(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the first kernel computed wrong numbers on cpu" in str(stand_in(monkeypatch, computing(factor)))


def test_a_kernel_that_writes_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "wrong numbers" in str(stand_in(monkeypatch, lambda *args, **options: None))


@pytest.mark.parametrize(
    "error",
    [RuntimeError(NO_COMPILER), subprocess.CalledProcessError(1, ["gcc"]), ImportError("libcuda.so.1")],
)
def test_what_is_raised_is_the_reason(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stand_in(monkeypatch, raising(error))
    assert found == f"the first kernel failed on cpu ({type(error).__name__}: {error})"


def test_an_error_of_the_cache_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = raising(FileNotFoundError(2, "gone"))
    assert stand_in(monkeypatch, gone, computing(1)) is None
    assert "TRITON_CACHE_DIR" in str(stand_in(monkeypatch, gone, gone))


def test_no_driver_is_a_reason() -> None:
    """A device that is not there, in a process without it."""
    code = """
import torch
from tritonloss.backends import triton
print(triton.self_check(torch.device("cuda", 63)))
"""
    assert "the first kernel failed on cuda:63 (" in python(code)


# --- an import that fails ---

BROKEN_TRITON = """
import sys, warnings
import torch
tried = []

class Finder:
    def find_spec(self, name, *_):
        if name == "triton":
            tried.append(name)
            raise OSError("libLLVM is broken")

sys.modules.pop("triton", None)
sys.meta_path.insert(0, Finder())
from tritonloss.backends import resolve_backend, triton_unusable
del tried[:]
torch.cuda.is_available = lambda: True
for _ in range(3):
    print(resolve_backend("auto", torch.device("cuda", 0)))
try:
    resolve_backend("triton", torch.device("cuda", 0))
except RuntimeError as error:
    print(error)
print(len(tried))
"""


def test_a_broken_triton_is_imported_once_and_named_once() -> None:
    code = "import contextlib, sys\nwith contextlib.redirect_stderr(sys.stdout):\n" + "".join(
        f"    {line}\n" for line in BROKEN_TRITON.splitlines()
    )
    *lines, tried = python(code).splitlines()
    reason = "Triton cannot be imported (OSError: libLLVM is broken)"
    assert lines.count("eager") == 3
    assert sum("RuntimeWarning" in line and reason in line for line in lines) == 1
    assert f"backend 'triton' was asked for, but {reason}" in lines
    assert tried == "1"
