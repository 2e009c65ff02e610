"""torchmetrics: the retrieval metrics that SmoothAPLoss approximates, of images never seen in training."""

import torch
from setting import CLASSES, IMAGES, Glyphs, balanced_batches, data, network, steps
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.retrieval import RetrievalMAP, RetrievalPrecision

from tritonloss.losses import SmoothAPLoss


def metrics() -> MetricCollection:
    return MetricCollection({"mAP": RetrievalMAP(), "recall@1": RetrievalPrecision(top_k=1)})


@torch.no_grad()
def measure(network: nn.Module, glyphs: Glyphs) -> dict[str, Tensor]:
    """Each image is a query against all others: the scores of the others, and which of them are of its class."""
    network.eval()
    unit = F.normalize(network(glyphs.images))
    network.train()
    others = ~torch.eye(len(unit), dtype=torch.bool)
    query = torch.arange(len(unit))[:, None].expand_as(others)
    same_class = glyphs.labels[:, None] == glyphs.labels
    # torchmetrics leaves out positives whose score is not above 0, so cosines are shifted to 1 .. 3.
    scores = unit @ unit.T + 2
    return metrics()(scores[others], same_class[others], indexes=query[others])


def main() -> None:
    n_steps = steps(__doc__)
    torch.manual_seed(0)
    train, unseen = data()
    few = Glyphs(unseen.images[::4], unseen.labels[::4])
    model, criterion = network(), SmoothAPLoss(temperature=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    batches = balanced_batches(train.labels, CLASSES, IMAGES, seed=0)

    def report(name: str) -> None:
        print(f"{name:9} " + "  ".join(f"{key} {value:.3f}" for key, value in measure(model, few).items()))

    report("untrained")
    for _ in range(n_steps):
        rows = next(batches)
        optimizer.zero_grad()
        criterion(model(train.images[rows]), train.labels[rows]).backward()
        optimizer.step()
    report("trained")


if __name__ == "__main__":
    main()
