"""`estimate`: what a loss costs on a GPU, by arithmetic alone: neither the GPU nor data is needed.

A step is a few stages, one after the other: the product of scores, the kernels over the scores, forward and backward,
and the products of the gradient; in half precision a pass over the panel follows the first and precedes the last. Each
takes as long as the slowest of what it needs: arithmetic units, memory, or
the issue of instructions. Their sum is a floor: launches, sorting and the operations on [N, D] come on top.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tritonloss.ops.panels import (
    Panels,
    ProductCost,
    gradient_work,
    item_bytes,
    plan_panels,
    products_of,
    score_work,
)

GIGABYTE = 10**9


@dataclass(frozen=True)
class DeviceSpec:
    """A GPU, by its data sheet; rates are per second, of dense matrices: half of what is stated for sparse ones.

    tensor, tf32, float32, float64: floating point operations of half precision products with float32 sums, and of
        products in TF32, float32 and float64.
    instructions: of a thread, in float32: lanes of all multiprocessors times the clock.
    bandwidth: bytes of device memory. memory, l2: bytes.
    """

    name: str
    tensor: float
    tf32: float
    float32: float
    float64: float
    instructions: float
    bandwidth: float
    memory: int
    l2: int
    multiprocessors: int


DEVICES = {
    spec.name: spec
    for spec in (
        DeviceSpec("A100", 312e12, 156e12, 19.5e12, 9.7e12, 9.75e12, 2.04e12, 80 * GIGABYTE, 40 << 20, 108),
        DeviceSpec(
            "H100", 989.5e12, 494.5e12, 66.9e12, 33.5e12, 33.5e12, 3.35e12, 80 * GIGABYTE, 50 << 20, 132
        ),
        DeviceSpec(
            "H200", 989.5e12, 494.5e12, 66.9e12, 33.5e12, 33.5e12, 4.8e12, 141 * GIGABYTE, 60 << 20, 132
        ),
        # 64 lanes a compute unit: nothing is assumed to issue two at once. The L2 is that of one die.
        DeviceSpec("MI300X", 1307e12, 654e12, 163e12, 81.7e12, 40.9e12, 5.3e12, 192 * GIGABYTE, 4 << 20, 304),
        DeviceSpec("RTX 4060", 30e12, 15e12, 15e12, 0.24e12, 7.5e12, 0.272e12, 8 << 30, 24 << 20, 24),
    )
}


@dataclass(frozen=True)
class Assumptions:
    """What turns counts into seconds.

    tensor_share: of the peak of tensor cores (half precision, TF32) that a matrix product reaches.
    vector_share: of the peak of float32 and float64 arithmetic that it reaches.
    bandwidth_share: of the peak of device memory that anything reaches.
    issue_share: of the instructions that kernels could issue.
    triple: instructions for a (query, positive, key), forward; backward takes as many again. The sigmoid: see
        kernels/README.md.
    pair: instructions for a (query, key) of a histogram or a sum of exponentials, forward, and backward again. Not
        counted in machine code.
    """

    tensor_share: float = 0.7
    vector_share: float = 0.8
    bandwidth_share: float = 0.8
    issue_share: float = 0.8
    triple: float = 7.1
    pair: float = 20.0


TRIPLES, PAIRS, PROXIES = "triples", "pairs", "proxies"
LOSSES = {
    "PNPLoss": TRIPLES,
    "SmoothAPLoss": TRIPLES,
    "SOPRCLoss": TRIPLES,
    "HistogramLoss": PAIRS,
    "FastAPLoss": PAIRS,
    "ProxyAnchorLoss": PROXIES,
}
# Passes over a panel between its products, bytes for each pair: scores are read and written once to be multiplied by
# reciprocal norms; their gradient is read once and written as two halves, factors included.
FACTOR_BYTES, TERM_BYTES = 8, 8


@dataclass(frozen=True)
class Estimate:
    """What a step takes; `str` of it is a table.

    seconds: the floor, the sum over the stages of their slowest part.
    flop: floating point operations of the products.
    bytes: read from and written to device memory.
    memory: peak bytes above the embeddings, with their gradient where there is a backward pass.
    products_seconds, traffic_seconds, issue_seconds: all arithmetic of the products, all bytes, all instructions of the
        kernels, each by itself.
    bound: which of them, "products", "traffic" or "kernel issue", takes most of `seconds`.
    panels: the walk.
    """

    loss: str
    device: str
    n: int
    dimension: int
    dtype: torch.dtype
    products: str
    backward: bool
    seconds: float
    flop: int
    bytes: int
    memory: int
    products_seconds: float
    traffic_seconds: float
    issue_seconds: float
    bound: str
    panels: Panels

    def __str__(self) -> str:
        direction = "forward and backward" if self.backward else "forward"
        dtype = str(self.dtype).removeprefix("torch.")
        panels = self.panels
        lines = [
            f"{self.loss}, N = {self.n}, D = {self.dimension}, {dtype}, {direction}, on {self.device}",
            f"  at least      {_milliseconds(self.seconds)}, bound by {self.bound}",
            f"  products      {_milliseconds(self.products_seconds)}  {self.flop:.3g} flop, mode {self.products}",
            f"  traffic       {_milliseconds(self.traffic_seconds)}  {self.bytes / GIGABYTE:.3g} GB",
            f"  kernel issue  {_milliseconds(self.issue_seconds)}",
            f"  memory        {self.memory / GIGABYTE:9.3f} GB above the embeddings",
            f"  panels        {panels.n_panels} of {panels.rows} rows, {panels.programs} programs per launch",
        ]
        return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:9.3f} ms"


@dataclass(frozen=True)
class _Stage:
    """One launch after another: seconds of each resource, of which the slowest counts."""

    products: float = 0.0
    traffic: float = 0.0
    issue: float = 0.0

    def slowest(self) -> tuple[float, str]:
        parts = ((self.products, "products"), (self.traffic, "traffic"), (self.issue, "kernel issue"))
        return max(parts, key=lambda part: part[0])


def estimate(
    loss: object,
    n: int,
    d: int,
    *,
    per_class: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    device: str | DeviceSpec = "H200",
    products: str = "split",
    backward: bool = True,
    classes: int | None = None,
    memory_budget: int | None = None,
    panel_rows: int | None = None,
    assumptions: Assumptions | None = None,
) -> Estimate:
    """The time, memory and work of one step of a loss on a GPU, at least. Nothing is computed but these numbers.

    Args:
        loss: a loss of `tritonloss.losses`: its class, an instance, or the name of the class.
        n, d: embeddings of a batch, and entries of each, >= 1.
        per_class: embeddings of a class, >= 1. From about a hundred on, ranking losses take another algorithm where
            that is faster; then the time of the kernels is overestimated.
        dtype: of the embeddings: bfloat16, float16, float32 or float64.
        device: a name of `DEVICES` (A100, H100, H200, MI300X, RTX 4060) in any case, or a `DeviceSpec`.
        products: "split", "ieee", or "tf32", as `torch.set_float32_matmul_precision("high")` allows for float32.
        backward: whether there is a backward pass.
        classes: of `ProxyAnchorLoss`, its proxies; default n / per_class.
        memory_budget: bytes of a panel; default a sixteenth of the device's memory.
        panel_rows: rows of a panel in place of what the budget gives.
        assumptions: default `Assumptions()`.

    Raises:
        ValueError: an unknown loss, device, mode or dtype; a number below 1.
    """
    name = _name_of(loss)
    spec = _spec_of(device)
    assume = Assumptions() if assumptions is None else assumptions
    numbers = {"n": n, "d": d, "per_class": per_class, "classes": classes}
    for argument, value in {**numbers, "memory_budget": memory_budget, "panel_rows": panel_rows}.items():
        if value is not None and value < 1:
            raise ValueError(f"{argument} is {value}: expected at least 1")
    of = products_of(products, dtype)
    queries, keys = (classes or -(-n // per_class), n) if LOSSES[name] == PROXIES else (n, n)
    budget = spec.memory // 16 if memory_budget is None else memory_budget
    panels = plan_panels(queries, keys, item_bytes(of), budget, spec.multiprocessors, panel_rows)
    scores = score_work(panels, queries, keys, d, of, spec.l2)
    gradient = gradient_work(panels, queries, keys, d, of, spec.l2, meet_themselves=LOSSES[name] != PROXIES)
    item = item_bytes(of) * queries * keys
    # The forward kernel reads the scores, the backward kernel writes their gradient as well.
    forward_bytes, backward_bytes = item, 2 * item
    factors = FACTOR_BYTES * queries * keys if of.unit == "tensor" and dtype != torch.float32 else 0
    terms = TERM_BYTES * queries * keys if of.unit == "tensor" else 0
    instructions = queries * keys * _instructions(LOSSES[name], min(per_class, n), assume)

    multiply, move = _flop_rate(of, spec, assume), spec.bandwidth * assume.bandwidth_share
    issue = instructions / (spec.instructions * assume.issue_share)
    stages = [
        _Stage(scores.flop / multiply, scores.bytes / move),
        _Stage(traffic=factors / move),
        _Stage(0.0, forward_bytes / move, issue),
    ]
    flop, moved = scores.flop, scores.bytes + factors + forward_bytes
    if backward:
        stages += [
            _Stage(0.0, backward_bytes / move, issue),
            _Stage(traffic=terms / move),
            _Stage(gradient.flop / multiply, gradient.bytes / move),
        ]
        flop, moved = flop + gradient.flop, moved + backward_bytes + terms + gradient.bytes
    slowest = [stage.slowest() for stage in stages]
    shares = {bound: sum(time for time, by in slowest if by == bound) for _, bound in slowest}
    return Estimate(
        loss=name,
        device=spec.name,
        n=n,
        dimension=d,
        dtype=dtype,
        products=products,
        backward=backward,
        seconds=sum(time for time, _ in slowest),
        flop=flop,
        bytes=moved,
        memory=_memory(panels, queries, keys, d, of, dtype, backward),
        products_seconds=sum(stage.products for stage in stages),
        traffic_seconds=sum(stage.traffic for stage in stages),
        issue_seconds=sum(stage.issue for stage in stages),
        bound=max(shares, key=lambda bound: shares[bound]),
        panels=panels,
    )


def _name_of(loss: object) -> str:
    if isinstance(loss, str):
        found = loss if loss in LOSSES else None
    else:
        classes = (loss if isinstance(loss, type) else type(loss)).__mro__
        found = next((cls.__name__ for cls in classes if cls.__name__ in LOSSES), None)
    if found is None:
        raise ValueError(f"loss is {loss!r}: expected one of {', '.join(LOSSES)}")
    return found


def _spec_of(device: str | DeviceSpec) -> DeviceSpec:
    if isinstance(device, DeviceSpec):
        return device
    for name, spec in DEVICES.items():
        if name.lower() == device.lower():
            return spec
    raise ValueError(f"device is {device!r}: expected one of {', '.join(DEVICES)}, or a DeviceSpec")


def _flop_rate(of: ProductCost, spec: DeviceSpec, assume: Assumptions) -> float:
    share = assume.tensor_share if of.unit in ("tensor", "tf32") else assume.vector_share
    rate: float = getattr(spec, of.unit)
    return rate * share


def _instructions(kind: str, per_class: int, assume: Assumptions) -> float:
    return assume.triple * per_class if kind == TRIPLES else assume.pair


def _memory(
    panels: Panels, queries: int, keys: int, d: int, of: ProductCost, dtype: torch.dtype, backward: bool
) -> int:
    """Buffers of a panel (one without a backward pass), sorted rows, operands, sums and the gradient of the rows."""
    entries = d * (keys if queries == keys else queries + keys)
    if not backward:
        return panels.bytes // 2 + entries * (dtype.itemsize + of.operand_bytes)
    rows = 2 * dtype.itemsize + of.operand_bytes + of.backward_bytes + item_bytes(of)
    return panels.bytes + entries * rows


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m tritonloss estimate PNPLoss 32768 512 --device H200`: print the table."""
    parser = argparse.ArgumentParser(prog="python -m tritonloss estimate", description=__doc__)
    parser.add_argument("loss", choices=LOSSES)
    parser.add_argument("n", type=int, help="embeddings of a batch")
    parser.add_argument("d", type=int, help="entries of an embedding")
    parser.add_argument("--per-class", type=int, default=4)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"), default="bfloat16")
    parser.add_argument("--device", choices=DEVICES, default="H200")
    parser.add_argument("--products", choices=("split", "ieee", "tf32"), default="split")
    parser.add_argument("--forward", action="store_true", help="without a backward pass")
    parser.add_argument("--classes", type=int, help="proxies of ProxyAnchorLoss; default n / per_class")
    parser.add_argument(
        "--memory-budget", type=int, help="bytes of a panel; default a sixteenth of the memory"
    )
    parser.add_argument("--panel-rows", type=int)
    options = vars(parser.parse_args(argv))
    options["dtype"] = getattr(torch, options["dtype"])
    options["backward"] = not options.pop("forward")
    try:
        print(estimate(options.pop("loss"), options.pop("n"), options.pop("d"), **options))
    except ValueError as error:
        parser.error(str(error))
