"""The images, batches in which every class counts the same, and small distortions."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

DATA = Path(__file__).resolve().parent / "data" / "glyphs.npz"


class Glyphs(NamedTuple):
    """images: [N, 1, 28, 28] float32 in [0, 1]. labels: [N] int64, from 0 without gaps."""

    images: Tensor
    labels: Tensor


def load_glyphs(device: torch.device | str = "cpu") -> tuple[Glyphs, Glyphs]:
    """The characters to train on, and the characters that are never seen in training."""
    with np.load(DATA) as data:
        images = torch.from_numpy(data["images"]).to(device).unsqueeze(1) / 255
        labels = torch.from_numpy(data["labels"]).to(device).long()
        train_character = torch.from_numpy(data["train_character"]).to(device)

    def split(rows: Tensor) -> Glyphs:
        return Glyphs(images[rows], labels[rows].unique(return_inverse=True)[1])

    train = train_character[labels]
    return split(train), split(~train)


def balanced_batches(labels: Tensor, classes: int, images: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of row numbers [classes * images], on the CPU: `images` of each of `classes` random classes.

    No row occurs twice in a batch, unless its class has fewer than `images`: its rows are then repeated in turn.
    Raises ValueError if there are fewer than `classes` classes.
    """
    labels = labels.cpu()
    members = [(labels == label).nonzero().squeeze(1) for label in labels.unique()]
    if classes > len(members):
        raise ValueError(f"a batch of {classes} classes was asked for, but the data has {len(members)}")
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: Tensor) -> Tensor:
        shuffled = rows[torch.randperm(len(rows), generator=generator)]
        return shuffled.repeat(-(-images // len(rows)))[:images]

    def batches() -> Iterator[Tensor]:
        while True:
            chosen = torch.randperm(len(members), generator=generator)[:classes]
            yield torch.cat([draw(members[i]) for i in chosen.tolist()])

    return batches()


def distort(images: Tensor) -> Tensor:
    """Each image [N, 1, H, W] shifted by up to 1.5 pixels, stretched by up to 10 %, turned and slanted."""
    shift, linear, slant = 1.5, 0.1, 0.15

    def uniform(limit: float, *shape: int) -> Tensor:
        return torch.empty(len(images), *shape, device=images.device).uniform_(-limit, limit)

    matrix = torch.eye(2, device=images.device) + uniform(linear, 2, 2)
    matrix[:, 0, 1] += uniform(slant)
    offset = uniform(shift * 2 / images.shape[-1], 2, 1)  # the image is 2 wide
    grid = F.affine_grid(torch.cat([matrix, offset], 2), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)
