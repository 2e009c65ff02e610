"""What the examples of this folder share: the images, a small network, and how well it finds what it has never seen."""

import argparse
import sys
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evaluation import Retrieval, embed, retrieval
from glyphs import Glyphs, balanced_batches, load_glyphs

__all__ = ["CLASSES", "IMAGES", "SIZE", "Glyphs", "balanced_batches", "data", "network", "score", "steps"]

SIZE = 64  # of an embedding
CLASSES, IMAGES = 32, 4  # of a batch, and of each class in it


def steps(description: str | None, default: int = 40) -> int:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=default, help="batches to train on")
    return parser.parse_args().steps


def data() -> tuple[Glyphs, Glyphs]:
    """The characters to train on, and a third of the images of characters that are never seen in training."""
    train, unseen = load_glyphs()
    return train, Glyphs(unseen.images[::3], unseen.labels[::3])


def network() -> nn.Module:
    """[N, 1, 28, 28] to [N, SIZE]."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 7 * 7, SIZE))


def score(network: nn.Module, images: Glyphs) -> Retrieval:
    return retrieval(embed(network, images.images), images.labels)
