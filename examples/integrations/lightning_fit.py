"""Lightning: one fit in two processes on the CPU, where the loss ranks the rows of both against each other.

`DistributedLoss` gathers the embeddings, so that a row finds its positives and negatives in the whole batch, and gives
gradients that are right after DistributedDataParallel has averaged them.
"""

from collections.abc import Iterator

import lightning
import torch
from setting import CLASSES, IMAGES, Glyphs, balanced_batches, data, network, score, steps
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tritonloss.distributed import DistributedLoss
from tritonloss.losses import PNPLoss

PROCESSES = 2


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless batches of images and labels; other ones for each seed."""

    def __init__(self, glyphs: Glyphs, seed: int) -> None:
        self.glyphs, self.seed = glyphs, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in balanced_batches(self.glyphs.labels, CLASSES // PROCESSES, IMAGES, self.seed):
            yield self.glyphs.images[rows], self.glyphs.labels[rows]


class Embedder(lightning.LightningModule):
    def __init__(self, train: Glyphs) -> None:
        super().__init__()
        self.train_glyphs = train
        self.network = network()
        self.criterion = DistributedLoss(PNPLoss(variant="Ds", anneal=0.05))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(Batches(self.train_glyphs, seed=self.global_rank), batch_size=None)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return self.criterion(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.005)


def main() -> None:
    n_steps = steps(__doc__)
    lightning.seed_everything(0, verbose=False)
    train, unseen = data()
    embedder = Embedder(train)
    before = score(embedder.network, unseen)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=PROCESSES,
        strategy="ddp",
        max_steps=n_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(embedder)
    if trainer.is_global_zero:
        print(f"untrained {before}\ntrained   {score(embedder.network, unseen)}")
        print(f"{trainer.global_step} steps in {trainer.world_size} processes")


if __name__ == "__main__":
    main()
