"""The choice of the code that reduces a block of scores.

"eager" is plain torch on any device; "triton" launches the kernels; "reference" is the dense oracle of
`tritonloss.reference`, which losses call in place of the streamed ops; "auto" takes Triton where it is usable and eager
elsewhere.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType, TracebackType

import torch

ENVIRONMENT_VARIABLE = "TRITONLOSS_BACKEND"
BACKENDS = ("auto", "eager", "triton", "reference")
OLDEST_CAPABILITY = (8, 0)

_selected = os.environ.get(ENVIRONMENT_VARIABLE, "auto")


def selected_backend() -> str:
    """The name set by `use_backend`, else by TRITONLOSS_BACKEND, else "auto"."""
    if _selected not in BACKENDS:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}={_selected!r}: expected one of {', '.join(BACKENDS)}")
    return _selected


class use_backend:
    """Choose the backend of every loss of this process, at once, or within a `with` block.

    name: "auto", "eager", "triton" or "reference". A backend that cannot serve a call raises RuntimeError at that
    call; it is never replaced silently. The choice is global to the process, not per thread.

    Raises ValueError for another name.
    """

    def __init__(self, name: str) -> None:
        global _selected
        if name not in BACKENDS:
            raise ValueError(f"backend name is {name!r}: expected one of {', '.join(BACKENDS)}")
        self._previous = _selected
        _selected = name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _selected
        _selected = self._previous


def triton_unusable(device: torch.device) -> str | None:
    """Why Triton cannot serve tensors on `device`; None if it can."""
    try:
        module = importlib.import_module("tritonloss.backends.triton")
    except Exception as error:  # a broken installation of Triton raises anything
        return f"Triton cannot be imported ({type(error).__name__}: {error})"
    if module.INTERPRETED:
        return None
    if device.type != "cuda":
        return f"Triton serves CUDA and ROCm tensors, not {device.type} (TRITON_INTERPRET=1 is for tests)"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        return f"Triton needs compute capability {OLDEST_CAPABILITY}, {device} is older"
    return None


def resolve_backend(name: str, device: torch.device) -> str:
    """Replace "auto" by the backend for `device`. Raises RuntimeError if a named backend cannot serve it."""
    if name == "auto":
        return "triton" if device.type == "cuda" and triton_unusable(device) is None else "eager"
    if name == "triton" and (reason := triton_unusable(device)) is not None:
        raise RuntimeError(f"backend 'triton' was asked for, but {reason}")
    return name


def backend_module(name: str, device: torch.device) -> ModuleType:
    """The module with the block functions (soft_rank_forward, ...) that serves `device`."""
    return importlib.import_module(f"tritonloss.backends.{resolve_backend(name, device)}")
