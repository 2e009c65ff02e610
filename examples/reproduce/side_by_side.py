"""All losses of the package on the same images, network, batches and number of steps, beside raw pixels.

Every loss has its defaults except where the paper of the loss asks for another value in this setting; none is tuned, so
this shows that each learns, not which is best. Some ten minutes on two cores.
"""

from __future__ import annotations

import argparse

from laws import report
from matplotlib.figure import Figure
from training import Make, compare, table

from tritonloss import losses

LOSSES: dict[str, Make] = {
    "PNPLoss Ds": lambda classes, size: losses.PNPLoss(variant="Ds"),
    "SmoothAPLoss": lambda classes, size: losses.SmoothAPLoss(),
    "SOPRCLoss": lambda classes, size: losses.SOPRCLoss(classes),
    "FastAPLoss": lambda classes, size: losses.FastAPLoss(),
    "HistogramLoss": lambda classes, size: losses.HistogramLoss(),
    "ProxyAnchorLoss": lambda classes, size: losses.ProxyAnchorLoss(classes, size),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each loss")
    parser.add_argument("--steps", type=int, default=150, help="batches of a run")
    args = parser.parse_args()
    summary, raw = compare(LOSSES, args.seeds, args.steps)
    print(table(summary, raw))
    verdicts = {
        f"{name}: mAP {fields['mean_average_precision']['mean']:.3f} is above that of raw pixels": (
            fields["mean_average_precision"]["mean"] > raw.mean_average_precision
        )
        for name, fields in summary.items()
    }

    def draw(figure: Figure) -> None:
        for axis, field in zip(figure.subplots(1, 2), ("mean_average_precision", "recall_at_1"), strict=True):
            means, spreads = (
                [fields[field][key] for fields in summary.values()] for key in ("mean", "spread")
            )
            axis.barh(list(summary), means, xerr=spreads, capsize=3)
            axis.axvline(getattr(raw, field), linestyle="--", color="gray", label="raw pixels")
            axis.set(title=field, xlim=(0, 1))
            axis.legend()

    settings = {"seeds": args.seeds, "steps": args.steps}
    report(
        "side_by_side", {"settings": settings, "raw_pixels": raw._asdict(), "losses": summary}, verdicts, draw
    )


if __name__ == "__main__":
    main()
