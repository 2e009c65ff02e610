"""The implementations of PNP that are compared, and one step of each."""

from collections.abc import Callable

import torch
from torch import Tensor

from bench import rivals
from tritonloss.losses import PNPLoss

DIMENSION = 128
IMPLEMENTATIONS: dict[str, Callable[[], Callable[[Tensor, Tensor], Tensor]]] = {
    "tritonloss": PNPLoss,
    "pml 2.9.0": rivals.pml_pnp,
    "gathered": lambda: rivals.pnp_gathered,
    "gathered, compiled": lambda: torch.compile(rivals.pnp_gathered, dynamic=False),
}
SIZES = {
    "tritonloss": (128, 256, 512, 1024, 2048, 4096, 8192),
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
