"""PNP of few large classes beside many small ones, and one step of either."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.pnp import DIMENSION
from bench.report import MEBIBYTE, Table
from tritonloss.losses import PNPLoss

SUBJECT = "PNP forward + backward, float32, D = 128, classes of equal size"
AXES = ("N", "classes")
SIZES = {"tritonloss": ((2048, 512), (2048, 2), (8192, 2048), (8192, 16), (8192, 2), (32768, 2))}


def batch(n: int, n_classes: int, device: str) -> tuple[Tensor, Tensor]:
    """Embeddings [n, 128] float32 and labels [n], as many of each class."""
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(n, DIMENSION, generator=generator).to(device).requires_grad_()
    return rows, (torch.arange(n) * n_classes // n).to(device)


def step(name: str, n: int, n_classes: int, backward: bool, device: str) -> Callable[[], Tensor]:
    """A function that runs the loss once, with or without its backward pass, and returns the value."""
    criterion = PNPLoss()
    rows, labels = batch(n, n_classes, device)

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
    large, small = (table["tritonloss", 8192, n_classes, True] for n_classes in (2, 2048))
    ratio = large.seconds / small.seconds
    yield "N = 8192, time of 2 classes over that of 2048, at most 5", ratio, ratio <= 5
    # Rank, score and slope of the pairs alone are 384 MiB at N = 8192, 6 GiB at N = 32768.
    for n, limit in ((8192, 640), (32768, 1024)):
        peak = table["tritonloss", n, 2, True].peak
        assert peak is not None
        size = peak / MEBIBYTE
        yield f"N = {n}, 2 classes, peak MiB above the inputs, at most {limit}", size, size <= limit


def ratios(table: Table) -> dict[str, float]:
    """What `bench.compare` compares; larger is better."""
    few, many = (table["tritonloss", 8192, classes, True].seconds for classes in (2, 2048))
    return {"N = 8192, 2 classes: speed against 2048 classes": many / few}
