"""The implementations of ProxyAnchor that are compared, and one step of each."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from bench import rivals
from bench.report import MEBIBYTE, Table
from tritonloss.losses import ProxyAnchorLoss

DIMENSION = 128
SUBJECT = "ProxyAnchor forward + backward, float32, D = 128"
AXES = ("N", "C")
IMPLEMENTATIONS: dict[str, Callable[[int], nn.Module]] = {
    "tritonloss": lambda n_classes: ProxyAnchorLoss(n_classes, DIMENSION),
    "pml 2.9.0": lambda n_classes: rivals.pml_proxy_anchor(n_classes, DIMENSION),
    "dense, compiled": lambda n_classes: rivals.ProxyAnchorDense(n_classes, DIMENSION, compiled=True),
}
ALL = tuple((n, n_classes) for n in (256, 1024, 4096) for n_classes in (1000, 10000, 100000))
SIZES = {
    "tritonloss": ALL,
    "pml 2.9.0": ALL[:-1],  # the last takes about 20 GB
    "dense, compiled": ALL,
}


def step(name: str, n: int, n_classes: int, backward: bool, device: str) -> Callable[[], Tensor]:
    """A function that runs the loss once, with or without its backward pass, and returns the value."""
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(n, DIMENSION, generator=generator).to(device).requires_grad_()
    labels = torch.randint(n_classes, (n,), generator=generator).to(device)
    criterion = IMPLEMENTATIONS[name](n_classes).to(device)
    (proxies,) = criterion.parameters()
    with torch.no_grad():
        proxies.copy_(torch.randn(n_classes, DIMENSION, generator=generator))

    def run() -> Tensor:
        with torch.set_grad_enabled(backward):
            loss = criterion(rows, labels)
        if backward:
            loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        rows.grad = proxies.grad = None  # so that the next run starts with its inputs only
        return loss.detach()

    return run


def verdicts(table: Table) -> Iterator[tuple[str, float, bool]]:
    """The figures to reach; memory is counted above inputs and gradients."""

    def working_set(name: str, n: int, n_classes: int) -> float:
        peak = table[name, n, n_classes, True].peak
        assert peak is not None
        return peak - 4 * DIMENSION * (n + n_classes)

    ours, theirs = (table[name, 1024, 10000, True] for name in ("tritonloss", "pml 2.9.0"))
    factor = theirs.seconds / ours.seconds
    yield "N = 1024, C = 10000, factor to pml 2.9.0, at least 1.5", factor, factor >= 1.5
    share = working_set("tritonloss", 1024, 10000) / working_set("pml 2.9.0", 1024, 10000)
    yield "N = 1024, C = 10000, memory over that of pml 2.9.0, at most 0.125", share, share <= 0.125
    size = working_set("tritonloss", 4096, 100000) / MEBIBYTE
    yield "N = 4096, C = 100000, MiB above inputs and gradients, at most 3072", size, size <= 3072
