"""What others would write: the comparisons of the benchmark."""

import torch
from pytorch_metric_learning import losses as pml_losses
from torch import Tensor
from torch.nn import functional as F


def pnp_gathered(embeddings: Tensor, labels: Tensor) -> Tensor:
    """PNP-O in plain torch with the positives of each query gathered: a [N, 4, N] tensor instead of N x N x N.

    Labels must come in runs of four, so that no search for the positives is timed.
    """
    rows = F.normalize(embeddings, dim=1)
    n = embeddings.shape[0]
    similarity = rows @ rows.T
    first = torch.arange(n, device=rows.device) // 4 * 4
    positive = similarity.gather(1, first[:, None] + torch.arange(4, device=rows.device))
    above = torch.sigmoid((similarity[:, None, :] - positive[:, :, None]) / 0.01)
    return above.masked_fill((labels[:, None] == labels)[:, None, :], 0).sum(2).mean()


def pml_pnp() -> torch.nn.Module:
    return pml_losses.PNPLoss()
