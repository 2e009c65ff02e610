"""`python -m bench.steps`: what a small batch costs on the host, and how much work it gives to a device.

In a batch of a few hundred rows the operations of a step are so short that their number decides. Three figures per
loss:

1. device operations of a forward and backward pass at N = 256, four per class: those of torch, without views and
   allocations, and the launches of our kernels, which are counted and not run;
2. Python functions called before the first launch;
3. microseconds of a forward and backward pass at N = 8, D = 8, on one thread of a CPU, in plain PyTorch, beside those
   of pytorch-metric-learning and of the shortest step there is (normalise, product, sigmoid, sum), in one run.
"""

import contextlib
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.registry import LOSSES
from tritonloss import use_backend

# What starts nothing on a device: views, allocations, and reading a number that is there.
FREE = {
    "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "empty",
    "empty_like", "empty_strided", "expand", "lift_fresh", "new_empty", "permute", "promote_types", "reshape",
    "scalar_tensor", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold",
    "unsqueeze", "view", "view_as",
}  # fmt: skip


class Counting(TorchDispatchMode):
    """Counts operations of torch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name not in FREE:
            self.operations[name] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def launches(seen: Callable[[str], None]) -> Iterator[None]:
    """The Triton backend on CPU tensors, whose kernels are handed to `seen` by name instead of being run."""
    from tritonloss.backends import triton as backend

    real = backend._launch, backend.INTERPRETED
    backend._launch = lambda name, grid, arguments, device: seen(name)
    backend.INTERPRETED = True
    try:
        with use_backend("triton"):
            yield
    finally:
        backend._launch, backend.INTERPRETED = real


def batch(n: int, dim: int) -> tuple[Tensor, Tensor]:
    """Four rows per class, in order."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, dim, generator=generator).requires_grad_(), torch.arange(n) // 4


def device_operations(name: str, n: int = 256, dim: int = 128) -> Counter[str]:
    """Operations of torch and launches of kernels, by name."""
    criterion, (embeddings, labels) = LOSSES[name].timed(n // 4, dim), batch(n, dim)
    counting = Counting()
    with launches(lambda kernel: counting.operations.update([f"kernel {kernel}"])):
        criterion(embeddings, labels).backward()
        counting.operations.clear()
        with counting:
            criterion(embeddings, labels).backward()
    return counting.operations


def python_calls(name: str, n: int = 256, dim: int = 128) -> int:
    """Python functions that a call enters before the first launch."""
    criterion, (embeddings, labels) = LOSSES[name].timed(n // 4, dim), batch(n, dim)
    made: list[int] = []
    entered = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    with launches(lambda kernel: made.append(entered)):
        criterion(embeddings, labels)
        made.clear()
        entered = 0
        sys.setprofile(count)
        try:
            criterion(embeddings, labels)
        finally:
            sys.setprofile(None)
    return made[0]


def microseconds(criterion: Callable[[Tensor, Tensor], Tensor], n: int = 8, dim: int = 8) -> float:
    """The shortest of 7 runs of 300 forward and backward passes, per pass."""
    embeddings, labels = batch(n, dim)

    def run(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            embeddings.grad = None
            criterion(embeddings, labels).backward()
        return (time.perf_counter() - start) / steps

    run(50)
    return 1e6 * min(run(300) for _ in range(7))


def plain(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The shortest step there is."""
    rows = nn.functional.normalize(embeddings)
    return torch.sigmoid(rows @ rows.T).sum()


def rivals() -> dict[str, nn.Module]:
    from pytorch_metric_learning import losses as pml

    return {
        "PNPLoss": pml.PNPLoss(),
        "SmoothAPLoss": pml.SmoothAPLoss(),
        "HistogramLoss": pml.HistogramLoss(n_bins=100),
        "FastAPLoss": pml.FastAPLoss(),
        "ProxyAnchorLoss": pml.ProxyAnchorLoss(2, 8),
        "NTXentLoss": pml.NTXentLoss(),
        "SupConLoss": pml.SupConLoss(),
        "MultiSimilarityLoss": pml.MultiSimilarityLoss(),
        "CircleLoss": pml.CircleLoss(),
        "TripletMarginLoss": pml.TripletMarginLoss(),
    }


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # pytorch-metric-learning's, of torch
    peers = rivals()
    print("| loss | device operations | Python calls to a launch | us at N = 8 | pytorch-metric-learning |")
    print("|---|---|---|---|---|")
    for name, case in LOSSES.items():
        ours = microseconds(case.timed(2, 8))
        theirs = f"{microseconds(peers[name]):.0f}" if name in peers else ""
        operations = device_operations(name).total()
        print(f"| {name} | {operations} | {python_calls(name)} | {ours:.0f} | {theirs} |", flush=True)
    print(f"\nNormalise, product, sigmoid, sum: {microseconds(plain):.0f} us.")


if __name__ == "__main__":
    main()
