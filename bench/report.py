"""From pytest-benchmark's JSON to the Markdown tables of the README."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from bench.cases import Benchmark

MEBIBYTE = 2**20


class Row(NamedTuple):
    """Seconds of a round; peak bytes above the inputs, with a backward pass only."""

    seconds: float
    peak: int | None


Table = dict[tuple[Any, ...], Row]  # keys: implementation, sizes, whether with a backward pass


def machine() -> str:
    """The hardware, without any name of the host."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {torch.get_num_threads()} cores"


def slug(name: str) -> str:
    """A machine's name as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def rows(case: Benchmark, results: dict[str, Any], statistic: str = "median") -> Table:
    """The table of a JSON. statistic: of the rounds; "min" is what another job on the machine changes least."""
    table = {}
    for entry in results["benchmarks"]:
        info = entry["extra_info"]
        key = (info["name"], *(info[axis] for axis in case.axes), info["backward"])
        table[key] = Row(entry["stats"][statistic], info.get("peak_bytes"))
    return table


def text(case: Benchmark, results: dict[str, Any]) -> str:
    """The table and the verdicts."""
    table = rows(case, results)
    return markdown(case, table) + "\n" + "".join(f"- {line}\n" for line in verdicts(case, table))


def markdown(case: Benchmark, table: Table) -> str:
    """Time and peak memory of forward + backward, with the ratio to ours."""
    names = list(case.sizes)
    lines = [
        f"{case.text}; median time and peak memory above the inputs; in parentheses the factor to tritonloss. "
        f"{machine()}, torch {torch.__version__}.",
        "",
        "| " + " | ".join([*case.axes, *names]) + " |",
        "|---" * (len(case.axes) + len(names)) + "|",
    ]
    for sizes in sorted({key[1:-1] for key in table}):
        ours = table[("tritonloss", *sizes, True)]
        cells = [_cell(table.get((name, *sizes, True)), ours) for name in names]
        lines.append("| " + " | ".join([*map(str, sizes), *cells]) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Row | None, ours: Row) -> str:
    if row is None:
        return ""
    text = f"{row.seconds * 1e3:.3g} ms"
    if row is not ours:
        text += f" ({row.seconds / ours.seconds:.3g}x)"
    return text + f", {max(row.peak or 0, 0) / MEBIBYTE:.0f} MiB"


def verdicts(case: Benchmark, table: Table) -> Iterator[str]:
    """The figures to reach, each with what was measured."""
    for aim, value, reached in case.verdicts(table):
        yield f"{'reached' if reached else 'NOT REACHED'}: {aim}: {value:.3g}"
