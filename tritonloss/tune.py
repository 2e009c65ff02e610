"""`python -m tritonloss tune`: the configurations of every kernel, found ahead of training and kept as a table."""

import argparse
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tritonloss import losses
from tritonloss.backends import tables, triton_unusable, tuning, use_backend

# Every loss; the bases of losses are none.
BASES = {"BaseProxyLoss", "PairLoss", "PerQueryLoss", "RankingLoss"}
LOSSES = tuple(name for name in losses.__all__ if name.endswith("Loss") and name not in BASES)
ROWS = tuple(1 << n for n in range(8, 16))
PER_CLASS = (2, 4, 8, 32)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    arguments = argparse.ArgumentParser(
        prog="python -m tritonloss tune",
        description="Time the configurations of every kernel on this GPU and write the best as a table. A GPU with a "
        "table is never timed during training.",
    )
    arguments.add_argument("--device", default="cuda", help="default: the current GPU")
    arguments.add_argument("--loss", nargs="+", choices=LOSSES, default=LOSSES, help="default: all")
    arguments.add_argument(
        "--rows", nargs="+", type=int, default=ROWS, help="batch sizes; default: 256 to 32768"
    )
    arguments.add_argument("--per-class", nargs="+", type=int, default=PER_CLASS, help="default: 2 4 8 32")
    arguments.add_argument("--dim", type=int, default=128, help="of the embeddings; default: 128")
    arguments.add_argument("--output", type=Path, help="the file; default: where the package looks for it")
    return arguments


def main(arguments: Sequence[str]) -> Iterator[str]:
    """Tune and write the table; the lines that say what was done. Raises SystemExit where that is impossible."""
    chosen = parser().parse_args(arguments)
    device = torch.device(chosen.device)
    if not torch.cuda.is_available():
        raise SystemExit("nothing can be tuned: there is no CUDA or ROCm device")
    if (reason := triton_unusable(device)) is not None:
        raise SystemExit(f"nothing can be tuned: {reason}")
    name = tuning.gpu(device).name
    file = chosen.output or _default_file(name)
    entries = tune(device, chosen.loss, chosen.rows, chosen.per_class, chosen.dim)
    try:
        tables.write(file, name, tables.Table(entries, complete=True))
    except OSError as error:
        raise SystemExit(
            f"the table cannot be written ({error}): {tables.ENVIRONMENT_VARIABLE} or --output"
        ) from error
    yield f"{name}: {len(entries)} configurations in {file}"


def _default_file(name: str) -> Path:
    if (folder := tables.directory()) is None:
        raise SystemExit(f"there is no home directory: set {tables.ENVIRONMENT_VARIABLE}, or give --output")
    return folder / tables.file_name(name)


def tune(
    device: torch.device, names: Sequence[str], rows: Sequence[int], per_class: Sequence[int], dim: int
) -> dict[str, dict[str, int]]:
    """The fastest configuration by key, for all that a training step and an evaluation of each loss launch.

    names: of losses. rows: batch sizes. per_class: rows per class. dim: columns of the embeddings. A launch is timed
    with the sizes it has there, for about half a second each; kernels that were not built before take longer.
    """
    with tuning.collecting(tuning.gpu(device).name) as entries, use_backend("triton"):
        for n in rows:
            for size in (size for size in per_class if size <= n):
                for name in names:
                    _step(_criterion(name, -(-n // size), dim).to(device), device, n, size, dim)
    return entries


def _criterion(name: str, n_classes: int, dim: int) -> nn.Module:
    kind = getattr(losses, name)
    sizes: dict[str, Any] = {"num_classes": n_classes, "embedding_size": dim}
    taken = inspect.signature(kind).parameters.keys() & sizes.keys()
    return kind(**{size: sizes[size] for size in taken})  # type: ignore[no-any-return]


def _step(criterion: nn.Module, device: torch.device, n: int, per_class: int, dim: int) -> None:
    """A training step and an evaluation, whose kernels are built without slopes."""
    generator = torch.Generator().manual_seed(n)
    embeddings = torch.randn(n, dim, generator=generator).to(device).requires_grad_()
    labels = (torch.arange(n) // per_class).to(device)
    criterion(embeddings, labels).backward()
    with torch.no_grad():
        criterion.eval()(embeddings, labels)
