"""From pytest-benchmark's JSON to the Markdown table of the README."""

import json
import platform
from pathlib import Path
from typing import Any

import torch

from bench.pnp import SIZES

MEBIBYTE = 2**20


def machine() -> str:
    """The hardware, without any name of the host."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {torch.get_num_threads()} cores"


def rows(results: dict[str, Any]) -> dict[tuple[str, int, bool], dict[str, Any]]:
    """(implementation, N, with backward) -> seconds and peak bytes."""
    table = {}
    for entry in results["benchmarks"]:
        info = entry["extra_info"]
        seconds = entry["stats"]["median"]
        table[info["name"], info["n"], info["backward"]] = {
            "seconds": seconds,
            "peak": info.get("peak_bytes"),
        }
    return table


def markdown(results: dict[str, Any]) -> str:
    """Time and peak memory of forward + backward, with the ratio to ours."""
    table = rows(results)
    names = list(SIZES)
    sizes = sorted({n for _, n, _ in table})
    lines = [
        f"PNP forward + backward, float32, D = 128, four per class; median time and peak memory above the inputs; in "
        f"parentheses the factor to tritonloss. {machine()}, torch {torch.__version__}.",
        "",
        "| N | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for n in sizes:
        ours = table["tritonloss", n, True]
        cells = [_cell(table.get((name, n, True)), ours) for name in names]
        lines.append(f"| {n} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any] | None, ours: dict[str, Any]) -> str:
    if row is None:
        return ""
    text = f"{row['seconds'] * 1e3:.3g} ms"
    if row is not ours:
        text += f" ({row['seconds'] / ours['seconds']:.3g}x)"
    text += f", {max(row['peak'], 0) / MEBIBYTE:.0f} MiB"
    return text


def verdicts(results: dict[str, Any]) -> list[str]:
    """The figures to reach, each with what was measured."""
    table = rows(results)

    def seconds(name: str, n: int) -> float:
        return table[name, n, True]["seconds"]

    lines = []

    def check(text: str, value: float, reached: bool) -> None:
        lines.append(f"{'reached' if reached else 'NOT REACHED'}: {text}: {value:.3g}")

    factor = seconds("pml 2.9.0", 512) / seconds("tritonloss", 512)
    check("N = 512, factor to pml 2.9.0, at least 1000", factor, factor >= 1000)
    for n in (2048, 4096):
        growth = seconds("tritonloss", 2 * n) / seconds("tritonloss", n)
        check(f"growth of time from N = {n} to {2 * n}, at most 4.6", growth, growth <= 4.6)
        ratio = seconds("tritonloss", n) / seconds("gathered, compiled", n)
        check(f"N = {n}, time over that of the compiled rival, at most 1.3", ratio, ratio <= 1.3)
        memory = table["tritonloss", n, True]["peak"] / table["gathered, compiled", n, True]["peak"]
        check(f"N = {n}, memory over that of the compiled rival, below 1", memory, memory < 1)
    peak = table["tritonloss", 8192, True]["peak"] / MEBIBYTE
    check("N = 8192, peak MiB above the inputs, at most 1024", peak, peak <= 1024)
    return lines


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
