"""What is measured, in the order of its worth, and how one step of each cell is made."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
from torch import Tensor, nn

from bench import rivals
from bench.cases import OURS
from bench.registry import LOSSES as LOSS_CASES
from bench.registry import title
from tritonloss import losses
from tritonloss.ops import streaming

FLOOR, PRECISION, PANELS = "GEMMs alone", "precision", "panels"
# How the rows of a cell are multiplied, by the name of its mode: torch's float32 matmul precision, TRITONLOSS_PRODUCTS,
# and the dtype of the rows.
MODES = {
    "highest": ("highest", "ieee", torch.float32),
    "high": ("high", "auto", torch.float32),
    "split": ("highest", "split", torch.float32),
    "bfloat16": ("highest", "split", torch.bfloat16),
    "float16": ("highest", "split", torch.float16),
}
GEMM_BLOCK_BYTES = 2**30

Size = tuple[int, ...]  # (N,), with proxies (N, C)


class Cell(NamedTuple):
    """One implementation of one loss at one size. matmul: a key of MODES."""

    loss: str
    name: str
    size: Size
    matmul: str = "highest"

    @property
    def key(self) -> str:
        return "|".join([self.loss, self.name, "x".join(map(str, self.size)), self.matmul])


class Rival(NamedTuple):
    """build(size, D) makes a criterion; bytes_needed(size) estimates its peak, from CPU runs of the same code."""

    build: Callable[[Size, int], Callable[[Tensor, Tensor], Tensor]]
    bytes_needed: Callable[[Size], float]


class Loss(NamedTuple):
    """build(size, D, options) makes our criterion."""

    build: Callable[..., nn.Module]
    rivals: dict[str, Rival]
    with_proxies: bool = False


class Plan(NamedTuple):
    """The sizes; with `compiled`, rivals under torch.compile as well."""

    dimension: int
    batches: tuple[int, ...]
    proxies: tuple[Size, ...]
    check_batches: tuple[int, ...]
    precision_batch: int
    compiled: bool
    panel_rows: tuple[int, ...]


class Step(NamedTuple):
    """One training step in two parts; backward takes what forward returned."""

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], Any]
    leaves: list[Tensor]


PLANS = {
    "full": Plan(
        dimension=512,
        batches=(1024, 4096, 16384, 32768),
        proxies=tuple((n, c) for c in (10_000, 100_000, 1_000_000) for n in (4096, 16384)),
        check_batches=(129, 260),
        precision_batch=2048,
        compiled=True,
        panel_rows=tuple(1 << n for n in range(6, 14)),
    ),
    "tiny": Plan(
        dimension=16,
        batches=(32,),
        proxies=((32, 12),),
        check_batches=(23,),
        precision_batch=16,
        compiled=False,
        panel_rows=(8, 32),
    ),
}


def function(loss: Callable[[Tensor, Tensor], Tensor], per_pair: float, power: int = 2) -> dict[str, Rival]:
    """`loss` eager and compiled, both given room for per_pair N^power bytes, though the compiled form takes less."""

    def room(size: Size) -> float:
        return per_pair * size[0] ** power

    return {
        "eager": Rival(lambda size, dimension: loss, room),
        "compiled": Rival(lambda size, dimension: torch.compile(loss, dynamic=False), room),
    }


def gathered_soprc(size: Size, dimension: int) -> nn.Module:
    return rivals.SOPRCGathered(size[0] // 4)


RIVALS = {
    "PNP": {
        **function(rivals.pnp_gathered, 64),
        "dense": function(rivals.pnp_dense, 16, power=3)["eager"],
    },
    "SmoothAP": {
        **function(rivals.smooth_ap_gathered, 70),
        "dense": function(rivals.smooth_ap_dense, 16, power=3)["eager"],
    },
    "SOPRC": {
        "eager": Rival(gathered_soprc, lambda size: 90 * size[0] ** 2),
        "compiled": Rival(
            lambda size, dimension: torch.compile(gathered_soprc(size, dimension), dynamic=False),
            lambda size: 90 * size[0] ** 2,
        ),
    },
    "Histogram": function(rivals.histogram_dense, 50),
    "FastAP": function(rivals.fastap_dense, 300),
    "ProxyAnchor": {
        "eager": Rival(
            lambda size, dimension: rivals.ProxyAnchorDense(size[1], dimension, compiled=False),
            lambda size: 55 * size[0] * size[1],
        ),
        "compiled": Rival(
            lambda size, dimension: rivals.ProxyAnchorDense(size[1], dimension, compiled=True),
            lambda size: 20 * size[0] * size[1],
        ),
    },
}
# Of SOPRC what its rivals compute.
OPTIONS = {"SOPRC": {"w_var": 0}}


def ours(name: str) -> Loss:
    """The loss of the registry, with a class for every four rows, or with C proxies."""
    case, options = LOSS_CASES[name], OPTIONS.get(title(name), {})

    def build(size: Size, dimension: int, **given: Any) -> nn.Module:
        n_classes = size[1] if case.per_proxy else -(-size[0] // 4)
        return case.timed(n_classes, dimension, **options, **given)

    return Loss(build, RIVALS.get(title(name), {}), case.per_proxy)


LOSSES = {title(name): ours(name) for name in LOSS_CASES}


def sizes(loss: str, plan: Plan) -> tuple[Size, ...]:
    return plan.proxies if LOSSES[loss].with_proxies else tuple((n,) for n in plan.batches)


def cells(plan: Plan) -> list[Cell]:
    """Every cell once, the most telling first."""
    return list(dict.fromkeys(_in_order(plan)))


def _in_order(plan: Plan) -> Iterator[Cell]:
    def of(loss: str, *names: str, matmul: str = "highest") -> Iterator[Cell]:
        known = {OURS, FLOOR, *LOSSES[loss].rivals}
        for size in sizes(loss, plan):
            for name in names if known.issuperset(names) else ():
                # The products are the same for all losses over the same batch.
                yield Cell(FLOOR if name == FLOOR else loss, name, size, matmul)

    first = (plan.batches[0],)
    yield from of("PNP", OURS, FLOOR)
    yield Cell("PNP", "eager", first)
    if plan.compiled:
        yield Cell("PNP", "compiled", first)
    for loss in LOSSES:
        yield from of(loss, OURS, FLOOR)
    for loss in LOSSES:
        yield from of(loss, "eager")
    for loss in LOSSES:
        yield from of(loss, OURS, FLOOR, matmul="high")
    for mode in ("bfloat16", "split", "float16"):
        for loss in LOSSES:
            yield from of(loss, OURS, matmul=mode)
    for rows in plan.panel_rows:
        yield Cell(PANELS, f"{rows} rows", (plan.batches[-1],), "bfloat16")
    yield Cell(PRECISION, PRECISION, (plan.precision_batch,))
    for loss, case in LOSSES.items():
        if "dense" in case.rivals:
            yield from of(loss, "dense")
    # A compiler run of some ten seconds each: small batches of every loss before large ones.
    for index in range(max(len(plan.batches), len(plan.proxies)) if plan.compiled else 0):
        for loss in LOSSES:
            for size in sizes(loss, plan)[index : index + 1]:
                if "compiled" in LOSSES[loss].rivals:
                    yield Cell(loss, "compiled", size)


def inputs(size: Size, dimension: int, device: str) -> tuple[Tensor, Tensor]:
    """Embeddings [N, D] float32 and labels [N]: runs of four of a class, or any of C classes."""
    generator = torch.Generator().manual_seed(size[0])
    rows = torch.randn(size[0], dimension, generator=generator).to(device).requires_grad_()
    if len(size) == 1:
        return rows, (torch.arange(size[0]) // 4).to(device)
    return rows, torch.randint(size[1], (size[0],), generator=generator).to(device)


def step(cell: Cell, dimension: int, device: str) -> Step:
    """The step of a cell: a GEMM has no loss, and returns the last block of its scores."""
    if cell.name == FLOOR:
        return gemms(cell.size, dimension, device)
    dtype = MODES[cell.matmul][2]
    rows, labels = inputs(cell.size, dimension, device)
    rows = rows.detach().to(dtype).requires_grad_()
    if cell.loss == PANELS:
        return of_height(losses.PNPLoss(), int(cell.name.split()[0]), rows, labels)
    case = LOSSES[cell.loss]
    build = case.build if cell.name == OURS else case.rivals[cell.name].build
    criterion = build(cell.size, dimension)
    leaves = [rows]
    if isinstance(criterion, nn.Module):
        criterion = criterion.to(device)
        if case.with_proxies:
            criterion = criterion.to(dtype)
        leaves += list(criterion.parameters())
    fill(leaves[1:])
    return Step(lambda: criterion(rows, labels), Tensor.backward, leaves)


def of_height(criterion: nn.Module, height: int, rows: Tensor, labels: Tensor) -> Step:
    """A step in panels of `height` rows, whatever the plan of the package is."""

    def forward() -> Tensor:
        with mock.patch.object(streaming, "rows_per_block", lambda n, *_: max(1, min(height, n))):
            return cast(Tensor, criterion(rows, labels))

    return Step(forward, Tensor.backward, [rows])


@torch.no_grad()
def fill(proxies: list[Tensor]) -> None:
    """The same values for every implementation."""
    for weight in proxies:
        generator = torch.Generator(weight.device).manual_seed(weight.shape[0])
        weight.normal_(generator=generator)


def gemms(size: Size, dimension: int, device: str) -> Step:
    """What no implementation can do without: the similarities, and the two products of their gradient, by cuBLAS.

    In blocks of 1 GiB, so that it fits where ours does. The other side has N rows, or C.
    """
    columns = size[-1]
    rows = torch.randn(size[0], dimension, device=device)
    keys = torch.randn(columns, dimension, device=device)
    block = max(1, min(size[0], GEMM_BLOCK_BYTES // (4 * columns)))
    scores = torch.empty(block, columns, device=device)
    grad_rows, grad_keys = torch.empty_like(rows), torch.zeros_like(keys)

    def forward() -> Tensor:
        for part in rows.split(block):
            torch.mm(part, keys.T, out=scores[: len(part)])
        return scores

    def backward(scores: Tensor) -> None:
        for part, grad in zip(rows.split(block), grad_rows.split(block), strict=True):
            torch.mm(scores[: len(part)], keys, out=grad)
            torch.addmm(grad_keys, scores[: len(part)].T, part, out=grad_keys)

    return Step(forward, backward, [])
