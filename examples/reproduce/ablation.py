"""Table 2 of SOPRC (arXiv 2209.13262) in small: rows 1 to 4 on the glyph images, judged on characters never seen.

Row 1: the batch's own share of positives as prior, phi of the batch. Row 2: a given prior. Row 3: with the memory.
Row 4: with the semi-variance of Eq. 9. Some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import pairwise

from laws import report
from matplotlib.figure import Figure
from training import Make, compare, table

from tritonloss.losses import SOPRCLoss

# One prior for all classes, the scale that the authors use where classes count the same.
PRIOR = 0.1


def row(classes: int, size: int, **options: object) -> SOPRCLoss:
    return SOPRCLoss(classes, **options)


ROWS: dict[str, Make] = {
    "1 batch prior, phi": partial(row, prior="batch", use_memory=False, w_var=0),
    "2 + prior": partial(row, prior=PRIOR, use_memory=False, w_var=0),
    "3 + memory": partial(row, prior=PRIOR, w_var=0),
    "4 + semi-variance": partial(row, prior=PRIOR, w_var=1),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs of each row")
    parser.add_argument("--steps", type=int, default=150, help="batches of a run")
    args = parser.parse_args()
    summary, raw = compare(ROWS, args.seeds, args.steps)
    print(table(summary, raw))
    verdicts = {}
    for before, after in pairwise(ROWS):
        pairs = zip(
            *(summary[name]["mean_average_precision"]["runs"] for name in (before, after)), strict=True
        )
        gains = [b - a for a, b in pairs]
        mean = sum(gains) / len(gains)
        verdicts[f"row {after[0]} is not below row {before[0]} in mAP, over the same seeds: {mean:+.4f}"] = (
            mean >= 0
        )

    def draw(figure: Figure) -> None:
        for axis, field in zip(figure.subplots(1, 2), ("mean_average_precision", "recall_at_1"), strict=True):
            for position, name in enumerate(ROWS):
                entry = summary[name][field]
                axis.errorbar(position, entry["mean"], entry["spread"], marker="o", capsize=4)
                axis.plot([position] * len(entry["runs"]), entry["runs"], ".", color="gray")
            axis.set(title=field, xticks=range(len(ROWS)), xticklabels=ROWS)
            axis.tick_params("x", rotation=15)

    settings = {"seeds": args.seeds, "steps": args.steps, "prior": PRIOR}
    report("ablation", {"settings": settings, "raw_pixels": raw._asdict(), "rows": summary}, verdicts, draw)


if __name__ == "__main__":
    main()
