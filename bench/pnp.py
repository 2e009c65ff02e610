"""The implementations of PNP that are compared, and one step of each."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench import rivals
from bench.report import MEBIBYTE, Table
from tritonloss.losses import PNPLoss

DIMENSION = 128
SUBJECT = "PNP forward + backward, float32, D = 128, four per class"
AXES = ("N",)
IMPLEMENTATIONS: dict[str, Callable[[], Callable[[Tensor, Tensor], Tensor]]] = {
    "tritonloss": PNPLoss,
    "pml 2.9.0": rivals.pml_pnp,
    "gathered": lambda: rivals.pnp_gathered,
    "gathered, compiled": lambda: torch.compile(rivals.pnp_gathered, dynamic=False),
}
SIZES = {
    "tritonloss": (128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "pml 2.9.0": (128, 256, 512),
    "gathered": (512, 1024, 2048, 4096),
    "gathered, compiled": (512, 1024, 2048, 4096),
}


def batch(n: int, device: str) -> tuple[Tensor, Tensor]:
    """Embeddings [n, 128] float32 and labels [n], four of each class."""
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(n, DIMENSION, generator=generator).to(device).requires_grad_()
    return rows, (torch.arange(n) // 4).to(device)


def step(name: str, n: int, backward: bool, device: str) -> Callable[[], Tensor]:
    """A function that runs the loss once, with or without its backward pass, and returns the value."""
    criterion = IMPLEMENTATIONS[name]()
    rows, labels = batch(n, device)

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

    def seconds(name: str, n: int) -> float:
        return table[name, n, True].seconds

    def peak(name: str, n: int) -> int:
        size = table[name, n, True].peak
        assert size is not None
        return size

    factor = seconds("pml 2.9.0", 512) / seconds("tritonloss", 512)
    yield "N = 512, factor to pml 2.9.0, at least 1000", factor, factor >= 1000
    for n in (2048, 4096):
        growth = seconds("tritonloss", 2 * n) / seconds("tritonloss", n)
        yield f"growth of time from N = {n} to {2 * n}, at most 4.6", growth, growth <= 4.6
        ratio = seconds("tritonloss", n) / seconds("gathered, compiled", n)
        yield f"N = {n}, time over that of the compiled rival, at most 1.3", ratio, ratio <= 1.3
        memory = peak("tritonloss", n) / peak("gathered, compiled", n)
        yield f"N = {n}, memory over that of the compiled rival, below 1", memory, memory < 1
    for n in (8192, 16384):
        size = peak("tritonloss", n) / MEBIBYTE
        yield f"N = {n}, peak MiB above the inputs, at most 1024", size, size <= 1024
