"""pytorch-metric-learning 2.9: its sampler, miner, regularizer, reducer and wrapper around losses of tritonloss."""

import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import MultipleLosses
from pytorch_metric_learning.miners import MultiSimilarityMiner
from pytorch_metric_learning.reducers import DivisorReducer
from pytorch_metric_learning.regularizers import LpRegularizer
from pytorch_metric_learning.samplers import MPerClassSampler
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from setting import CLASSES, IMAGES, SIZE, data, network, steps
from torch.utils.data import DataLoader, TensorDataset

from tritonloss import losses


def main() -> None:
    n_steps = steps(__doc__)
    torch.manual_seed(0)
    train, unseen = data()
    batch_size = CLASSES * IMAGES
    sampler = MPerClassSampler(train.labels, IMAGES, batch_size, length_before_new_iter=n_steps * batch_size)
    loader = DataLoader(TensorDataset(*train), batch_size, sampler=sampler)

    ranking = losses.PNPLoss(
        variant="Ds", anneal=0.05, embedding_regularizer=LpRegularizer(), embedding_reg_weight=0.01
    )
    proxies = losses.ProxyAnchorLoss(
        int(train.labels.max()) + 1, SIZE, distance=CosineSimilarity(), reducer=DivisorReducer()
    )
    # PNPLoss ranks the whole batch and takes no tuples; ProxyAnchorLoss weighs each row by how often it was mined.
    criterion = MultipleLosses([ranking, proxies], miners=[None, MultiSimilarityMiner()], weights=[1, 0.1])

    model = network()
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=0.005)
    calculator = AccuracyCalculator(
        include=("precision_at_1", "mean_average_precision_at_r"),
        k="max_bin_count",
        knn_func=CustomKNN(CosineSimilarity()),
    )

    def report(name: str) -> None:
        model.eval()
        with torch.no_grad():
            accuracy = calculator.get_accuracy(model(unseen.images), unseen.labels)
        model.train()
        print(f"{name:9} " + "  ".join(f"{key} {value:.3f}" for key, value in sorted(accuracy.items())))

    report("untrained")
    for images, labels in loader:
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()
    report("trained")


if __name__ == "__main__":
    main()
