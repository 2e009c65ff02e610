"""All triplets beside pytorch-metric-learning, RecallAtK and SupAP beside a loop over the queries; one step of each."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench import rivals
from bench.pnp import batch
from bench.report import MEBIBYTE, Table
from tritonloss import losses

SUBJECT = "TripletMargin, RecallAtK, SupAP, forward + backward, float32, D = 128, four per class (of 64: 64)"
AXES = ("N", "loss")
LOSSES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "TripletMargin": (losses.TripletMarginLoss, lambda: rivals.pml("TripletMarginLoss")),
    "RecallAtK": (losses.RecallAtKLoss, lambda: rivals.recall_at_k_loop),
    "SupAP": (losses.SupAPLoss, lambda: rivals.sup_ap_loop),
}
SIZES = {
    "tritonloss": (
        *((n, loss) for n in (512, 1024, 4096) for loss in LOSSES),
        (4096, "TripletMargin of 64"),
        (16384, "TripletMargin of 64"),
    ),
    "rival": (
        *((n, "TripletMargin") for n in (512, 1024)),
        *((4096, loss) for loss in ("RecallAtK", "SupAP")),
    ),
}


def step(name: str, n: int, loss: str, backward: bool, device: str) -> Callable[[], Tensor]:
    """A function that runs the loss once, with or without its backward pass, and returns the value."""
    kind, _, size = loss.partition(" of ")
    criterion = LOSSES[kind][name == "rival"]()
    rows, labels = batch(n, device)
    if size:
        labels = torch.arange(n, device=device) // int(size)

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
    ours, theirs = (table[name, 1024, "TripletMargin", True] for name in ("tritonloss", "rival"))
    factor = theirs.seconds / ours.seconds
    yield "TripletMargin, N = 1024, factor to pml 2.9.0, at least 20", factor, factor >= 20
    share = (ours.peak or 0) / (theirs.peak or 1)
    yield "TripletMargin, N = 1024, memory over that of pml 2.9.0, at most 0.01", share, share <= 0.01
    seconds = table["tritonloss", 4096, "TripletMargin", True].seconds
    yield "TripletMargin, N = 4096, seconds, at most 0.3", seconds, seconds <= 0.3
    small, large = (table["tritonloss", n, "TripletMargin of 64", True].peak or 0 for n in (4096, 16384))
    yield (
        "TripletMargin of 64, peak MiB from N = 4096 to 16384 over 4, at most 1",
        large / small / 4,
        large <= 4 * small,
    )
    yield "TripletMargin of 64, N = 16384, peak MiB, at most 128", large / MEBIBYTE, large <= 128 * MEBIBYTE
    for loss in ("RecallAtK", "SupAP"):
        ours, theirs = (table[name, 4096, loss, True] for name in ("tritonloss", "rival"))
        factor = theirs.seconds / ours.seconds
        yield f"{loss}, N = 4096, factor to a loop over the queries, at least 20", factor, factor >= 20
