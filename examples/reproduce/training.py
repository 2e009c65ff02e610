"""One small training run on the glyph images of the example: half of the characters to learn, half to be judged on."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evaluation import Retrieval, embed, retrieval
from glyphs import Glyphs, balanced_batches, distort, load_glyphs

Make = Callable[[int, int], nn.Module]  # the number of classes and the size of the embedding -> a loss
SIZE, CLASSES_IN_A_BATCH, IMAGES_OF_A_CLASS = 64, 28, 4


def network() -> nn.Module:
    """[N, 1, 28, 28] to [N, SIZE]."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 7 * 7, SIZE))


def train(make: Make, seed: int, steps: int, data: tuple[Glyphs, Glyphs], rate: float = 0.005) -> Retrieval:
    """Train from the seed for `steps` batches; how well the other half of the characters is retrieved."""
    torch.manual_seed(seed)
    seen, unseen = data
    n_classes = int(seen.labels.max()) + 1
    model, criterion = network(), make(n_classes, SIZE)
    parameters = [*model.parameters(), *criterion.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    batches = balanced_batches(seen.labels, CLASSES_IN_A_BATCH, IMAGES_OF_A_CLASS, seed)
    for _ in range(steps):
        rows = next(batches)
        loss = criterion(model(distort(seen.images[rows])), seen.labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return retrieval(embed(model, unseen.images), unseen.labels)


def compare(makes: dict[str, Make], seeds: int, steps: int) -> tuple[dict[str, dict[str, Any]], Retrieval]:
    """Every loss with every seed, the seeds in the outer loop; and what raw pixels give."""
    data = load_glyphs()
    runs: dict[str, list[Retrieval]] = {name: [] for name in makes}
    for seed in range(seeds):
        for name, make in makes.items():
            runs[name].append(train(make, seed, steps, data))
            print(f"seed {seed}  {name:24} {runs[name][-1]}", flush=True)
    summary = {name: summarised(results) for name, results in runs.items()}
    return summary, retrieval(data[1].images, data[1].labels)


def summarised(results: list[Retrieval]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds, and every run."""
    summary: dict[str, Any] = {}
    for field in Retrieval._fields:
        values = [getattr(result, field) for result in results]
        summary[field] = {"mean": statistics.mean(values), "spread": statistics.stdev(values), "runs": values}
    return summary


def table(summary: dict[str, dict[str, Any]], raw: Retrieval) -> str:
    """Markdown for the README."""
    lines = ["| loss | mAP | recall@1 |", "|---|---|---|"]
    for name, fields in summary.items():
        cells = [f"{fields[f]['mean']:.3f} ± {fields[f]['spread']:.3f}" for f in Retrieval._fields]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, f"| raw pixels | {raw[0]:.3f} | {raw[1]:.3f} |"])
