"""The log-sum-exp losses of pairs beside pytorch-metric-learning, and one step of each."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench import rivals
from bench.pnp import batch
from bench.report import MEBIBYTE, Row, Table
from tritonloss import losses

SUBJECT = "NTXent, SupCon, MultiSimilarity, Circle, forward + backward, float32, D = 128, four per class"
AXES = ("N", "loss")
ALL = ("NTXent", "SupCon", "MultiSimilarity", "Circle")
SQUARE = ALL[1:]  # of the rival's; its NTXent is a cube, 6.5 GB at N = 512
SIZES = {
    "tritonloss": (
        *((n, "NTXent") for n in (128, 256)),
        *((n, loss) for n in (512, 1024, 2048, 4096, 16384) for loss in ALL),
    ),
    "pml 2.9.0": (
        *((n, "NTXent") for n in (128, 256, 512)),
        *((n, loss) for n in (512, 1024, 2048, 4096) for loss in SQUARE),
    ),
}


def step(name: str, n: int, loss: str, backward: bool, device: str) -> Callable[[], Tensor]:
    """A function that runs the loss once, with or without its backward pass, and returns the value."""
    criterion = rivals.pml(f"{loss}Loss") if name == "pml 2.9.0" else getattr(losses, f"{loss}Loss")()
    rows, labels = batch(n, device)

    def run() -> Tensor:
        rows.grad = None
        with torch.set_grad_enabled(backward):
            value = criterion(rows, labels)
        if backward:
            value.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return value.detach()

    return run


def verdicts(table: Table) -> Iterator[tuple[str, float, bool]]:
    """The figures to reach."""

    def both(n: int, loss: str) -> tuple[Row, Row]:
        return table["tritonloss", n, loss, True], table["pml 2.9.0", n, loss, True]

    ours, theirs = both(512, "NTXent")
    factor = theirs.seconds / ours.seconds
    yield "NTXent, N = 512, factor to pml 2.9.0, at least 1000", factor, factor >= 1000
    for loss in ("NTXent", "SupCon"):
        size = (table["tritonloss", 16384, loss, True].peak or 0) / MEBIBYTE
        yield f"{loss}, N = 16384, peak MiB above inputs and gradients, at most 64", size, size <= 64
    for loss in ("MultiSimilarity", "Circle"):
        ours, theirs = both(2048, loss)
        factor = theirs.seconds / ours.seconds
        yield f"{loss}, N = 2048, factor to pml 2.9.0, at least 3", factor, factor >= 3
        share = (ours.peak or 0) / (theirs.peak or 1)
        yield f"{loss}, N = 2048, memory over that of pml 2.9.0, at most 0.1", share, share <= 0.1
