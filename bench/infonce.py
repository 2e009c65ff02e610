"""InfoNCE of two towers in both directions beside what torch has for it, and one step of each."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from bench import rivals
from bench.report import MEBIBYTE, Table
from tritonloss.losses import InfoNCELoss

DIMENSION = 128
SUBJECT = "InfoNCE of two towers, both directions, forward + backward, float32, D = 128"
AXES = ("N",)
IMPLEMENTATIONS: dict[str, Callable[[], Callable[[Tensor, Tensor], Tensor]]] = {
    "tritonloss": lambda: two_towers,
    "cross_entropy": lambda: rivals.info_nce_dense,
    "linear_cross_entropy": lambda: rivals.info_nce_linear,
}
ALL = (1024, 4096, 16384)
SIZES = {
    "tritonloss": ALL,
    "cross_entropy": ALL,
    "linear_cross_entropy": ALL if hasattr(F, "linear_cross_entropy") else (),
}


def two_towers(queries: Tensor, keys: Tensor) -> Tensor:
    return InfoNCELoss(directions="both")(queries, ref_emb=keys)


def step(name: str, n: int, backward: bool, device: str) -> Callable[[], Tensor]:
    """A function that runs the loss once, with or without its backward pass, and returns the value."""
    criterion = IMPLEMENTATIONS[name]()
    generator = torch.Generator().manual_seed(n)
    queries, keys = torch.randn(2, n, DIMENSION, generator=generator).to(device).unbind()
    towers = [tower.clone().requires_grad_() for tower in (queries, keys)]

    def run() -> Tensor:
        for tower in towers:
            tower.grad = None
        with torch.set_grad_enabled(backward):
            loss = criterion(*towers)
        if backward:
            loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return loss.detach()

    return run


def verdicts(table: Table) -> Iterator[tuple[str, float, bool]]:
    """The figures to reach."""
    ours, theirs = (table[name, 16384, True] for name in ("tritonloss", "cross_entropy"))
    ratio = ours.seconds / theirs.seconds
    yield "N = 16384, time over that of cross_entropy, at most 1.1", ratio, ratio <= 1.1
    size = (ours.peak or 0) / MEBIBYTE
    yield "N = 16384, peak MiB above inputs and gradients, at most 64", size, size <= 64
