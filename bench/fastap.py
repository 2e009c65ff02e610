"""The implementations of FastAP that are compared, and one step of each."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench import rivals
from bench.report import MEBIBYTE, Table
from tritonloss.losses import FastAPLoss

DIMENSION = 128
SUBJECT = "FastAP forward + backward, float32, D = 128, four per class"
AXES = ("N",)
IMPLEMENTATIONS: dict[str, Callable[[], Callable[[Tensor, Tensor], Tensor]]] = {
    "tritonloss": FastAPLoss,
    "pml 2.9.0": rivals.pml_fastap,
    "dense": lambda: rivals.fastap_dense,
}
SIZES = {
    "tritonloss": (512, 1024, 2048, 4096, 8192, 16384),
    "pml 2.9.0": (512, 1024, 2048),
    "dense": (512, 1024, 2048),
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
    ours, peer = table["tritonloss", 2048, True], table["pml 2.9.0", 2048, True]
    factor = peer.seconds / ours.seconds
    yield "N = 2048, factor to pml 2.9.0, at least 2", factor, factor >= 2
    share = (ours.peak or 0) / (peer.peak or 1)
    yield "N = 2048, share of the peak memory of pml 2.9.0, at most 0.25", share, share <= 0.25
    size = (table["tritonloss", 16384, True].peak or 0) / MEBIBYTE
    yield "N = 16384, peak MiB above the inputs, at most 2048", size, size <= 2048
