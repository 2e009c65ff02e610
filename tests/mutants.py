"""`python -m tests.mutants`: small faults in the sources, each of which the tests it names must find.

Each is made in a copy of the tree, where its tests run until the first that fails. Prints a line for each; the exit
status is 1 if one survives or its tests cannot run. Nothing here is part of `make test`. After a change of a mutated
line the command says which entry no longer fits.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "site", "*.egg-info", "__pycache__", "results")
TESTS_FAILED = 1  # exit status of pytest; others say that nothing was tested


class Mutant(NamedTuple):
    """One edit: `old` stands once in `file`; tests: arguments for pytest, of which one test or more must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


KERNEL = "tests/test_kernels_soft_rank.py"
ACCURACY = "tests/test_kernels_soft_rank_accuracy.py"
HISTOGRAM_KERNEL = "tests/test_kernels_soft_histogram.py"
PROXY_KERNEL = "tests/test_kernels_proxy_logsumexp.py"
RANK = "tests/test_soft_rank.py"
COMMON = "tests/test_common.py"

MUTANTS = [
    # --- kernels ---
    Mutant(
        "a positive counts as a negative",
        "kernels/soft_rank.py",
        "return outside & (n < n_keys)",
        "return (outside | (n == first)) & (n < n_keys)",
        (f"{KERNEL}::test_edges",),
    ),
    Mutant(
        "keys beyond the row count",
        "kernels/soft_rank.py",
        "return outside & (n < n_keys)",
        "return outside & (n <= n_keys)",
        (f"{KERNEL}::test_edges",),
    ),
    Mutant(
        "a tile that only ends in the class is no edge",
        "kernels/soft_rank.py",
        "(begin + BLOCK_N > first)) |",
        "(begin + BLOCK_N > first + 1)) |",
        (f"{KERNEL}::test_edges", f"{KERNEL}::test_any_ranges"),
    ),
    Mutant(
        "the right half of a tile is added once too little",
        "kernels/soft_rank.py",
        "            value, derivative = terms(right, threshold, SURROGATE, FAST_MATH)\n            rank += value\n"
        "            slope += derivative\n    if FACTORED",
        "            value, derivative = terms(right, threshold, SURROGATE, FAST_MATH)\n            rank += value\n"
        "    if FACTORED",
        (f"{KERNEL}::test_edges",),
    ),
    Mutant(
        "saturated tiles are not counted",
        "kernels/soft_rank.py",
        "n_saturated += BLOCK_N",
        "n_saturated += BLOCK_N - 1",
        (ACCURACY,),
    ),
    Mutant(
        "a tile is saturated too early",
        "kernels/soft_rank.py",
        "88.0 if WITH_SLOPES else 18.0",
        "8.0 if WITH_SLOPES else 8.0",
        (ACCURACY,),
    ),
    Mutant(
        "a positive is compared with itself",
        "kernels/soft_rank.py",
        "others = tl.where(n[None, :] == p[:, None], ABSENT, keys[None, :])",
        "others = tl.where(n[None, :] == p[:, None] + 1, ABSENT, keys[None, :])",
        (f"{KERNEL}::test_edges",),
    ),
    Mutant(
        "the gradient of a positive has the wrong sign",
        "kernels/soft_rank.py",
        "mask=is_positive, other=0.0) - weight * slope",
        "mask=is_positive, other=0.0) + weight * slope",
        (f"{KERNEL}::test_edges",),
    ),
    Mutant(
        "further tiles of positives overwrite the first in the backward pass",
        "kernels/soft_rank.py",
        "                left_grad += more_left",
        "                left_grad = more_left",
        (f"{KERNEL}::test_edges",),
    ),
    Mutant(
        "the derivatives of a factored tile lose their scale",
        "kernels/soft_rank.py",
        "        right_grad *= c * c",
        "        right_grad *= c",
        (f"{KERNEL}::test_float32", f"{KERNEL}::test_one_tile_of_positives_is_many", ACCURACY),
    ),
    Mutant(
        "the exponential keeps its rounding error",
        "kernels/surrogates.py",
        "return tl.fma(power, tl.fma(exponent, -LN_2, x), power)",
        "return power",
        (f"{KERNEL}::test_both_tails_of_the_sigmoid_keep_their_relative_accuracy", ACCURACY),
    ),
    Mutant(
        "the slope of the Huber step is halved",
        "kernels/surrogates.py",
        "slope = tl.where(difference > 0, 2.0, 2.0 * rise)",
        "slope = tl.where(difference > 0, 1.0, 2.0 * rise)",
        (f"{KERNEL}::test_huber_at_its_kinks",),
    ),
    Mutant(
        "two keys share a derivative",
        "kernels/surrogates.py",
        "second * (u * (4 * SQUARE))",
        "second * (u * (2 * SQUARE))",
        (ACCURACY,),
    ),
    Mutant(
        "the last bin of a histogram is closed",
        "kernels/soft_histogram.py",
        "tl.int32), n_bins - 1)\n    node +=",
        "tl.int32), n_bins)\n    node +=",
        (HISTOGRAM_KERNEL,),
    ),
    Mutant(
        "a hidden key counts",
        "kernels/soft_histogram.py",
        "counts = (column < right) & (is_within(column, hidden_start, hidden_stop) == 0)",
        "counts = (column < right) & (is_within(column, hidden_start, hidden_stop - 1) == 0)",
        (HISTOGRAM_KERNEL,),
    ),
    Mutant(
        "the second digit of a float64 histogram is lost",
        "kernels/soft_histogram.py",
        "                rest -= fraction",
        "                rest -= rest",
        ("tests/test_soft_histogram.py::test_equals_brute_force",),
    ),
    Mutant(
        "a peak of a log-sum-exp is not carried over",
        "kernels/proxy_logsumexp.py",
        "own_sum = own_sum * tl.exp(own_peak - new_own_peak)",
        "own_sum = own_sum",
        (PROXY_KERNEL,),
    ),
    Mutant(
        "a tiny sum of a log-sum-exp is rounded away",
        "kernels/proxy_logsumexp.py",
        "return tl.where(is_tiny, x, x * quotient)",
        "return tl.log(rounded)",
        (PROXY_KERNEL,),
    ),
    Mutant(
        "own columns keep the sign of others",
        "kernels/proxy_logsumexp.py",
        "weight = tl.where(is_own, -tl.load(grad_positive + row)",
        "weight = tl.where(is_own, tl.load(grad_positive + row)",
        (PROXY_KERNEL,),
    ),
    Mutant(
        "ties are above",
        "kernels/rank_counts.py",
        "above += (score > bound).to(tl.int32)",
        "above += (score >= bound).to(tl.int32)",
        ("tests/test_kernels_rank_counts.py",),
    ),
    Mutant(
        "the highest power of a grid cell is left out",
        "kernels/soft_rank_grid.py",
        "for reverse in tl.static_range(POINTS):",
        "for reverse in tl.static_range(1, POINTS):",
        ("tests/test_large_classes.py::test_kernels_spread_and_read",),
    ),
    # --- backends ---
    Mutant(
        "the eager backend keeps no scale of g'",
        "tritonloss/backends/eager.py",
        "slopes.mul_(SCALE[surrogate])",
        "slopes.mul_(1)",
        (f"{RANK}::test_equals_brute_force",),
    ),
    Mutant(
        "positives stay among the negatives",
        "tritonloss/backends/eager.py",
        "scores.scatter_(1, positives.columns, -torch.inf)",
        "pass",
        (f"{RANK}::test_equals_brute_force",),
    ),
    Mutant(
        "the gradient of a score is left out",
        "tritonloss/backends/eager.py",
        "        own += positives.only_pairs(grad_positive_scores)",
        "        own += 0",
        (f"{RANK}::test_gradient_through_one_output",),
    ),
    Mutant(
        "slots without a pair have weights",
        "tritonloss/backends/eager.py",
        "    weight = positives.only_pairs(grad_ranks)\n    own =",
        "    weight = grad_ranks\n    own =",
        (RANK, "tests/test_one_pass.py"),
    ),
    Mutant(
        "a NaN lies in the first bin",
        "tritonloss/backends/eager.py",
        "position = _node_position(scores, size - 2, descending).nan_to_num_(nan=size - 1)",
        "position = _node_position(scores, size - 2, descending).nan_to_num_(nan=0)",
        ("tests/test_soft_histogram.py", f"{COMMON}::test_nan_is_not_hidden"),
    ),
    Mutant(
        "the last node has no slope",
        "tritonloss/backends/eager.py",
        "    table[:, :2, n_bins] = slopes[:, :, -1]\n",
        "",
        ("tests/test_soft_histogram.py", "tests/test_fastap.py"),
    ),
    Mutant(
        "an eager log-sum-exp forgets its 1",
        "tritonloss/backends/eager.py",
        "peak + torch.log(total + torch.exp(-peak))",
        "peak + torch.log(total)",
        ("tests/test_proxy_logsumexp.py",),
    ),
    Mutant(
        "one program less than there are tiles of positives",
        "tritonloss/backends/triton.py",
        "tiles = -(-positives.width // block_p)",
        "tiles = max(1, positives.width // block_p)",
        (f"{RANK}::test_equals_brute_force",),
    ),
    Mutant(
        "every class is one tile",
        "tritonloss/backends/triton.py",
        '"ONE_TILE": positives.width <= block_p,',
        '"ONE_TILE": True,',
        (f"{RANK}::test_float32_is_as_exact_as_its_rival",),
    ),
    # --- ops ---
    Mutant(
        "the budget does not count pairs",
        "tritonloss/ops/streaming.py",
        "return max(1, min(height, budget // max(1, itemsize * numbers)))",
        "return max(1, height)",
        (f"{RANK}::test_panels_cover_every_row_once",),
    ),
    Mutant(
        "the last panel goes beyond the rows",
        "tritonloss/ops/streaming.py",
        "rows = slice(index * self.height, min((index + 1) * self.height, n_rows))",
        "rows = slice(index * self.height, (index + 1) * self.height)",
        (f"{RANK}::test_panels_cover_every_row_once",),
    ),
    Mutant(
        "a class may be larger than its bound",
        "tritonloss/ops/streaming.py",
        "torch._assert_async((count <= bound).all()",
        "torch._assert_async((count <= bound + 1).all()",
        (f"{RANK}::test_bound_that_is_too_small",),
    ),
    Mutant(
        "the gradient of a score keeps the temperature",
        "tritonloss/ops/rank.py",
        "by_scores = None if by_scores is None else by_scores * temperature",
        "by_scores = by_scores",
        (f"{RANK}::test_gradient_through_one_output",),
    ),
    Mutant(
        "panels without pairs drop their queries",
        "tritonloss/ops/rank.py",
        "        self.parts.append(self.like.new_zeros(rows.stop - rows.start))",
        "        pass",
        ("tests/test_one_pass.py", f"{COMMON}::test_small_batches"),
    ),
    Mutant(
        "the farthest positive of a panel is cut off",
        "tritonloss/ops/rank.py",
        "min(n_keys, end + positives.width - 1)",
        "min(n_keys, end + positives.width - 2)",
        ("tests/test_soprc.py::test_quantiles_of_classes_of_any_size",),
    ),
    # --- losses ---
    Mutant(
        "PNP Ds has the slope of O",
        "tritonloss/losses/pnp.py",
        '"Ds": (lambda r, b, alpha: torch.log1p(r), lambda r, b, alpha: 1 / (1 + r)),',
        '"Ds": (lambda r, b, alpha: torch.log1p(r), lambda r, b, alpha: 1),',
        ("tests/test_pnp.py",),
    ),
    Mutant(
        "PNP Iu forgets the rank",
        "tritonloss/losses/pnp.py",
        '"Iu": (lambda r, b, alpha: (1 + r) * torch.log1p(r)',
        '"Iu": (lambda r, b, alpha: r * torch.log1p(r)',
        ("tests/test_pnp.py",),
    ),
    Mutant(
        "SmoothAP does not count the positive itself",
        "tritonloss/losses/smoothap.py",
        "above, own = pairs.ranks, 1 + pairs.positive_ranks",
        "above, own = pairs.ranks, pairs.positive_ranks",
        ("tests/test_smoothap.py",),
    ),
    Mutant(
        "SmoothAP has no gradient through the positives",
        "tritonloss/losses/smoothap.py",
        "positive_ranks=-above * scale)",
        "positive_ranks=0 * scale)",
        ("tests/test_smoothap.py",),
    ),
    Mutant(
        "FastAP counts the query among its positives",
        "tritonloss/losses/fastap.py",
        "n = (count - 1).clamp(min=1)",
        "n = count.clamp(min=1)",
        ("tests/test_fastap.py",),
    ),
    Mutant(
        "FastAP's gradient forgets the nodes behind",
        "tritonloss/losses/fastap.py",
        "by_positives = by_negatives - later[1] - precision",
        "by_positives = by_negatives - precision",
        ("tests/test_fastap.py",),
    ),
    Mutant(
        "the memory of SOPRC takes no average",
        "tritonloss/losses/score_memory.py",
        "masked_fill(is_known, self.beta)",
        "masked_fill(is_known, 1)",
        (
            "tests/test_soprc.py::test_first_visit_then_moving_average",
            "tests/test_soprc.py::test_score_memory",
        ),
    ),
    Mutant(
        "a NaN is remembered",
        "tritonloss/losses/score_memory.py",
        "is_fresh = is_query & phi.isfinite().all(1)",
        "is_fresh = is_query",
        (
            "tests/test_soprc.py::test_nan_is_reported_and_not_remembered",
            "tests/test_soprc.py::test_score_memory",
        ),
    ),
]


def misfits() -> list[str]:
    """What is wrong with the list: edits that cannot be made, tests that do not exist, names that stand twice."""
    found = []
    for mutant in MUTANTS:
        path = ROOT / mutant.file
        times = path.read_text(encoding="utf-8").count(mutant.old) if path.exists() else 0
        if times != 1:
            found.append(f"{mutant.name}: {mutant.file} holds {mutant.old!r} {times} times, expected once")
        for test in mutant.tests:
            name, _, function = test.partition("::")
            source = ROOT / name
            if not source.exists() or (
                function and f"def {function}(" not in source.read_text(encoding="utf-8")
            ):
                found.append(f"{mutant.name}: there is no {test}")
    names = [mutant.name for mutant in MUTANTS]
    return found + [f"{name} stands twice" for name in sorted(set(names)) if names.count(name) > 1]


def outcome(mutant: Mutant, tree: Path) -> str:
    """killed, SURVIVED, or why nothing was tested; `tree` is as it was afterwards."""
    path = tree / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
        run = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    finally:
        path.write_text(source, encoding="utf-8")
    if run.returncode == TESTS_FAILED:
        first = next((line for line in run.stdout.splitlines() if line.startswith("FAILED")), "an error")
        return f"killed by {first.removeprefix('FAILED ').split(' - ')[0]}"
    if run.returncode == 0:
        return "SURVIVED"
    return f"NOT TESTED, pytest ended with {run.returncode}: {run.stdout[-500:]}{run.stderr[-500:]}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="those whose name or file contains TEXT")
    parser.add_argument("--list", action="store_true", help="check the list and print it, run nothing")
    chosen = parser.parse_args()
    if found := misfits():
        sys.exit("\n".join(found))
    mutants = [mutant for mutant in MUTANTS if chosen.only in mutant.name or chosen.only in mutant.file]
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
        for mutant in mutants:
            start = time.monotonic()
            result = mutant.file if chosen.list else outcome(mutant, tree)
            killed += result.startswith("killed")
            print(f"{mutant.name}: {result} ({time.monotonic() - start:.0f} s)", flush=True)
    if chosen.list:
        return
    print(f"{killed} of {len(mutants)} killed")
    sys.exit(killed < len(mutants))


if __name__ == "__main__":
    main()
