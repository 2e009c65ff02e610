"""How well an embedding finds images of the same class, in numbers and as a picture."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from tritonloss import metrics

RIGHT, WRONG, QUERY = (46, 160, 67), (218, 54, 51), (255, 255, 255)


class Retrieval(NamedTuple):
    """Means over the queries. Both lie in [0, 1]; larger is better."""

    mean_average_precision: float
    recall_at_1: float

    def __str__(self) -> str:
        return f"mAP {self.mean_average_precision:.3f}  recall@1 {self.recall_at_1:.3f}"


@torch.no_grad()
def embed(network: nn.Module, images: Tensor, block: int = 512) -> Tensor:
    """`images` [N, ...] through the network in evaluation mode, `block` at a time; training mode is restored."""
    training = network.training
    network.eval()
    embeddings = torch.cat([network(part) for part in images.split(block)])
    network.train(training)
    return embeddings


def retrieval(embeddings: Tensor, labels: Tensor) -> Retrieval:
    """Every row is a query against all others, by cosine; a row whose class has no other row is no query.

    embeddings: [N, ...], flattened. labels: [N].
    """
    names = Retrieval._fields
    values = metrics.retrieval_metrics(embeddings.flatten(1), labels, metrics=names).values
    return Retrieval(*(values[name].item() for name in names))


def ranking(unit: Tensor, rows: Tensor) -> Tensor:
    """For each of `rows` all other rows of `unit` [N, D], nearest first: [len(rows), N - 1]."""
    similarity = unit[rows] @ unit.T
    similarity.scatter_(1, rows[:, None], -torch.inf)
    return similarity.argsort(dim=1, descending=True)[:, :-1]


def save_picture(
    path: Path,
    title: str,
    losses: list[float],
    scores: dict[int, Retrieval],
    raw: Retrieval,
    images: Tensor,
    labels: Tensor,
    embeddings: Tensor,
    queries: Tensor,
) -> None:
    """A PNG: loss of each step, held-out mAP by step beside that of raw pixels, and the 8 nearest of each query."""
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    curve, mosaic = figure.subplots(1, 2, width_ratios=(1.1, 1))
    figure.suptitle(title)

    curve.plot(range(1, len(losses) + 1), losses, color="tab:gray", linewidth=0.8, label="loss of the batch")
    curve.set(xlabel="step", ylabel="loss")
    quality = curve.twinx()
    quality.plot(list(scores), [s.mean_average_precision for s in scores.values()], "o-", label="network")
    quality.axhline(raw.mean_average_precision, linestyle="--", color="tab:orange", label="raw pixels")
    quality.set(ylabel="mAP on unseen characters", ylim=(0, 1))
    handles = [*curve.get_lines(), *quality.get_lines()]
    quality.legend(handles=handles, loc="center right")

    nearest = ranking(F.normalize(embeddings), queries)[:, :8]
    right = (labels[nearest] == labels[queries, None]).cpu().numpy()
    colours = np.where(right[..., None], RIGHT, WRONG)
    colours = np.concatenate([np.broadcast_to(QUERY, (len(queries), 1, 3)), colours], axis=1)
    shown = torch.cat([queries[:, None], nearest], dim=1)
    paper = 255 - 255 * images[shown].squeeze(2).cpu().numpy()
    mosaic.imshow(framed(paper, colours))
    mosaic.set_title(f"random unseen queries (left) and their 8 nearest: {right.mean():.0%} right")
    mosaic.axis("off")

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def framed(images: np.ndarray, colours: np.ndarray, frame: int = 2, gap: int = 2) -> np.ndarray:
    """Grey images [R, C, H, W], each in a frame of its colour [R, C, 3], as one picture [height, width, 3]."""
    rows, columns, height, width = images.shape
    border = frame + gap
    cells = np.full((rows, columns, height + 2 * border, width + 2 * border, 3), 255, np.uint8)
    cells[:, :, gap:-gap, gap:-gap] = colours[:, :, None, None]
    cells[:, :, border:-border, border:-border] = images[..., None]
    return cells.transpose(0, 2, 1, 3, 4).reshape(rows * cells.shape[2], columns * cells.shape[3], 3)
