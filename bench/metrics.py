"""`python -m bench.metrics`: all retrieval metrics of one set of the size of Stanford Online Products' test set.

Prints the time of one call and the peak memory above the inputs; with `--check` also the difference to torchmetrics'
mean average precision for some of the queries.
"""

import argparse
import ctypes
import time
from pathlib import Path

import torch
from torch import Tensor

from bench.report import MEBIBYTE
from tritonloss.metrics import retrieval_metrics

ROWS, CLASSES, DIMENSION = 60_502, 11_316, 128
METRICS = (
    "mean_average_precision",
    "map_at_r",
    "r_precision",
    "ndcg",
    "recall_at_1",
    "recall_at_10",
    "recall_at_100",
    "recall_at_1000",
)
CHECKED = 200


def data(rows: int, classes: int) -> tuple[Tensor, Tensor]:
    """Embeddings [rows, 128] float32 and labels [rows]: class centres with noise, at least 2 rows per class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.cat(
        [
            torch.arange(classes).repeat(2),
            torch.randint(classes, (rows - 2 * classes,), generator=generator),
        ]
    )
    centres = torch.randn(classes, DIMENSION, generator=generator)
    noise = torch.randn(rows, DIMENSION, generator=generator)
    return centres[labels] + 1.5 * noise, labels


def status(field: str) -> int:
    """Bytes of a field of this process."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field)]
    return int(line.split()[1]) * 1024


def difference_to_torchmetrics(rows: Tensor, labels: Tensor) -> float:
    """The largest over CHECKED queries of the difference between our average precision and torchmetrics'."""
    from torchmetrics.functional.retrieval import retrieval_average_precision

    queries = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))[:CHECKED]
    unit = torch.nn.functional.normalize(rows)
    ours = retrieval_metrics(rows, labels, metrics=METRICS[:1], per_query=True).values[METRICS[0]]
    largest = 0.0
    for query in queries.tolist():
        others = torch.arange(len(rows)) != query
        scores = (unit @ unit[query])[others] + 2  # torchmetrics leaves out positives that are not above 0
        theirs = retrieval_average_precision(scores.double(), (labels == labels[query])[others])
        largest = max(largest, abs(float(theirs) - float(ours[query])))
    return largest


def main() -> None:
    """Measure once, after a small call that starts threads and kernels."""
    parser = argparse.ArgumentParser(prog="python -m bench.metrics", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--classes", type=int, default=CLASSES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", action="store_true", help="compare with torchmetrics")
    chosen = parser.parse_args()
    rows, labels = (t.to(chosen.device) for t in data(chosen.rows, chosen.classes))
    retrieval_metrics(rows[:1000], labels[:1000], per_query=True, metrics=METRICS[:-1])
    if chosen.device == "cpu":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = status("VmRSS")
    else:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    start, cpu = time.perf_counter(), time.process_time()
    result = retrieval_metrics(rows, labels, metrics=METRICS)
    values = {name: value.item() for name, value in result.values.items()}
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = status("VmHWM") if chosen.device == "cpu" else torch.cuda.max_memory_allocated()
    size = f"{chosen.rows} rows, {chosen.classes} classes, D = {DIMENSION}"
    mebibytes = (peak - before) / MEBIBYTE
    print(
        f"{size}, {chosen.device}, {torch.get_num_threads()} threads: {seconds:.1f} s ({cpu:.1f} s of CPU),"
    )
    print(f"{mebibytes:.0f} MiB above the inputs")
    print(", ".join(f"{name} {value:.4f}" for name, value in values.items()))
    if chosen.check:
        print(f"largest difference to torchmetrics: {difference_to_torchmetrics(rows, labels):.1e}")


if __name__ == "__main__":
    main()
