"""The implementations of SOPRC that are compared, and one step of each, the step of the memory included."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench import rivals
from bench.report import MEBIBYTE, Table
from tritonloss.losses import SOPRCLoss

SUBJECT = (
    "SOPRC without Eq. 9, forward + backward, float32, four per class; N = 0: binary, 1000 and 100000 scores"
)
AXES = ("N", "D")
BINARY = (0, 1)
SIZES = {
    "tritonloss": ((224, 512), (512, 512), (1024, 512), (2048, 512), (4096, 128), (4096, 512), BINARY),
    "gathered": ((224, 512), (512, 512), (1024, 512), (2048, 512), (4096, 128), (4096, 512)),
}


def step(name: str, n: int, dimension: int, backward: bool, device: str) -> Callable[[], Tensor]:
    """A function that runs the loss once, with or without its backward pass, and returns the value."""
    generator = torch.Generator().manual_seed(n)
    if (n, dimension) == BINARY:
        inputs = torch.randn(101_000, generator=generator).to(device).requires_grad_()
        labels = (torch.arange(101_000) < 1000).to(device)
        criterion: Callable[[Tensor, Tensor], Tensor] = SOPRCLoss(w_var=0).to(device)
    else:
        inputs = torch.randn(n, dimension, generator=generator).to(device).requires_grad_()
        labels = (torch.arange(n) // 4).to(device)
        make = {
            "tritonloss": lambda: SOPRCLoss(n // 4, w_var=0),
            "gathered": lambda: rivals.SOPRCGathered(n // 4),
        }
        criterion = make[name]().to(device)

    def run() -> Tensor:
        inputs.grad = None
        with torch.set_grad_enabled(backward):
            loss = criterion(inputs, labels)
        if backward:
            loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return loss.detach()

    return run


def verdicts(table: Table) -> Iterator[tuple[str, float, bool]]:
    """The figures to reach."""

    def ratio(n: int, dimension: int) -> float:
        return table["tritonloss", n, dimension, True].seconds / table["gathered", n, dimension, True].seconds

    def peak(name: str, n: int, dimension: int) -> int:
        size = table[name, n, dimension, True].peak
        assert size is not None
        return size

    yield (
        "N = 224, D = 512, time over that of the gathered rival, at most 1",
        ratio(224, 512),
        ratio(224, 512) <= 1,
    )
    for dimension in (128, 512):
        factor = 1 / ratio(4096, dimension)
        yield f"N = 4096, D = {dimension}, factor to the gathered rival, at least 5", factor, factor >= 5
        share = peak("tritonloss", 4096, dimension) / peak("gathered", 4096, dimension)
        yield (
            f"N = 4096, D = {dimension}, memory over that of the gathered rival, at most 0.1",
            share,
            share <= 0.1,
        )
    size = peak("tritonloss", *BINARY) / MEBIBYTE
    yield "binary, 1000 and 100000, peak MiB above the inputs, below 200", size, size < 200
