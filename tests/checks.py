"""Helpers of the tests: evaluation, comparison, and other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent


def value_and_grad(
    loss: Callable[..., Tensor], rows: Tensor, labels: Tensor, upstream: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of the rows, both detached; `upstream` is the gradient of the loss, default 1."""
    leaf = rows.detach().clone().requires_grad_()
    value = loss(leaf, labels)
    value.backward(upstream)
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def assert_close(
    actual: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0, message: str | None = None
) -> None:
    """Values only, within a tolerance that is always stated; devices and dtypes may differ."""
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, check_device=False, check_dtype=False, msg=message
    )


def assert_same(actual: Any, expected: Any) -> None:
    """Bit for bit, dtype and device included."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def error(actual: Tensor, exact: Tensor) -> float:
    """The largest absolute error; NaN counts as infinite."""
    if not exact.numel():
        return 0.0
    return float((actual.double().cpu() - exact.double().cpu()).abs().nan_to_num(nan=torch.inf).max())


def assert_as_exact_as(actual: Tensor, rival: Tensor, exact: Tensor) -> None:
    """The error of `actual` is at most twice that of `rival`, plus a slack of 16 roundings of the largest entry.

    The slack covers a rival that happens to be exact: sums of up to 2^16 terms, added as a tree, lose 16 roundings.
    """
    slack = 16 * torch.finfo(actual.dtype).eps * float(exact.abs().max()) if exact.numel() else 0.0
    assert error(actual, exact) <= 2 * error(rival, exact) + slack


SYNCS = ["item", "tolist", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"]


def record_syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What from here on is called, from Python, that would wait for a device.

    Without the calls of Triton's interpreter: that of 3.2 copies the arguments of a kernel to the host by `cpu`.
    """
    made: list[str] = []

    def spy(name: str) -> Callable[..., Any]:
        real = getattr(Tensor, name)

        def called(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"] != "triton.runtime.interpreter":
                made.append(name)
            return real(self, *args, **kwargs)

        return called

    for name in SYNCS:
        monkeypatch.setattr(Tensor, name, spy(name))
    return made


def python(code: str, *arguments: str, expect_failure: bool = False, **env: str) -> str:
    """The output of `code` in a new interpreter with this checkout; with `expect_failure`, its error output.

    The environment holds no setting of ours or of Triton, except those in `env`.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON", "PYTEST"))}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**inherited, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (run.returncode != 0) == expect_failure, run.stdout + run.stderr
    return run.stderr if expect_failure else run.stdout


# What `bench.memory.peak_above` needs on a CPU. A process that uses CUDA has other peaks.
peaks_are_known = pytest.mark.skipif(
    torch.cuda.is_available() or not Path("/proc/self/clear_refs").exists(), reason="needs Linux, and no CUDA"
)
