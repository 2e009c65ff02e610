"""The implementations of SmoothAP that are compared, and one step of each."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench import rivals
from bench.report import MEBIBYTE, Table
from tritonloss.losses import SmoothAPLoss

DIMENSION = 128
SUBJECT = "SmoothAP forward + backward, float32, D = 128, four per class"
AXES = ("N",)
# pytorch-metric-learning's value is another one off square batches; its cost is what is compared.
IMPLEMENTATIONS: dict[str, Callable[[], Callable[[Tensor, Tensor], Tensor]]] = {
    "tritonloss": SmoothAPLoss,
    "pml 2.9.0": rivals.pml_smooth_ap,
    "gathered": lambda: rivals.smooth_ap_gathered,
}
SIZES = {
    "tritonloss": (128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "pml 2.9.0": (128, 256, 512),
    "gathered": (512, 1024, 2048, 4096),
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
    factor = table["pml 2.9.0", 512, True].seconds / table["tritonloss", 512, True].seconds
    yield "N = 512, factor to pml 2.9.0, at least 300", factor, factor >= 300
    size = (table["tritonloss", 8192, True].peak or 0) / MEBIBYTE
    yield "N = 8192, peak MiB above the inputs, at most 1024", size, size <= 1024
