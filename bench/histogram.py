"""The implementations of Histogram that are compared, and one step of each."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench import rivals
from bench.report import MEBIBYTE, Table
from tritonloss.losses import HistogramLoss

DIMENSION = 128
SUBJECT = "Histogram forward + backward, float32, D = 128, four per class"
AXES = ("N",)
IMPLEMENTATIONS: dict[str, Callable[[], Callable[[Tensor, Tensor], Tensor]]] = {
    "tritonloss": HistogramLoss,
    "pml 2.9.0": rivals.pml_histogram,
    "dense": lambda: rivals.histogram_dense,
}
SIZES = {
    "tritonloss": (256, 512, 1024, 2048, 4096, 8192, 16384),
    "pml 2.9.0": (256, 512, 1024),
    "dense": (256, 512, 1024, 2048, 4096),
}


def step(name: str, n: int, backward: bool, device: str) -> Callable[[], Tensor]:
    """A function that runs the loss once, with or without its backward pass, and returns the value."""
    criterion = IMPLEMENTATIONS[name]()
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(n, DIMENSION, generator=generator).to(device).requires_grad_()
    labels = (torch.arange(n) // 4).to(device)

    def run() -> Tensor:
        rows.grad = None
        with torch.set_grad_enabled(backward):
            loss = criterion(rows, labels)
        if backward:
            loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return loss.detach()

    return run


def verdicts(table: Table) -> Iterator[tuple[str, float, bool]]:
    """The figures to reach."""
    factor = table["pml 2.9.0", 1024, True].seconds / table["tritonloss", 1024, True].seconds
    yield "N = 1024, factor to pml 2.9.0, at least 300", factor, factor >= 300
    for n in (2048, 4096, 8192):
        growth = table["tritonloss", 2 * n, True].seconds / table["tritonloss", n, True].seconds
        yield f"growth of time from N = {n} to {2 * n}, at most 4.6", growth, growth <= 4.6
    size = (table["tritonloss", 16384, True].peak or 0) / MEBIBYTE
    yield "N = 16384, peak MiB above the inputs, at most 2048", size, size <= 2048
