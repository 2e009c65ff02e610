"""Fig. 1(b) of SOPRC (arXiv 2209.13262): three estimates of 1 - AUPRC from batches whose share of positives is wrong.

Steps in place of the surrogates, so that each estimate has a limit that is known: the average precision of the batch
tends to the AUPRC of the batch's own share of positives, the other two to the AUPRC of the prior. About a minute.
"""

from __future__ import annotations

import math
from itertools import product

import torch
from laws import LAWS, Law, report
from matplotlib.figure import Figure
from torch import Tensor

from tritonloss.functional import interpolate_scores

PRIOR, RATES, SIZES = 0.1, (0.02, 0.2), (128, 512, 2048, 8192)
WARM_UP, DRAWS, BETA, MEMORY = 400, 300, 0.05, 500
ESTIMATES = ("average precision", "prior, TPR of the batch", "prior, TPR of the memory")


def rate_at_or_above(thresholds: Tensor, scores: Tensor) -> Tensor:
    """The share of the ascending `scores` that are at least each threshold."""
    return 1 - torch.searchsorted(scores, thresholds) / len(scores)


def loss(prior: float, fpr: Tensor, tpr: Tensor) -> float:
    """Eq. 3; 0 / 0 is 0."""
    part = (1 - prior) * fpr
    return float((part / (part + prior * tpr).clamp(min=1e-300)).mean())


def draws(law: Law, rate: float, n: int, generator: torch.Generator) -> Tensor:
    """The three estimates of each measured batch [DRAWS, 3]."""
    n_positive = round(rate * n)
    memory, rows = None, []
    for step in range(WARM_UP + DRAWS):
        positive, negative = law.sample(n_positive, n - n_positive, generator)
        positive, negative = positive.sort().values, negative.sort().values
        phi = interpolate_scores(positive, MEMORY)
        memory = phi if memory is None else torch.lerp(memory, phi, BETA)
        if step < WARM_UP:
            continue
        fpr, own = rate_at_or_above(positive, negative), rate_at_or_above(positive, positive)
        remembered = rate_at_or_above(positive, memory)
        # The positive itself counts, as `tpr_offset=1` has it.
        remembered = (1 + MEMORY * remembered) / (1 + MEMORY)
        rows.append([loss(n_positive / n, fpr, own), loss(PRIOR, fpr, own), loss(PRIOR, fpr, remembered)])
    return torch.tensor(rows, dtype=torch.float64)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    table, verdicts = [], {}
    for (name, law), rate in product(LAWS.items(), RATES):
        truth = 1 - law.auprc(PRIOR)
        predicted = law.auprc(PRIOR) - law.auprc(rate)
        for n in SIZES:
            values = draws(law, rate, n, generator)
            bias, spread = (values.mean(0) - truth).tolist(), values.std(0).tolist()
            table.append(
                {
                    "law": name,
                    "rate": rate,
                    "n": n,
                    "truth": truth,
                    "bias": bias,
                    "spread": spread,
                    "limit": predicted,
                }
            )
            print(
                f"{name:15} rate {rate:4} n {n:5}  "
                + "  ".join(f"{b:+.3f} ({s:.3f})" for b, s in zip(bias, spread, strict=True))
            )
        case, row = f"{name}, rate {rate}, n = {SIZES[-1]}", table[-1]
        error = row["spread"][0] / math.sqrt(DRAWS)
        # A batch's own bias of order 1 / n_+ is there beside the standard error.
        slack = 3 * error + 0.5 / round(rate * SIZES[-1])
        verdicts[f"{case}: SOPRC's bias {row['bias'][2]:+.4f} is below 0.01"] = abs(row["bias"][2]) < 0.01
        verdicts[
            f"{case}: the bias of average precision {row['bias'][0]:+.4f} is its limit {predicted:+.4f} "
            f"within 3 standard errors and 1/(2 n+), {slack:.4f}"
        ] = abs(row["bias"][0] - predicted) <= slack
    calmer = [row["spread"][2] < row["spread"][1] for row in table]
    verdicts[f"the memory lowers the spread in {sum(calmer)} of {len(calmer)} cases"] = all(calmer)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(LAWS) * len(RATES), sharey=True)
        for axis, (name, rate) in zip(axes, product(LAWS, RATES), strict=True):
            rows = [row for row in table if row["law"] == name and row["rate"] == rate]
            for k, label in enumerate(ESTIMATES):
                bias, spread = ([row[key][k] for row in rows] for key in ("bias", "spread"))
                axis.errorbar(SIZES, bias, spread, label=label, capsize=2, marker=".")
            axis.axhline(rows[0]["limit"], linestyle=":", color="gray")
            axis.axhline(0, color="black", linewidth=0.5)
            axis.set(xscale="log", title=f"{name}\nsampled at {rate}", xlabel="batch size")
        axes[0].set_ylabel(f"bias of 1 - AUPRC, prior {PRIOR}")
        axes[0].legend(fontsize=7)

    settings = {"prior": PRIOR, "beta": BETA, "memory": MEMORY, "draws": DRAWS, "estimates": ESTIMATES}
    report("bias", {"settings": settings, "table": table}, verdicts, draw)


if __name__ == "__main__":
    main()
