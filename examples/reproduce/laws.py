"""Score distributions with a known AUPRC (Boyd et al., ECML 2013), and how a script reports."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from scipy import integrate, stats
from torch import Tensor

RESULTS = Path(__file__).resolve().parent / "results"


class Law(NamedTuple):
    """The distributions of positive and of negative scores."""

    positive: Any
    negative: Any

    def sample(self, n_positive: int, n_negative: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Scores [n_positive] and [n_negative], float64."""
        return tuple(
            torch.from_numpy(law.ppf(torch.rand(n, generator=generator, dtype=torch.float64).numpy()))
            for law, n in ((self.positive, n_positive), (self.negative, n_negative))
        )  # type: ignore[return-value]

    def auprc(self, prior: float) -> float:
        """int_0^1 pi r / (pi r + (1 - pi) FPR(c(r))) dr, r the recall at the threshold c(r): Eq. 1, by quadrature."""

        def precision(recall: float) -> float:
            threshold = self.positive.isf(recall)
            return prior * recall / (prior * recall + (1 - prior) * self.negative.sf(threshold))

        value, error = integrate.quad(precision, 0, 1, limit=500)
        assert error < 1e-6, error
        return float(value)


LAWS = {
    "binormal": Law(stats.norm(1, 1), stats.norm(0, 1)),
    "bibeta": Law(stats.beta(5, 2), stats.beta(2, 5)),
    "offset uniform": Law(stats.uniform(0.5, 1), stats.uniform(0, 1)),
}


def report(
    name: str, results: dict[str, Any], verdicts: dict[str, bool], draw: Callable[[Figure], None]
) -> None:
    """Write results/NAME.json and results/NAME.png, and print a line for each verdict."""
    RESULTS.mkdir(exist_ok=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    document = {"versions": versions, "verdicts": verdicts, **results}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    figure = Figure(figsize=(12, 4), layout="constrained")
    draw(figure)
    figure.savefig(RESULTS / f"{name}.png", dpi=80)
    for claim, holds in verdicts.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {claim}")
    print(f"written: {RESULTS / name}.json and .png")
