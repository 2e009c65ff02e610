"""`python -m bench.precision`: what the precision of the GEMMs costs PNP, as Markdown in bench/results.

Similarities and the two products of their gradient are computed in each mode from float32 rows, everything else in
float64, and compared with float64 throughout. Without a GPU the modes are emulated: operands are rounded as the tensor
cores round them, products and sums are those of float32. On CUDA the real modes are used and one product is timed.

A second table is of the products that the losses use, `tritonloss.ops.products`, for rows in bfloat16, float16 and
float32: "split" beside IEEE. Without a GPU the sums of tensor cores are emulated: products are exact, and are added in
groups of `--depth`, after each of which the sum is rounded towards zero.
"""

import argparse
import contextlib
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bench import report
from bench.__main__ import RESULTS
from tritonloss.ops import products
from tritonloss.ops.streaming import empty_scores

TEMPERATURE = 0.01
PER_CLASS = 4
TF32_DROPPED_BITS = 13
TIMED_ROUNDS = 10
# R below this is 0 for every loss: errors are relative to the larger of both.
LEAST_RANK = 1e-3

Product = Callable[[Tensor, Tensor], Tensor]  # a [m, k], b [n, k] to a @ b.T [m, n]

# The length of the noise that is added to the unit vector of the class, none for noise alone: the cosine of two of a
# class is about 0, 0.17 and 0.31, and the median of R about 1000, 0.3 and 4e-7.
DATA = {"random": None, "half trained": 2.2, "trained": 1.5}
# All rows are near one: the length of the noise on the unit vector of all.
COLLAPSED = 0.1
INPUTS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DEPTH = 16
# What float64 has more bits of mantissa than float32.
FLOAT64_EXTRA_BITS = 29


class Error(NamedTuple):
    """Relative errors: of R, median and largest; of the gradient of the normalised rows, by its norm."""

    median_rank: float
    largest_rank: float
    gradient: float


def rounded_to_tf32(x: Tensor) -> Tensor:
    """float32 with 10 bits of mantissa, ties to even."""
    bits = x.contiguous().view(torch.int32)
    half = (1 << (TF32_DROPPED_BITS - 1)) - 1
    bits = bits + half + ((bits >> TF32_DROPPED_BITS) & 1)
    return (bits >> TF32_DROPPED_BITS << TF32_DROPPED_BITS).view(torch.float32)


def ieee(a: Tensor, b: Tensor) -> Tensor:
    return with_switch("highest", a, b)


def tf32(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda:
        return with_switch("high", a, b)
    return rounded_to_tf32(a) @ rounded_to_tf32(b).T


def bf16x3(a: Tensor, b: Tensor) -> Tensor:
    """hi hi + hi lo + lo hi, as one product over three times the inner dimension."""
    (a_hi, a_lo), (b_hi, b_lo) = halves(a), halves(b)
    return bf16_product(torch.cat([a_hi, a_hi, a_lo], 1), torch.cat([b_hi, b_lo, b_hi], 1))


def bf16(a: Tensor, b: Tensor) -> Tensor:
    return bf16_product(a.bfloat16(), b.bfloat16())


MODES: dict[str, Product] = {"IEEE float32": ieee, "bf16x3": bf16x3, "TF32": tf32, "bfloat16": bf16}


def with_switch(precision: str, a: Tensor, b: Tensor) -> Tensor:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    product = a @ b.T
    torch.set_float32_matmul_precision(before)
    return product


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as the sum of two bfloat16, but for 2^-17 of it."""
    hi = x.bfloat16()
    return hi, (x - hi.float()).bfloat16()


def bf16_product(a: Tensor, b: Tensor) -> Tensor:
    """bfloat16 operands, float32 sums and result; on CUDA with torch 2.8 or later."""
    if a.is_cuda:
        return torch.mm(a, b.T, out_dtype=torch.float32)
    return a.float() @ b.float().T


def unit_rows(data: str, n: int, dimension: int, device: str) -> Tensor:
    """[n, D] float32 of unit length, PER_CLASS neighbours of a class."""
    generator = torch.Generator().manual_seed(0)
    noise = F.normalize(torch.randn(n, dimension, generator=generator, dtype=torch.float64), dim=1)
    length = DATA[data]
    if length is not None:
        centres = torch.randn(n // PER_CLASS, dimension, generator=generator, dtype=torch.float64)
        noise = F.normalize(centres, dim=1).repeat_interleave(PER_CLASS, 0) + length * noise
    return F.normalize(noise, dim=1).float().to(device)


def ranks_and_slopes(similarity: Tensor) -> tuple[Tensor, Tensor]:
    """R [n, PER_CLASS] and the gradient [n, n] of PNP-O by the similarity, in float64."""
    leaf = similarity.double().requires_grad_()
    n = leaf.shape[0]
    own = torch.arange(n, device=leaf.device)[:, None] // PER_CLASS * PER_CLASS
    own = own + torch.arange(PER_CLASS, device=leaf.device)
    above = torch.sigmoid((leaf[:, None, :] - leaf.gather(1, own)[:, :, None]) / TEMPERATURE)
    ranks = above.scatter(2, own[:, None, :].expand(-1, PER_CLASS, -1), 0).sum(2)
    (slopes,) = torch.autograd.grad(ranks.mean(), leaf)
    return ranks.detach(), slopes


def gradient(slopes: Tensor, rows: Tensor, product: Product) -> Tensor:
    """Of the normalised rows [n, D]: G X + G^T X."""
    columns = rows.T.contiguous()
    return product(slopes, columns) + product(slopes.T.contiguous(), columns)


def errors(rows: Tensor) -> dict[str, Error]:
    """Of each mode, for rows [n, D] float32 of unit length."""
    exact = rows.double()
    ranks, slopes = ranks_and_slopes(exact @ exact.T)
    grad = gradient(slopes, exact, lambda a, b: a @ b.T)
    found = {}
    for mode, product in MODES.items():
        its_ranks, its_slopes = ranks_and_slopes(product(rows, rows))
        its_grad = gradient(its_slopes.float(), rows, product).double()
        off = (its_ranks - ranks).abs() / ranks.clamp(min=LEAST_RANK)
        found[mode] = Error(
            float(off.median()), float(off.max()), float((its_grad - grad).norm() / grad.norm())
        )
    return found


def embeddings(data: str, n: int, dimension: int, dtype: torch.dtype, device: str) -> Tensor:
    """[n, D] of lengths from 4 to 12, as a network gives them. data: a key of DATA, or "collapsed"."""
    generator = torch.Generator().manual_seed(1)
    if data == "collapsed":
        noise = torch.randn(n + 1, dimension, generator=generator, dtype=torch.float64)
        unit = F.normalize(noise, dim=1)
        rows = F.normalize(unit[:1] + COLLAPSED * unit[1:], dim=1)
    else:
        rows = unit_rows(data, n, dimension, "cpu").double()
    length = 4 + 8 * torch.rand(n, 1, generator=generator, dtype=torch.float64)
    return (length * rows).to(device, dtype)


def tensor_core(depth: int) -> products.Multiply:
    """Half precision products as a tensor core adds them: exact, rounded towards zero after every `depth` of them."""

    def multiply_as_tensor_core(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        a, b = a.double(), b.double()
        total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
        for begin in range(0, a.shape[1], depth):
            total += a[:, begin : begin + depth] @ b[begin : begin + depth]
            total = towards_zero(total)
        product = (alpha * total).float()
        out.copy_(product if beta == 0 else product.add_(out, alpha=beta))

    return multiply_as_tensor_core


def towards_zero(x: Tensor) -> Tensor:
    """float64 with no more bits than float32 has."""
    return (x.view(torch.int64) >> FLOAT64_EXTRA_BITS << FLOAT64_EXTRA_BITS).view(torch.float64)


@contextlib.contextmanager
def multiplying(form: products.Multiply) -> Iterator[None]:
    """Half precision products on the CPU by `form`."""
    cpu = torch.device("cpu")
    products._supports[cpu] = form
    try:
        yield
    finally:
        del products._supports[cpu]


def split_errors(rows: Tensor, mode: str) -> Error:
    """Of PNP's R, and of its gradient by the rows [n, D] in float32; all but the products is float64."""
    n = rows.shape[0]
    leaf = rows.double().clone().requires_grad_()
    unit = F.normalize(leaf, dim=1)
    similarity = unit @ unit.T
    ranks, slopes = ranks_and_slopes(similarity.detach())
    (grad,) = torch.autograd.grad(similarity, leaf, slopes)

    operand = products.prepare(rows, normalize=True, mode=mode)
    like = torch.empty(0, dtype=torch.float32, device=rows.device)
    scores, whole = empty_scores(n, n, like), slice(0, n)
    products.scores(operand, whole, operand, 1.0, scores)
    its_ranks, its_slopes = ranks_and_slopes(scores)
    gradient = empty_scores(n, n, like).copy_(its_slopes)
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    terms = products.gradient_terms(gradient, operand, whole, operand, scratch=scores)
    products.add_query_gradient(terms, operand, total)
    products.add_key_gradient(terms, operand, whole, total)
    its_grad = products.row_gradient(total, operand, torch.float32).double()
    off = (its_ranks - ranks).abs() / ranks.clamp(min=LEAST_RANK)
    return Error(float(off.median()), float(off.max()), float((its_grad - grad).norm() / grad.norm()))


def accumulation(n: int, dimension: int, depth: int, device: str) -> dict[str, dict[str, dict[str, Error]]]:
    """By input dtype and kind of data, the errors in IEEE and in split mode; split emulated but on CUDA."""
    found: dict[str, dict[str, dict[str, Error]]] = {}
    for name, dtype in INPUTS.items():
        for data in [*DATA, "collapsed"]:
            rows = embeddings(data, n, dimension, dtype, device)
            emulated = multiplying(tensor_core(depth)) if device == "cpu" else contextlib.nullcontext()
            with emulated:
                of = {mode: split_errors(rows, mode) for mode in ("ieee", "split")}
            found.setdefault(name, {})[data] = of
    return found


def accumulation_markdown(results: dict[str, Any]) -> Iterator[str]:
    """A sentence, then one row for each input dtype and kind of data."""
    how = (
        "on the GPU"
        if results["milliseconds"]
        else f"emulated, towards zero after every {results['depth']} products"
    )
    yield (
        f"Errors of R, largest, and of the gradient of the rows before it is rounded to their dtype; temperature "
        f"{TEMPERATURE}, N = {results['split N']}, D = {results['D']}, four per class; sums of split mode {how}."
    )
    yield ""
    yield "| input | embeddings | R, IEEE | R, split | ratio | gradient, IEEE | gradient, split |"
    yield "|---|---|---|---|---|---|---|"
    for name, by_data in results["split"].items():
        for data, of in by_data.items():
            ieee, split = of["ieee"], of["split"]
            ratio = split["largest_rank"] / ieee["largest_rank"]
            cells = [f"{ieee['largest_rank']:.1e}", f"{split['largest_rank']:.1e}", f"{ratio:.2f}"]
            cells += [f"{ieee['gradient']:.1e}", f"{split['gradient']:.1e}"]
            yield "| " + " | ".join([name, data, *cells]) + " |"


def milliseconds(n: int, dimension: int) -> dict[str, float]:
    """Of one product [n, D] x [D, n] in each mode on a GPU, with the splitting of operands."""
    rows = F.normalize(torch.randn(n, dimension, device="cuda"), dim=1)
    return {mode: timed(product, rows) for mode, product in MODES.items()}


def timed(product: Product, rows: Tensor) -> float:
    times = []
    for _ in range(TIMED_ROUNDS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        product(rows, rows)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def measure(n: int, split_n: int, timed_n: int, dimension: int, depth: int, device: str) -> dict[str, Any]:
    """Everything, as JSON holds it: the sizes, the errors of each mode on each kind of data, milliseconds on a GPU."""
    split = accumulation(split_n, dimension, depth, device)
    found = {data: errors(unit_rows(data, n, dimension, device)) for data in DATA}
    return {
        "N": n,
        "D": dimension,
        "timed N": timed_n,
        "errors": {data: {mode: error._asdict() for mode, error in of.items()} for data, of in found.items()},
        "split N": split_n,
        "depth": depth,
        "split": {
            name: {
                data: {mode: error._asdict() for mode, error in of.items()} for data, of in by_data.items()
            }
            for name, by_data in split.items()
        },
        "milliseconds": milliseconds(timed_n, dimension) if device == "cuda" else {},
    }


def markdown(results: dict[str, Any]) -> Iterator[str]:
    """A sentence, then one row for each mode and kind of data."""
    times = results["milliseconds"]
    yield (
        f"Relative error of R (of {LEAST_RANK:g} where R is less) and of the gradient of PNP by the precision of the "
        f"GEMMs; temperature {TEMPERATURE}, N = {results['N']}, D = {results['D']}, four per class; "
        + (f"ms of one product at N = {results['timed N']}." if times else "modes emulated.")
    )
    columns = ["GEMMs", "embeddings", "R, median", "R, largest", "gradient", *(["ms"] if times else [])]
    yield ""
    yield "| " + " | ".join(columns) + " |"
    yield "|---" * len(columns) + "|"
    for mode in MODES:
        for data, found in results["errors"].items():
            cells = [mode, data, *(f"{error:.1e}" for error in found[mode].values())]
            yield "| " + " | ".join([*cells, *([f"{times[mode]:.3g}"] if times else [])]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.precision", description=__doc__)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--split-batch", type=int, default=1024, help="of the second table")
    parser.add_argument("--depth", type=int, default=DEPTH, help="products that a tensor core adds at once")
    parser.add_argument("--timed-batch", type=int, default=16384, help="on a GPU")
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = measure(
        options.batch, options.split_batch, options.timed_batch, options.dimension, options.depth, device
    )
    machine = f"{report.machine()}, torch {torch.__version__}."
    file = options.out / f"precision-{report.slug(report.machine())}.md"
    lines = [*markdown(results), "", *accumulation_markdown(results), "", machine]
    file.write_text("\n".join(lines) + "\n")
    file.with_suffix(".json").write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")
    print(file.read_text())


if __name__ == "__main__":
    main()
