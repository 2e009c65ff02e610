"""transformers: its Trainer on a small ResNet, with a loss of tritonloss in place of the model's own."""

from collections.abc import Iterator

import torch
from setting import CLASSES, IMAGES, SIZE, Glyphs, balanced_batches, data, score, steps
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import ResNetConfig, ResNetModel, Trainer, TrainingArguments
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndNoAttention

from tritonloss.losses import PNPLoss


class Rows(IterableDataset[dict[str, Tensor]]):
    """Endless images and labels, so ordered that every CLASSES * IMAGES of them are a balanced batch."""

    def __init__(self, glyphs: Glyphs) -> None:
        self.glyphs = glyphs

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for rows in balanced_batches(self.glyphs.labels, CLASSES, IMAGES, seed=0):
            for row in rows:
                yield {"pixel_values": self.glyphs.images[row], "labels": self.glyphs.labels[row]}


def embeddings_of(outputs: BaseModelOutputWithPoolingAndNoAttention) -> Tensor:
    return outputs.pooler_output.flatten(1)


class Pooled(nn.Module):
    """The embeddings of a model alone, for the evaluation."""

    def __init__(self, model: ResNetModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return embeddings_of(self.model(images))


def main() -> None:
    n_steps = steps(__doc__)
    torch.manual_seed(0)
    train, unseen = data()
    model = ResNetModel(
        ResNetConfig(
            num_channels=1, embedding_size=16, hidden_sizes=[32, SIZE], depths=[1, 1], layer_type="basic"
        )
    )
    criterion = PNPLoss(variant="Ds", anneal=0.05)

    def loss(
        outputs: BaseModelOutputWithPoolingAndNoAttention, labels: Tensor, num_items_in_batch: object = None
    ) -> Tensor:
        return criterion(embeddings_of(outputs), labels)

    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir="build/trainer",
            max_steps=n_steps,
            per_device_train_batch_size=CLASSES * IMAGES,
            learning_rate=0.005,
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=Rows(train),
        compute_loss_func=loss,
    )
    print(f"untrained {score(Pooled(model), unseen)}")
    trainer.train()
    print(f"trained   {score(Pooled(model).to(unseen.images.device), unseen)}")


if __name__ == "__main__":
    main()
