"""transformers: its Trainer on a small ResNet with a loss of tritonloss, in one process or in several by torchrun.

The Trainer knows one model. What it shall train, save and load has to be in it, the loss included: its proxies then are
in the optimizer, and they and a memory are in every checkpoint.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from setting import CLASSES, IMAGES, SIZE, Glyphs, balanced_batches, data, score, steps
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import ResNetConfig, ResNetModel, Trainer, TrainingArguments

from tritonloss.distributed import DistributedLoss
from tritonloss.gradient_cache import cached_step
from tritonloss.losses import ProxyAnchorLoss


class Rows(IterableDataset[dict[str, Tensor]]):
    """Endless images and labels, so ordered that every CLASSES * IMAGES of them are a balanced batch."""

    def __init__(self, glyphs: Glyphs) -> None:
        self.glyphs = glyphs

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for rows in balanced_batches(self.glyphs.labels, CLASSES, IMAGES, seed=0):
            for row in rows:
                yield {"pixel_values": self.glyphs.images[row], "labels": self.glyphs.labels[row]}


class Embedder(nn.Module):
    """A network and its loss, as the Trainer wants a model: with labels its output has a loss.

    embed: makes the embeddings [N, D] of the network and its inputs.
    """

    # The loss is the mean of a batch. The Trainer then divides it by the number of accumulated batches.
    accepts_loss_kwargs = False

    def __init__(
        self, network: nn.Module, criterion: nn.Module, embed: Callable[[nn.Module, dict[str, Any]], Tensor]
    ) -> None:
        super().__init__()
        self.network, self.criterion, self.embed = network, criterion, embed

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> dict[str, Tensor]:
        embeddings = self.embed(self.network, inputs)
        if labels is None:
            return {"embeddings": embeddings}
        return {"loss": self.criterion(embeddings, labels), "embeddings": embeddings}


class CachedTrainer(Trainer):
    """Trains an `Embedder` on large batches: the activations of `chunk_size` rows at a time."""

    chunk_size = 64

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        labels = inputs.pop("labels")
        criterion, batches = self.model.criterion, self.current_gradient_accumulation_steps
        with self.compute_loss_context_manager():
            return cached_step(
                model,  # as it is given, which may be wrapped in DistributedDataParallel; not self.model
                lambda embeddings, labels: criterion(embeddings, labels) / batches,
                inputs,
                labels,
                chunk_size=self.chunk_size,
                embed=lambda model, chunk: model(**chunk)["embeddings"],
                scaler=self.accelerator.scaler,
            )


def pooled(network: nn.Module, inputs: dict[str, Any]) -> Tensor:
    return network(**inputs).pooler_output.flatten(1)


class Pooled(nn.Module):
    """The embeddings of a model alone, for the evaluation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return pooled(self.model, {"pixel_values": images})


def main() -> None:
    n_steps = steps(__doc__)
    arguments = TrainingArguments(  # starts the processes' group, which DistributedLoss looks for
        output_dir="build/trainer",
        max_steps=n_steps,
        per_device_train_batch_size=CLASSES * IMAGES,
        learning_rate=0.005,
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    torch.manual_seed(0)
    train, unseen = data()
    network = ResNetModel(
        ResNetConfig(
            num_channels=1, embedding_size=16, hidden_sizes=[32, SIZE], depths=[1, 1], layer_type="basic"
        )
    )
    criterion = DistributedLoss(ProxyAnchorLoss(int(train.labels.max()) + 1, SIZE))
    trainer = Trainer(Embedder(network, criterion, pooled), arguments, train_dataset=Rows(train))
    before = score(Pooled(network), unseen)
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"untrained {before}\ntrained   {score(Pooled(network).to(unseen.images.device), unseen)}")


if __name__ == "__main__":
    main()
