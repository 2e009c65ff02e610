"""`python -m bench.compare [BENCHMARK ...]`: the ratios of a new run beside those of the committed one of this machine.

Runs the benchmarks named, or all, or takes the files of --new; "gpu" stands for the results of a GPU check. Absolute
times are not compared: on another day, or beside another job, they differ by more than most changes of code do. A ratio
is a factor of one run, on a machine that does nothing else:

- speed: time of a rival over ours, forward and backward; a larger one is better;
- growth: our time at 2 N over that at N; a smaller one is better;
- memory: our peak over a rival's; a smaller one is better;
- what the `ratios` of a benchmark add.

Exit status: 0; 1 if a ratio is worse than the baseline by more than the margin; 2 if nothing could be compared.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench import report
from bench.__main__ import RESULTS, file_name, run
from bench.cases import BENCHMARKS, OURS
from bench.gpu_check import summary
from bench.report import MEBIBYTE, Table

GPU = "gpu"  # in place of a benchmark: the results of a GPU check
# About the noise of one cell on 2 cores, otherwise idle: see README.md.
MARGIN = 0.35
# Below this the state of the allocator decides.
LEAST_PEAK = 32 * MEBIBYTE
# On a CPU a step below this is the launching of operations, which other processes delay.
LEAST_CPU_SECONDS = 0.005


class Ratio(NamedTuple):
    """What is compared, and its value if larger were better: a growth or a share of memory is turned over."""

    name: str
    goodness: float


class Finding(NamedTuple):
    """A ratio of the baseline and its change: 1 is none, 0.5 is half as good; None if the new run lacks it."""

    name: str
    change: float | None


def ratios(axes: tuple[str, ...], table: Table, least_seconds: float = 0) -> dict[str, float]:
    """Every ratio of a table of forward + backward, by name; larger is better. Of cells from `least_seconds`."""
    rows = {key[:-1]: row for key, row in table.items() if key[-1] and row.seconds >= least_seconds}
    return dict(_ratios(axes, rows))


def _ratios(axes: tuple[str, ...], rows: dict[tuple[object, ...], report.Row]) -> Iterator[Ratio]:
    for (name, *sizes), row in rows.items():
        ours = rows.get((OURS, *sizes))
        if ours is None:
            continue
        where = ", ".join(f"{axis} = {size}" for axis, size in zip(axes, sizes, strict=True))
        if name != OURS:
            yield Ratio(f"{where}: speed against {name}", row.seconds / ours.seconds)
            if row.peak is not None and ours.peak is not None and min(row.peak, ours.peak) >= LEAST_PEAK:
                yield Ratio(f"{where}: memory against {name}", row.peak / ours.peak)
        elif (
            isinstance(sizes[0], int) and (double := rows.get((OURS, 2 * sizes[0], *sizes[1:]))) and sizes[0]
        ):
            yield Ratio(f"{where}: growth to {axes[0]} = {2 * sizes[0]}", ours.seconds / double.seconds)


def compare(baseline: dict[str, float], new: dict[str, float]) -> list[Finding]:
    """One finding for each ratio of the baseline."""
    return [
        Finding(name, new[name] / goodness if name in new else None) for name, goodness in baseline.items()
    ]


def is_regression(finding: Finding, margin: float) -> bool:
    return finding.change is not None and finding.change < 1 / (1 + margin)


def lines(benchmark: str, findings: list[Finding], margin: float) -> Iterator[str]:
    """A summary, a table of what regressed, and what could not be compared."""
    worse = [finding for finding in findings if is_regression(finding, margin)]
    missing = [finding.name for finding in findings if finding.change is None]
    yield f"{benchmark}: {len(findings) - len(missing)} ratios compared, {len(worse)} regressed"
    if worse:
        yield from ["", f"| {benchmark} | worse by |", "|---|---|"]
        for finding in sorted(worse, key=lambda finding: finding.change or 0):
            yield f"| {finding.name} | {1 / (finding.change or 1) - 1:.0%} |"
        yield ""
    yield from (f"  not in the new run: {name}" for name in missing)


def load(benchmark: str, file: Path) -> dict[str, float]:
    """The ratios of a JSON, of the fastest rounds: what another job on the machine changes least."""
    results = json.loads(file.read_text())
    if benchmark != GPU:
        case = BENCHMARKS[benchmark]
        table = report.rows(case, results, "min")
        return {**ratios(case.axes, table, LEAST_CPU_SECONDS), **case.ratios(table)}
    return {
        f"{loss}, {name}": goodness
        for loss, (axes, table) in summary.tables(results).items()
        for name, goodness in ratios(axes, table).items()
    }


def main() -> None:
    options = arguments().parse_args()
    if GPU in options.benchmarks and options.new is None:
        sys.exit(f"{GPU} takes the folder of a run: OUT=FOLDER make gpu-check, then --new FOLDER")
    names = options.benchmarks or list(BENCHMARKS)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(compare_all(names, options.new, Path(folder), options.margin))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = (*BENCHMARKS, GPU)
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=f"of {', '.join(known)}")
    parser.add_argument(
        "--new", type=Path, metavar="FOLDER", help="with the JSON of a run, in place of running"
    )
    parser.add_argument("--margin", type=float, default=MARGIN, help="0.5: a ratio may be worse by half")
    return parser


def compare_all(names: list[str], given: Path | None, scratch: Path, margin: float) -> int:
    """The exit status."""
    n_compared, n_worse = 0, 0
    for name in names:
        file = RESULTS / file_name(name)
        if not file.exists():
            print(f"{name}: no baseline for this machine, {report.machine()}: bench/results/{file.name}")
            continue
        baseline = load(name, file)
        if given is None:
            findings = compare(baseline, measure(name, scratch, baseline, margin))
        elif (given / file.name).exists():
            findings = compare(baseline, load(name, given / file.name))
        else:
            print(f"{name}: {given} has no {file.name}")
            continue
        print("\n".join(lines(name, findings, margin)))
        n_compared += sum(finding.change is not None for finding in findings)
        n_worse += sum(is_regression(finding, margin) for finding in findings)
    if not n_compared:
        print("nothing was compared; `make bench` records a baseline")
        return 2
    return 1 if n_worse else 0


def measure(name: str, folder: Path, baseline: dict[str, float], margin: float) -> dict[str, float]:
    """The ratios of a run; where one is worse than the baseline, the better ones of two runs."""
    first = _run(name, folder)
    if not any(is_regression(finding, margin) for finding in compare(baseline, first)):
        return first
    print(f"{name}: once more, to tell a regression from a busy machine")
    second = _run(name, folder)
    return {ratio: max(goodness, second.get(ratio, goodness)) for ratio, goodness in first.items()}


def _run(name: str, folder: Path) -> dict[str, float]:
    run(name, [], folder)
    return load(name, folder / file_name(name))


if __name__ == "__main__":
    main()
