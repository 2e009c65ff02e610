"""`python -m bench.plots`: time and peak memory against N, a PNG beside each JSON of bench/results."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import report
from bench.__main__ import RESULTS
from bench.cases import BENCHMARKS, Benchmark
from bench.gpu_check import summary
from bench.gpu_check.plan import FLOOR, OURS
from bench.report import MEBIBYTE, Row, Table

# Of the implementations: distinct for readers who do not see red and green apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7f7f7f")
MARKERS = ("o", "s", "^", "D", "v")  # of what else varies: the number of proxies, the dimension
LEAST_MEBIBYTES = 1  # below it the figures are noise

Lines = dict[tuple[str, str], dict[int, Row]]  # by implementation and what else varies; then by N


def main() -> None:
    """Draw every JSON of bench/results that a benchmark or a GPU check wrote."""
    for file in sorted(RESULTS.glob("*.json")):
        for target, title, lines in figures(file):
            draw(lines, title, target)
            print(target)


def figures(file: Path) -> list[tuple[Path, str, Lines]]:
    """Where to, the title, and the lines; one figure for a benchmark, one for each loss of a GPU check."""
    results = json.loads(file.read_text())
    if "identity" in results:
        machine = results["identity"]["machine"]
        return [
            (
                file.with_name(f"{file.stem}-{report.slug(loss)}.png"),
                f"{loss}, forward + backward, float32\n{machine}",
                lines,
            )
            for loss, (axes, table) in summary.tables(results).items()
            if (lines := by_n(axes, table))
        ]
    for name in BENCHMARKS:
        if file.name.startswith(f"{name.replace('_', '-')}-") and "benchmarks" in results:
            case = BENCHMARKS[name]
            return [
                (file.with_suffix(".png"), title(case, results), by_n(case.axes, report.rows(case, results)))
            ]
    return []


def title(case: Benchmark, results: dict[str, Any]) -> str:
    return f"{case.text.partition(';')[0]}\n{results['machine_info']['machine']}"


def by_n(axes: tuple[str, ...], table: Table) -> Lines:
    """Forward + backward, for each implementation and size besides N; lines of a single point are left out.

    Of a GPU check the IEEE figures alone: TF32 would double every line.
    """
    lines: Lines = {}
    for (name, n, *others, backward), row in table.items():
        if backward and n and "TF32" not in others:
            named = zip(axes[1:], others, strict=True)
            details = ", ".join(f"{axis} = {value}" for axis, value in named if axis != "matmul")
            lines.setdefault((name, details), {})[n] = row
    return {key: line for key, line in lines.items() if len(line) > 1}


def draw(lines: Lines, title: str, target: Path) -> None:
    """Two panels, both axes logarithmic: milliseconds and MiB against N."""
    names = list(dict.fromkeys(name for name, _ in lines))
    details = list(dict.fromkeys(detail for _, detail in lines))
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        time, memory = figure.subplots(1, 2)
        for (name, detail), line in lines.items():
            style = {
                "label": ", ".join(filter(None, [name, detail])),
                "color": COLOURS[names.index(name) % len(COLOURS)],
                "marker": MARKERS[details.index(detail) % len(MARKERS)],
                "markersize": 4,
                "linewidth": 2 if name == OURS else 1,
                "linestyle": ":" if name == FLOOR else "-",
            }
            points = sorted(line.items())
            time.plot([n for n, _ in points], [row.seconds * 1e3 for _, row in points], **style)
            sizes = [(n, (row.peak or 0) / MEBIBYTE) for n, row in points]
            sizes = [(n, size) for n, size in sizes if size >= LEAST_MEBIBYTES]
            memory.plot([n for n, _ in sizes], [size for _, size in sizes], **style)
        batches = sorted({n for line in lines.values() for n in line})
        set_axes(time, "time (ms)", batches)
        set_axes(memory, "peak memory (MiB)", batches)
        figure.suptitle(title, fontsize=10)
        columns = {"ncols": min(len(names), 4) if len(details) == 1 else len(details)}
        figure.legend(*time.get_legend_handles_labels(), loc="outside lower center", frameon=False, **columns)
        figure.savefig(target, dpi=110, facecolor="white", metadata={"Software": None})


def set_axes(panel: Axes, quantity: str, batches: list[int]) -> None:
    panel.set(xscale="log", yscale="log", xlabel="batch size N", ylabel=quantity)
    panel.set_xticks(batches, [str(n) for n in batches])
    panel.minorticks_off()
    panel.grid(alpha=0.3)


if __name__ == "__main__":
    main()
