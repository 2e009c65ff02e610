"""Fig. 1(c) of SOPRC (arXiv 2209.13262): how far the mean of phi is from the quantile function. Under a minute."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from laws import LAWS, report
from matplotlib.figure import Figure

from tritonloss.functional import interpolate_scores

COUNTS, DRAWS, MEMORY = (3, 8, 30, 64, 256), 3000, 200
GRIDS = ("midpoint", "linear")


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    places = (np.arange(MEMORY) + 0.5) / MEMORY
    inner = (places >= 0.05) & (places <= 0.95)
    table = []
    for (name, law), n, grid in product(LAWS.items(), COUNTS, GRIDS):
        scores = law.sample(DRAWS * n, 0, generator)[0].view(DRAWS, n)
        error = np.abs(
            interpolate_scores(scores, MEMORY, grid=grid).mean(0).numpy() - law.positive.ppf(places)
        )
        table.append(
            {"law": name, "n": n, "grid": grid, "mean": float(error.mean()), "max": float(error[inner].max())}
        )
        print(
            f"{name:15} n+ {n:3} {grid:9} mean {error.mean():.4f}  max on [0.05, 0.95] {error[inner].max():.4f}"
        )

    def errors(name: str, grid: str) -> list[float]:
        return [row["mean"] for row in table if row["law"] == name and row["grid"] == grid]

    verdicts = {}
    for name in LAWS:
        midpoint = errors(name, "midpoint")
        verdicts[f"{name}: the error falls with n+, {midpoint[0]:.3f} to {midpoint[-1]:.3f}"] = (
            sorted(midpoint, reverse=True) == midpoint
        )
        verdicts[f"{name}: below 0.02 on average for n+ >= 30"] = max(midpoint[2:]) < 0.02

    def draw(figure: Figure) -> None:
        for axis, name in zip(figure.subplots(1, len(LAWS), sharey=True), LAWS, strict=True):
            for grid in GRIDS:
                axis.loglog(COUNTS, errors(name, grid), "o-", label=grid)
            axis.set(title=name, xlabel="positives in the batch", ylabel="mean error of the quantiles")
            axis.legend()

    report("interpolation", {"draws": DRAWS, "memory": MEMORY, "table": table}, verdicts, draw)


if __name__ == "__main__":
    main()
