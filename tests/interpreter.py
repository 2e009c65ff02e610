"""Triton's interpreter as the tests use it, in every process that runs kernels: a device's arithmetic, and fast."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np


def prepare_interpreter() -> None:
    """Before the first launch. Without TRITON_INTERPRET=1, or without Triton, nothing."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    list_language_once()
    patch_language_once()
    version = tuple(map(int, importlib.import_module("triton").__version__.split(".")[:2]))
    if version <= (3, 6):
        correct_interpreter()


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


def list_language_once() -> None:
    """Let it list the functions of Triton's language once, and not at every launch.

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


def patch_language_once() -> None:
    """Let a launch of Triton's interpreter replace the functions of the language once for each module of kernels.

    It does so at every call of one kernel function by another, which takes two thirds of the time of our kernels.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()  # in this launch

    def patch_once(function: Callable[..., Any]) -> Any:
        if function.__module__ in patched:
            return None
        patched.add(function.__module__)
        return patch(function)

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_afresh
