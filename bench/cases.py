"""The benchmarks: which implementations are compared, at which sizes, and the figures to reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import rivals
from bench.registry import LOSSES, title
from bench.report import MEBIBYTE, Table

DIMENSION = 128
OURS, PEER = "tritonloss", "pml 2.9.0"
Sizes = tuple[Any, ...]  # ints; the names of losses where one axis is the loss
Criterion = Callable[[Tensor, Tensor], Tensor]
Verdict = tuple[str, float, bool]  # the aim, what was measured, whether it was reached


def embeddings(n: int, dimension: int = DIMENSION) -> tuple[Tensor, Tensor]:
    """Rows [n, D] float32 and labels [n], four of each class."""
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, dimension, generator=generator), torch.arange(n) // 4


@dataclass(frozen=True)
class Benchmark:
    """A loss beside its rivals.

    loss: its name in the registry, or those of all, if one axis is the loss. sizes: of each implementation, ours first.
    rivals: each as build(*sizes). options: those of ours. axes: what the sizes are. inputs: rows and labels for sizes.
    tolerance, absolute: of the values: there is no figure for a wrong one. verdicts: the figures to reach. ratios: what
    `bench.compare` compares beside the rivals; larger is better.
    """

    loss: str | tuple[str, ...]
    sizes: Mapping[str, tuple[Sizes, ...]]
    rivals: Mapping[str, Callable[..., Criterion]] = field(default_factory=dict)
    subject: str = ""
    axes: tuple[str, ...] = ("N",)
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[..., tuple[Tensor, Tensor]] = embeddings
    tolerance: float = 1e-5
    absolute: float = 0
    verdicts: Callable[[Table], Iterator[Verdict]] = lambda table: iter(())
    ratios: Callable[[Table], dict[str, float]] = lambda table: {}

    @property
    def losses(self) -> tuple[str, ...]:
        return (self.loss,) if isinstance(self.loss, str) else self.loss

    @property
    def text(self) -> str:
        """What is measured."""
        names = ", ".join(map(title, self.losses))
        return self.subject or f"{names} forward + backward, float32, D = {DIMENSION}, four per class"

    def criterion(self, name: str, *sizes: Any) -> Criterion:
        if name in self.rivals:
            return self.rivals[name](*sizes)
        loss = self.losses[0] if isinstance(self.loss, str) else f"{kind(sizes[1])}Loss"
        n_classes = sizes[1] if LOSSES[loss].per_proxy else max(1, sizes[0] // 4)
        return LOSSES[loss].timed(n_classes, DIMENSION, **self.options)

    def step(self, name: str, *sizes: Any, backward: bool, device: str) -> Callable[[], Tensor]:
        """A function that runs the loss once, with or without its backward pass, and returns the value."""
        inputs = [tensor.to(device) for tensor in self.inputs(*sizes)]
        criterion = self.criterion(name, *sizes)
        leaves = [tensor.requires_grad_() for tensor in inputs if tensor.is_floating_point()]
        proxies: list[Tensor] = []
        if isinstance(criterion, nn.Module):
            proxies += criterion.to(device).parameters()
        with torch.no_grad():
            for weight in proxies:
                generator = torch.Generator().manual_seed(sizes[0])
                weight.copy_(torch.randn(weight.shape, generator=generator))

        def run() -> Tensor:
            with torch.set_grad_enabled(backward):
                loss = criterion(*inputs)
            if backward:
                loss.backward()
            if device == "cuda":
                torch.cuda.synchronize()
            for leaf in (*leaves, *proxies):  # so that the next run starts with its inputs only
                leaf.grad = None
            return loss.detach()

        return run


def kind(loss: str) -> str:
    """Without what is said of the classes: "TripletMargin of 64" has classes of 64 rows."""
    return loss.partition(" of ")[0]


def each(*sizes: int) -> tuple[Sizes, ...]:
    return tuple((n,) for n in sizes)


def plain(loss: Criterion) -> Callable[..., Criterion]:
    return lambda *sizes: loss


def compiled(loss: Criterion) -> Callable[..., Criterion]:
    return lambda *sizes: torch.compile(loss, dynamic=False)


def peak(table: Table, *key: Any) -> float:
    size = table[(*key, True)].peak
    assert size is not None
    return size / MEBIBYTE


def factor(table: Table, rival: str, *sizes: int) -> float:
    return table[(rival, *sizes, True)].seconds / table[(OURS, *sizes, True)].seconds


def at_least(aim: str, value: float, least: float) -> Verdict:
    return f"{aim}, at least {least:g}", value, value >= least


def at_most(aim: str, value: float, most: float) -> Verdict:
    return f"{aim}, at most {most:g}", value, value <= most


def growths(table: Table, *batches: int) -> Iterator[Verdict]:
    for n in batches:
        growth = table[OURS, 2 * n, True].seconds / table[OURS, n, True].seconds
        yield at_most(f"growth of time from N = {n} to {2 * n}", growth, 4.6)


def peaks(table: Table, most: float, *batches: int) -> Iterator[Verdict]:
    for n in batches:
        yield at_most(f"N = {n}, peak MiB above the inputs", peak(table, OURS, n), most)


def pnp_verdicts(table: Table) -> Iterator[Verdict]:
    yield at_least(f"N = 512, factor to {PEER}", factor(table, PEER, 512), 1000)
    yield from growths(table, 2048, 4096)
    rival = "gathered, compiled"
    for n in (2048, 4096):
        yield at_most(f"N = {n}, time over that of the compiled rival", 1 / factor(table, rival, n), 1.3)
        share = peak(table, OURS, n) / peak(table, rival, n)
        yield at_most(f"N = {n}, memory over that of the compiled rival", share, 1)
    yield from peaks(table, 1024, 8192, 16384)


def smooth_ap_verdicts(table: Table) -> Iterator[Verdict]:
    yield at_least(f"N = 512, factor to {PEER}", factor(table, PEER, 512), 300)
    yield from peaks(table, 1024, 8192)


def histogram_verdicts(table: Table) -> Iterator[Verdict]:
    yield at_least(f"N = 1024, factor to {PEER}", factor(table, PEER, 1024), 300)
    yield from growths(table, 2048, 4096, 8192)
    yield from peaks(table, 2048, 16384)


def fastap_verdicts(table: Table) -> Iterator[Verdict]:
    yield at_least(f"N = 2048, factor to {PEER}", factor(table, PEER, 2048), 2)
    share = peak(table, OURS, 2048) / peak(table, PEER, 2048)
    yield at_most(f"N = 2048, share of the peak memory of {PEER}", share, 0.25)
    yield from peaks(table, 2048, 16384)


def proxy_anchor_verdicts(table: Table) -> Iterator[Verdict]:
    """Memory is counted above inputs and gradients."""

    def working_set(name: str, n: int, n_classes: int) -> float:
        return peak(table, name, n, n_classes) - 4 * DIMENSION * (n + n_classes) / MEBIBYTE

    sizes = 1024, 10000
    yield at_least(f"N = 1024, C = 10000, factor to {PEER}", factor(table, PEER, *sizes), 1.5)
    share = working_set(OURS, *sizes) / working_set(PEER, *sizes)
    yield at_most(f"N = 1024, C = 10000, memory over that of {PEER}", share, 0.125)
    size = working_set(OURS, 4096, 100000)
    yield at_most("N = 4096, C = 100000, MiB above inputs and gradients", size, 3072)


BINARY = (0, 1)


def soprc_inputs(n: int, dimension: int) -> tuple[Tensor, Tensor]:
    if (n, dimension) != BINARY:
        return embeddings(n, dimension)
    return torch.randn(101_000, generator=torch.Generator().manual_seed(0)), torch.arange(101_000) < 1000


def soprc_verdicts(table: Table) -> Iterator[Verdict]:
    rival = "gathered"
    ratio = 1 / factor(table, rival, 224, 512)
    yield at_most("N = 224, D = 512, time over that of the gathered rival", ratio, 1)
    for dimension in (128, 512):
        sizes = 4096, dimension
        where = f"N = 4096, D = {dimension}"
        yield at_least(f"{where}, factor to the gathered rival", factor(table, rival, *sizes), 5)
        share = peak(table, OURS, *sizes) / peak(table, rival, *sizes)
        yield at_most(f"{where}, memory over that of the gathered rival", share, 0.1)
    size = peak(table, OURS, *BINARY)
    yield at_most("binary, 1000 and 100000, peak MiB above the inputs", size, 200)


def large_classes_verdicts(table: Table) -> Iterator[Verdict]:
    ratio = 1 / large_classes_ratios(table)["N = 8192, 2 classes: speed against 2048 classes"]
    yield at_most("N = 8192, time of 2 classes over that of 2048", ratio, 5)
    # Rank, score and slope of the pairs alone are 384 MiB at N = 8192, 6 GiB at N = 32768.
    for n, limit in ((8192, 640), (32768, 1024)):
        yield at_most(f"N = {n}, 2 classes, peak MiB above the inputs", peak(table, OURS, n, 2), limit)


def large_classes_ratios(table: Table) -> dict[str, float]:
    few, many = (table[OURS, 8192, classes, True].seconds for classes in (2, 2048))
    return {"N = 8192, 2 classes: speed against 2048 classes": many / few}


def equal_classes(n: int, n_classes: int) -> tuple[Tensor, Tensor]:
    return embeddings(n)[0], torch.arange(n) * n_classes // n


def any_classes(n: int, n_classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return embeddings(n)[0], torch.randint(n_classes, (n,), generator=generator)


def four_of_a_class(n: int, loss: str) -> tuple[Tensor, Tensor]:
    """Or as many as the name of the loss says."""
    return embeddings(n)[0], torch.arange(n) // int(loss.partition(" of ")[2] or 4)


def pairs_verdicts(table: Table) -> Iterator[Verdict]:
    yield at_least(f"NTXent, N = 512, factor to {PEER}", factor(table, PEER, 512, "NTXent"), 1000)
    for loss in ("NTXent", "SupCon"):
        size = peak(table, OURS, 16384, loss)
        yield at_most(f"{loss}, N = 16384, peak MiB above inputs and gradients", size, 64)
    for loss in ("MultiSimilarity", "Circle"):
        yield at_least(f"{loss}, N = 2048, factor to {PEER}", factor(table, PEER, 2048, loss), 3)
        share = peak(table, OURS, 2048, loss) / peak(table, PEER, 2048, loss)
        yield at_most(f"{loss}, N = 2048, memory over that of {PEER}", share, 0.1)


def triplets_verdicts(table: Table) -> Iterator[Verdict]:
    sizes, large = (1024, "TripletMargin"), "TripletMargin of 64"
    yield at_least(f"TripletMargin, N = 1024, factor to {PEER}", factor(table, "rival", *sizes), 20)
    share = peak(table, OURS, *sizes) / peak(table, "rival", *sizes)
    yield at_most(f"TripletMargin, N = 1024, memory over that of {PEER}", share, 0.01)
    seconds = table[OURS, 4096, "TripletMargin", True].seconds
    yield at_most("TripletMargin, N = 4096, seconds", seconds, 0.3)
    growth = peak(table, OURS, 16384, large) / peak(table, OURS, 4096, large) / 4
    yield at_most(f"{large}, peak MiB from N = 4096 to 16384 over 4", growth, 1)
    yield at_most(f"{large}, N = 16384, peak MiB", peak(table, OURS, 16384, large), 128)
    for loss in ("RecallAtK", "SupAP"):
        aim = f"{loss}, N = 4096, factor to a loop over the queries"
        yield at_least(aim, factor(table, "rival", 4096, loss), 20)


def towers(n: int) -> tuple[Tensor, Tensor]:
    queries, keys = torch.randn(2, n, DIMENSION, generator=torch.Generator().manual_seed(n)).unbind()
    return queries.clone(), keys.clone()


def two_towers(queries: Tensor, keys: Tensor) -> Tensor:
    criterion: Callable[..., Tensor] = LOSSES["InfoNCELoss"].timed(1, DIMENSION, directions="both")
    return criterion(queries, ref_emb=keys)


def infonce_verdicts(table: Table) -> Iterator[Verdict]:
    ratio = 1 / factor(table, "cross_entropy", 16384)
    yield at_most("N = 16384, time over that of cross_entropy", ratio, 1.1)
    yield at_most("N = 16384, peak MiB above inputs and gradients", peak(table, OURS, 16384), 64)


PROXIES = tuple((n, n_classes) for n in (256, 1024, 4096) for n_classes in (1000, 10000, 100000))
SOPRC = ((224, 512), (512, 512), (1024, 512), (2048, 512), (4096, 128), (4096, 512))
PAIRS = ("NTXent", "SupCon", "MultiSimilarity", "Circle")
LOOPS = {"RecallAtK": rivals.recall_at_k_loop, "SupAP": rivals.sup_ap_loop}
TOWERS = each(1024, 4096, 16384)
GATHERED = each(512, 1024, 2048, 4096)

BENCHMARKS = {
    "pnp": Benchmark(
        "PNPLoss",
        {
            OURS: each(128, 256, 512, 1024, 2048, 4096, 8192, 16384),
            PEER: each(128, 256, 512),
            "gathered": GATHERED,
            "gathered, compiled": GATHERED,
        },
        {
            PEER: lambda *sizes: rivals.pml("PNPLoss"),
            "gathered": plain(rivals.pnp_gathered),
            "gathered, compiled": compiled(rivals.pnp_gathered),
        },
        verdicts=pnp_verdicts,
    ),
    "large_classes": Benchmark(
        "PNPLoss",
        {OURS: ((2048, 512), (2048, 2), (8192, 2048), (8192, 16), (8192, 2), (32768, 2))},
        subject=f"PNP forward + backward, float32, D = {DIMENSION}, classes of equal size",
        axes=("N", "classes"),
        inputs=equal_classes,
        verdicts=large_classes_verdicts,
        ratios=large_classes_ratios,
    ),
    "proxy_anchor": Benchmark(
        "ProxyAnchorLoss",
        {OURS: PROXIES, PEER: PROXIES[:-1], "dense, compiled": PROXIES},  # its last takes about 20 GB
        {
            PEER: lambda n, n_classes: rivals.pml_proxy_anchor(n_classes, DIMENSION),
            "dense, compiled": lambda n, n_classes: rivals.ProxyAnchorDense(
                n_classes, DIMENSION, compiled=True
            ),
        },
        subject=f"ProxyAnchor forward + backward, float32, D = {DIMENSION}",
        axes=("N", "C"),
        inputs=any_classes,
        verdicts=proxy_anchor_verdicts,
    ),
    "smoothap": Benchmark(
        "SmoothAPLoss",
        {
            OURS: each(128, 256, 512, 1024, 2048, 4096, 8192, 16384),
            PEER: each(128, 256, 512),
            "gathered": GATHERED,
        },
        {PEER: lambda *sizes: rivals.pml_smooth_ap(), "gathered": plain(rivals.smooth_ap_gathered)},
        verdicts=smooth_ap_verdicts,
    ),
    "soprc": Benchmark(
        "SOPRCLoss",
        {OURS: (*SOPRC, BINARY), "gathered": SOPRC},
        {"gathered": lambda n, dimension: rivals.SOPRCGathered(n // 4)},
        subject="SOPRC without Eq. 9, forward + backward, float32, four per class; N = 0: binary, 1000 and 100000 "
        "scores",
        axes=("N", "D"),
        options={"w_var": 0},
        inputs=soprc_inputs,
        verdicts=soprc_verdicts,
    ),
    "histogram": Benchmark(
        "HistogramLoss",
        {
            OURS: each(256, 512, 1024, 2048, 4096, 8192, 16384),
            PEER: each(256, 512, 1024),
            "dense": each(256, 512, 1024, 2048, 4096),
        },
        {PEER: lambda *sizes: rivals.pml_histogram(), "dense": plain(rivals.histogram_dense)},
        tolerance=1e-4,  # the rivals add the masses of all pairs in float32
        verdicts=histogram_verdicts,
    ),
    "fastap": Benchmark(
        "FastAPLoss",
        {
            OURS: each(512, 1024, 2048, 4096, 8192, 16384),
            PEER: each(512, 1024, 2048),
            "dense": each(512, 1024, 2048),
        },
        {PEER: lambda *sizes: rivals.pml_fastap(), "dense": plain(rivals.fastap_dense)},
        tolerance=1e-4,
        verdicts=fastap_verdicts,
    ),
    "pairs": Benchmark(
        tuple(f"{loss}Loss" for loss in PAIRS),
        {
            OURS: (
                (128, "NTXent"),
                (256, "NTXent"),
                *((n, loss) for n in (512, 1024, 2048, 4096, 16384) for loss in PAIRS),
            ),
            # Its NTXent is a cube, 6.5 GB at N = 512.
            PEER: (
                *((n, "NTXent") for n in (128, 256, 512)),
                *((n, loss) for n in (512, 1024, 2048, 4096) for loss in PAIRS[1:]),
            ),
        },
        {PEER: lambda n, loss: rivals.pml(f"{loss}Loss")},
        axes=("N", "loss"),
        inputs=four_of_a_class,
        verdicts=pairs_verdicts,
    ),
    "triplets": Benchmark(
        ("TripletMarginLoss", "RecallAtKLoss", "SupAPLoss"),
        {
            OURS: (
                *((n, loss) for n in (512, 1024, 4096) for loss in ("TripletMargin", *LOOPS)),
                (4096, "TripletMargin of 64"),
                (16384, "TripletMargin of 64"),
            ),
            "rival": (
                *((n, "TripletMargin") for n in (512, 1024)),
                *((4096, loss) for loss in LOOPS),
            ),
        },
        {"rival": lambda n, loss: LOOPS.get(loss) or rivals.pml("TripletMarginLoss")},
        subject=f"TripletMargin, RecallAtK, SupAP, forward + backward, float32, D = {DIMENSION}, four per class (of "
        "64: 64)",
        axes=("N", "loss"),
        inputs=four_of_a_class,
        absolute=1e-5,
        verdicts=triplets_verdicts,
    ),
    "infonce": Benchmark(
        "InfoNCELoss",
        {
            OURS: TOWERS,
            "cross_entropy": TOWERS,
            "linear_cross_entropy": TOWERS if hasattr(F, "linear_cross_entropy") else (),
        },
        {
            OURS: plain(two_towers),
            "cross_entropy": plain(rivals.info_nce_dense),
            "linear_cross_entropy": plain(rivals.info_nce_linear),
        },
        subject=f"InfoNCE of two towers, both directions, forward + backward, float32, D = {DIMENSION}",
        inputs=towers,
        verdicts=infonce_verdicts,
    ),
}
# A loss of the registry without rivals is measured alone.
_MEASURED = {loss for benchmark in BENCHMARKS.values() for loss in benchmark.losses}
BENCHMARKS |= {
    title(name).lower(): Benchmark(name, {OURS: each(512, 1024, 2048, 4096)})
    for name, case in LOSSES.items()
    if name not in _MEASURED and not case.per_proxy
}
