"""The losses straight from their equations: dense, any floating dtype, differentiable any number of times.

The oracle of the tests, and what `use_backend("reference")` runs. Memory grows with N^3 where the definition has a sum
over pairs for each query: for small N only.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def pnp(
    embeddings: Tensor,
    labels: Tensor,
    *,
    b: float = 2,
    alpha: float = 1,
    anneal: float = 0.01,
    variant: str = "O",
) -> tuple[Tensor, Tensor]:
    """The PNP loss of each query [N], 0 where a row has no other positive, and whether it has one [N] bool.

    embeddings: [N, D]. labels: [N] integer. See `tritonloss.functional.pnp_loss`.
    """
    rows = F.normalize(embeddings, dim=1)
    similarity = rows @ rows.T
    is_positive = labels[:, None] == labels
    # difference[q, i, j] = s_qj - s_qi
    difference = similarity[:, None, :] - similarity[:, :, None]
    above = torch.sigmoid(difference / anneal) * ~is_positive[:, None, :]
    ranks = above.sum(2)
    values = {
        "O": lambda: ranks,
        "Iu": lambda: (1 + ranks) * torch.log(1 + ranks),
        "Ib": lambda: (b * ranks - torch.log(1 + b * ranks)) / b**2,
        "Ds": lambda: torch.log(1 + ranks),
        "Dq": lambda: 1 - (1 + ranks) ** -alpha,
    }[variant]()
    n_positives = is_positive.sum(1)
    is_query = n_positives > 1
    per_query = (values * is_positive).sum(1) / n_positives
    return per_query * is_query, is_query
