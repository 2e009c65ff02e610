"""The Markdown of a GPU check."""

from collections.abc import Iterator
from typing import Any

from bench import precision
from bench.gpu_check.plan import FLOOR, LOSSES, OURS, PANELS, PLANS, PRECISION, Cell, Plan, Size, sizes
from bench.report import MEBIBYTE, Row, Table

METHOD = """\
float32 embeddings [N, {dimension}], four of a class; for ProxyAnchor any of C classes. Each cell: ms of the forward
pass / of forward and backward, median, each round from an idle device and a cold L2 cache; in parentheses the factor of
forward and backward to tritonloss; peak memory above the inputs, gradients included. IEEE, TF32: torch's float32
matmul precision "highest", "high", without split products. split: float32 embeddings by split products; bfloat16,
float16: embeddings of this dtype. GEMMs alone: the similarities and the two products of their gradient through cuBLAS,
each once. eager, compiled: plain torch with gathered positives (Histogram, FastAP, ProxyAnchor: dense over pairs).
dense: the N x N x N cube. An empty cell has not been measured."""
MATMUL = {
    "highest": "IEEE",
    "high": "TF32",
    "split": "split",
    "bfloat16": "bfloat16",
    "float16": "float16",
}
# A rival of another value computes another loss: no ratio to it is printed. Relative, for the value and for the norm
# of the gradient; float32 similarities over a temperature of 0.01 give 4e-5, and a bin of a histogram may differ.
AGREEMENT = {"value": 2e-4, "gradient_norm": 1e-2}


def text(results: dict[str, Any]) -> str:
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    who, plan = results["identity"], PLANS[results["identity"]["plan"]]
    yield f"# GPU check: {who['machine']}"
    yield ""
    yield (
        f"torch {who['torch']}, triton {who['triton']}, CUDA {who['cuda']}, Python {who['python']}; "
        f"commit {results['commit'] or 'unknown'}, source {who['source']}."
    )
    yield ""
    yield from _tests(results["tests"])
    for loss, check in results["checks"].items():
        state = "right" if check["passed"] else "WRONG, so that no figure is printed"
        yield f"- {loss} against the float64 reference: {state} ({check['detail']})"
    yield ""
    yield from (f"- {line}" for line in verdict_lines(results))
    yield ""
    yield METHOD.format(dimension=plan.dimension)
    for loss in LOSSES:
        if results["checks"].get(loss, {"passed": False})["passed"]:
            yield ""
            yield from _table(loss, plan, results["cells"])
    yield from _panels(plan, results["cells"])
    found = results["cells"].get(Cell(PRECISION, PRECISION, (plan.precision_batch,)).key, {})
    if "errors" in found:
        yield from ["", "## Precision of the GEMMs", "", *precision.markdown(found)]
        yield from ["", *precision.accumulation_markdown(found)]
    elif "failed" in found:
        yield from ["", f"Precision of the GEMMs: {found['failed']}"]
    if results["tuned"]:
        yield from ["", "Tuned configurations:", "", "```", *results["tuned"], "```"]


def _tests(tests: dict[str, Any]) -> Iterator[str]:
    counts = ", ".join(f"{n} {outcome}" for outcome, n in sorted(tests.get("counts", {}).items()))
    yield f"- tests: {counts or 'none'}"
    yield from (f"- FAILED: {test}" for test in tests.get("failed", []))
    yield from (f"- {line}" for line in tests.get("not_run", []))


def _table(loss: str, plan: Plan, cells: dict[str, Any]) -> Iterator[str]:
    case = LOSSES[loss]
    axes = ["N", "C"] if case.with_proxies else ["N"]
    names = [OURS, FLOOR, *(name for name in case.rivals if plan.compiled or name != "compiled")]
    yield f"## {loss}"
    yield ""
    yield "| " + " | ".join([*axes, "matmul", *names]) + " |"
    yield "|---" * (len(axes) + 1 + len(names)) + "|"
    for matmul in MATMUL:
        for size in sizes(loss, plan):
            row = [_text(cells, loss, name, size, matmul) for name in names]
            if any(row):
                yield "| " + " | ".join([*map(str, size), MATMUL[matmul], *row]) + " |"


def _panels(plan: Plan, cells: dict[str, Any]) -> Iterator[str]:
    """The sweep over the height of a panel: where it flattens, a panel is tall enough."""
    size = (plan.batches[-1],)
    rows = {n: _text(cells, PANELS, f"{n} rows", size, "bfloat16") for n in plan.panel_rows}
    if any(rows.values()):
        yield from ["", f"## Height of a panel: PNP, N = {size[0]}, bfloat16", ""]
        yield from ["| rows | " + " | ".join(map(str, rows)) + " |", "|---" * (len(rows) + 1) + "|"]
        yield "| ms | " + " | ".join(rows.values()) + " |"


def find(cells: dict[str, Any], loss: str, name: str, size: Size, matmul: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = cells.get(Cell(FLOOR if name == FLOOR else loss, name, size, matmul).key)
    return found


def _text(cells: dict[str, Any], loss: str, name: str, size: Size, matmul: str) -> str:
    cell, ours = (find(cells, loss, which, size, matmul) for which in (name, OURS))
    if cell is None:
        return ""
    if "seconds" not in cell:
        return cell.get("skipped") or cell["failed"].replace("|", "/")
    if name not in (OURS, FLOOR) and ours is not None and not agrees(cell, ours):
        return (
            f"another value: {cell['value']:.6g}, not {ours['value']:.6g}" if "value" in ours else "unchecked"
        )
    line = f"{cell['forward_seconds'] * 1e3:.3g} / {cell['seconds'] * 1e3:.3g}"
    if name != OURS and ours is not None and "seconds" in ours:
        line += f" ({cell['seconds'] / ours['seconds']:.3g}x)"
    return line if cell["peak_bytes"] is None else f"{line}, {cell['peak_bytes'] / MEBIBYTE:.0f} MiB"


def agrees(cell: dict[str, Any], ours: dict[str, Any]) -> bool:
    return all(
        name in ours and abs(cell[name] - ours[name]) <= bound * abs(ours[name])
        for name, bound in AGREEMENT.items()
    )


def tables(results: dict[str, Any]) -> dict[str, tuple[tuple[str, ...], Table]]:
    """The axes and the table of each loss, as those of the other benchmarks; every cell is forward + backward."""
    plan = PLANS[results["identity"]["plan"]]
    found = {}
    for loss, case in LOSSES.items():
        table: Table = {}
        for matmul in MATMUL:
            for size in sizes(loss, plan):
                for name in (OURS, FLOOR, *case.rivals):
                    cell = find(results["cells"], loss, name, size, matmul)
                    if cell is not None and "seconds" in cell:
                        key = (name, *size, MATMUL[matmul], True)
                        table[key] = Row(cell["seconds"], cell["peak_bytes"])
        found[loss] = (("N", "C", "matmul") if case.with_proxies else ("N", "matmul"), table)
    return found


def verdicts(results: dict[str, Any]) -> Iterator[tuple[str, float | None, bool]]:
    """The figures to reach; None where it could not be measured.

    The products of PNP at N = 32768 and D = 512 take 53 ms in IEEE float32 on an H100 by its peak rates, 6.7 ms in
    TF32; the sigmoids of both passes 4.4 ms and the similarities' way through memory 4.5 ms on top: 1.2 and 2.3.
    """

    def ratio(name: str, n: int, matmul: str) -> float | None:
        ours, other = (find(results["cells"], "PNP", which, (n,), matmul) for which in (OURS, name))
        if ours is None or other is None or not ("seconds" in ours and "seconds" in other):
            return None
        return float(ours["seconds"] / other["seconds"])

    if not results["checks"].get("PNP", {"passed": False})["passed"]:
        return
    aims = [
        (
            "PNP, N = 1024, time over that of the compiled rival, at most 1",
            ratio("compiled", 1024, "highest"),
            1,
        ),
        (
            "PNP, N = 32768, IEEE, time over that of the GEMMs alone, at most 1.5",
            ratio(FLOOR, 32768, "highest"),
            1.5,
        ),
        (
            "PNP, N = 32768, TF32, time over that of the GEMMs alone, at most 2.5",
            ratio(FLOOR, 32768, "high"),
            2.5,
        ),
    ]
    for aim, value, most in aims:
        yield aim, value, value is not None and value <= most


def verdict_lines(results: dict[str, Any]) -> Iterator[str]:
    for aim, value, reached in verdicts(results):
        if value is None:
            yield f"not measured: {aim}"
        else:
            yield f"{'reached' if reached else 'NOT REACHED'}: {aim}: {value:.3g}"
