"""Each loss on each backend against the dense reference in float64: no figure is printed for a loss that fails this."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.gpu_check.plan import LOSSES, Plan
from tritonloss import use_backend
from tritonloss.backends import triton_unusable

DIMENSION = 33
# Of the value, and of the gradient by its norm. A float32 similarity is off by up to 4e-7, which the temperature, 0.01,
# makes 4e-5 of R. One that lies that near to a node of a histogram changes its bin, and so the gradient of its pair.
TOLERANCE = {torch.float64: (1e-9, 1e-9), torch.float32: (2e-4, 2e-3)}
HISTOGRAM_GRADIENT = {"Histogram": 3e-2, "FastAP": 3e-2}
BUDGET = 2**14  # bytes: several blocks, and similarities that are computed again in the backward pass


class Result(NamedTuple):
    value: Tensor
    grads: list[Tensor]


def backends(device: str) -> list[str]:
    return ["eager"] + (["triton"] if triton_unusable(torch.device(device)) is None else [])


def check(loss: str, plan: Plan, device: str) -> str:
    """What was compared. Raises AssertionError, with the case, on the first result that is wrong."""
    done = []
    for n in plan.check_batches:
        rows, labels, n_classes = batch(n)
        exact = evaluate(loss, rows, labels, n_classes, device, torch.float64, "reference", {})
        for backend, dtype, options in itertools.product(
            backends(device), TOLERANCE, ({}, {"memory_budget": BUDGET})
        ):
            found = evaluate(loss, rows, labels, n_classes, device, dtype, backend, options)
            case = f"{backend}, {dtype}, N = {n}, {options or 'default budget'}"
            compare(found, exact, *tolerance(loss, dtype), case)
        done.append(n)
    return f"{' and '.join(backends(device))}; N = {', '.join(map(str, done))}; float32 and float64"


def tolerance(loss: str, dtype: torch.dtype) -> tuple[float, float]:
    value, grad = TOLERANCE[dtype]
    return value, HISTOGRAM_GRADIENT.get(loss, grad) if dtype == torch.float32 else grad


def batch(n: int) -> tuple[Tensor, Tensor, int]:
    """Rows around the centres of their classes, so that similarities have all signs; sizes 1 to 13 and lone rows."""
    generator = torch.Generator().manual_seed(n)
    count = torch.tensor(list(itertools.islice(itertools.cycle([4, 1, 13, 2, 7, 1]), n)))
    labels = torch.repeat_interleave(torch.arange(n), count)[:n]
    centres = torch.randn(n, DIMENSION, generator=generator, dtype=torch.float64)
    rows = centres[labels] + 2 * torch.randn(n, DIMENSION, generator=generator, dtype=torch.float64)
    order = torch.randperm(n, generator=generator)
    return rows[order], labels[order], int(labels.max()) + 1


def evaluate(
    loss: str,
    rows: Tensor,
    labels: Tensor,
    n_classes: int,
    device: str,
    dtype: torch.dtype,
    backend: str,
    options: dict[str, Any],
) -> Result:
    # SOPRC has a class for every four rows: n is enough for any labels.
    size = (4 * n_classes, n_classes)
    leaf = rows.to(device, dtype, copy=True).requires_grad_()
    criterion: nn.Module = LOSSES[loss].build(size, DIMENSION, **options).double()
    parameters = list(criterion.parameters())
    with torch.no_grad():
        for weight in parameters:
            weight.normal_(generator=torch.Generator().manual_seed(0))
    criterion = criterion.to(device, dtype)
    with use_backend(backend):
        value = criterion(leaf, labels.to(device))
        value.backward()
    return Result(value.detach(), [x.grad for x in [leaf, *criterion.parameters()] if x.grad is not None])


def compare(found: Result, exact: Result, value: float, grad: float, case: str) -> None:
    for what, actual, expected, bound in _pairs(found, exact, value, grad):
        error = float((actual.double() - expected).norm() / expected.norm())
        if not error <= bound:  # NaN is not
            raise AssertionError(f"{case}: {what} is off by {error:.2g} of its size, {bound:.0e} is allowed")


def _pairs(
    found: Result, exact: Result, value: float, grad: float
) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    yield "the value", found.value, exact.value, value
    for actual, expected in zip(found.grads, exact.grads, strict=True):
        yield "a gradient", actual, expected, grad
