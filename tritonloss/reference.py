"""The losses straight from their equations: dense, any floating dtype, differentiable any number of times.

The oracle of the tests, and what `use_backend("reference")` runs. Memory grows with N^3 where the definition has a sum
over pairs for each query: for small N only.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tritonloss.distances import CosineSimilarity, Distance


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


def proxy_anchor(
    embeddings: Tensor,
    proxies: Tensor,
    labels: Tensor,
    *,
    margin: float = 0.1,
    alpha: float = 32,
    weights: Tensor | None = None,
    distance: Distance | None = None,
) -> tuple[Tensor, Tensor]:
    """The two logarithms of every proxy, [C] each: over the embeddings of its class and over the others.

    embeddings: [N, D]. proxies: [C, D]. labels: [N] integer. See `tritonloss.functional.proxy_anchor_loss`.
    """
    distance = CosineSimilarity() if distance is None else distance
    # Rows are proxies, columns embeddings.
    s = distance(embeddings, proxies).T
    if distance.is_inverted:
        attraction, repulsion = -alpha * (s - margin), alpha * (s + margin)
    else:
        attraction, repulsion = -alpha * (margin - s), alpha * (-margin - s)
    log_weights = torch.zeros_like(s[0]) if weights is None else torch.log(weights.to(s.dtype))
    is_own = torch.arange(len(proxies), device=labels.device)[:, None] == labels
    positive = torch.where(is_own, attraction + log_weights, -torch.inf)
    negative = torch.where(is_own, -torch.inf, repulsion + log_weights)
    # ln(1 + sum of e^x) as a log-sum-exp whose first exponent is 0.
    one = s.new_zeros(s.shape[0], 1)
    return torch.logsumexp(torch.cat([one, positive], 1), 1), torch.logsumexp(
        torch.cat([one, negative], 1), 1
    )


def smooth_ap(embeddings: Tensor, labels: Tensor, *, temperature: float = 0.01) -> tuple[Tensor, Tensor]:
    """The SmoothAP loss of each query [N], 0 where a row has no other positive, and whether it has one [N] bool.

    embeddings: [N, D]. labels: [N] integer. See `tritonloss.functional.smooth_ap_loss`.
    """
    rows = F.normalize(embeddings, dim=1)
    similarity = rows @ rows.T
    is_positive = labels[:, None] == labels
    # above[q, i, j] = G(s_qj - s_qi)
    above = torch.sigmoid((similarity[:, None, :] - similarity[:, :, None]) / temperature)
    is_other = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    rank_among_positives = 1 + (above * (is_positive[:, None, :] & is_other)).sum(2)
    rank = rank_among_positives + (above * ~is_positive[:, None, :]).sum(2)
    n_positives = is_positive.sum(1)
    average_precision = (rank_among_positives / rank * is_positive).sum(1) / n_positives
    is_query = n_positives > 1
    return (1 - average_precision) * is_query, is_query


def similarity(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine similarity [N, N], and the masks of other rows of the class and of rows of other classes [N, N]."""
    rows = F.normalize(embeddings, dim=1)
    same = labels[:, None] == labels
    return rows @ rows.T, same & ~torch.eye(len(rows), dtype=torch.bool, device=rows.device), ~same


def soprc(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    memory: Tensor,
    prior: Tensor,
    *,
    tau1: float = 0.1,
    tau2: float = 0.001,
    tpr_offset: float = 1,
    tpr_grad: bool = False,
) -> Tensor:
    """The SOPRC loss of every pair (query, column) [Q, N]; 0 where the column is no positive.

    scores: [Q, N]. positives, negatives: [Q, N] bool. memory: [Q, V], the remembered scores v of each query's class.
    prior: [Q]. Memory grows with Q N (N + V). See `tritonloss.functional.soprc_scores_loss`.
    """
    # x[q, i, k] = h_qi - h_qk
    x = scores[:, :, None] - scores[:, None, :]
    false_positive = torch.where(
        x < 0, 1 - 2 * x / tau1, torch.where(x < tau1, (1 - x / tau1) ** 2, torch.zeros_like(x))
    )
    false_positive = torch.where(negatives[:, None, :], false_positive, 0)
    fpr = false_positive.sum(2) / negatives.sum(1).clamp(min=1)[:, None]
    anchors = scores if tpr_grad else scores.detach()
    x = anchors[:, :, None] - memory[:, None, :]
    above = torch.where(x < 0, torch.tanh(-x / (2 * tau2)), 0)
    tpr = (tpr_offset + above.sum(2)) / (tpr_offset + memory.shape[1])
    numerator = (1 - prior)[:, None] * fpr
    denominator = numerator + prior[:, None] * tpr
    ratio = numerator / torch.where(denominator == 0, 1, denominator)
    return torch.where(positives, ratio, 0)


def soprc_interpolation(
    scores: list[float], size: int, *, grid: str = "midpoint", score_range: tuple[float, float] | None = None
) -> list[float]:
    """The interpolation phi of SOPRC in Python numbers: `size` values spread over the sorted scores, Algorithm 2.

    u is the polygon through (k, s_k), k = 0 .. n + 1. See `tritonloss.functional.interpolate_scores`.
    """
    n = len(scores)
    s = sorted(scores)
    second, last_but_one = (s[1], s[-2]) if n > 1 else (s[0], s[0])
    low, high = 2 * s[0] - second, 2 * s[-1] - last_but_one
    if score_range is not None:
        low, high = max(low, score_range[0]), min(high, score_range[1])
    knots = [low, *s, high]

    def u(t: float) -> float:
        k = min(int(t), n)
        return knots[k] + (t - k) * (knots[k + 1] - knots[k])

    if grid == "linear":
        return [u((j + 0.5) / size * (n + 1)) for j in range(size)]
    step, first = {"midpoint": (n / size, 0.5), "left": (n / size, 0.0), "authors": (1 / -(-size // n), 0.0)}[
        grid
    ]
    places = [(j + first) * step for j in range(size)]
    return [(u(t) + u(t + 1)) / 2 for t in places]


def histogram(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    num_bins: int = 100,
    pairs: tuple[Tensor, Tensor] | None = None,
    distance: Distance | None = None,
) -> Tensor:
    """The histogram loss, a scalar.

    embeddings: [N, D]. labels: [N] integer. pairs: the positive and the negative pairs, [2, M] each, each unordered
    pair once; None takes those of the labels. See `tritonloss.functional.histogram_loss`.
    """
    s = (CosineSimilarity() if distance is None else distance)(embeddings)
    if pairs is None:
        assert labels is not None
        same = labels[:, None] == labels
        has_positive = same.sum(1) > 1
        in_a_triplet = has_positive[:, None] | has_positive
        positives = (same & torch.ones_like(same).triu(1)).nonzero(as_tuple=True)
        negatives = (~same & in_a_triplet & torch.ones_like(same).triu(1)).nonzero(as_tuple=True)
    else:
        (positives, negatives) = (tuple(part) for part in pairs)

    def density(similarity: Tensor) -> Tensor:
        place = num_bins / 2 + num_bins / 2 * similarity.clamp(-1, 1)
        return _node_masses(place, num_bins).sum(0) / max(1, similarity.shape[0])

    return (density(s[negatives]) * density(s[positives]).cumsum(0)).sum()


def fastap(
    embeddings: Tensor, labels: Tensor, *, num_bins: int = 10, distance: Distance | None = None
) -> tuple[Tensor, Tensor]:
    """The FastAP loss of each query [N], 0 where a row has no other positive, and whether it has one [N] bool.

    embeddings: [N, D]. labels: [N] integer. distance: Euclidean of normalised rows, to any power; None for the square.
    See `tritonloss.functional.fastap_loss`.
    """
    if distance is None:
        rows = F.normalize(embeddings, dim=1)
        s = rows @ rows.T  # d = 2 - 2 s
    else:
        s = 1 - 2 / 2**distance.power * distance(embeddings)  # type: ignore[attr-defined]
    masses = _node_masses(num_bins / 2 - num_bins / 2 * s.clamp(-1, 1), num_bins)
    is_other = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    is_positive = (labels[:, None] == labels) & is_other
    positives = (masses * is_positive[..., None]).sum(1)
    retrieved = (masses * is_other[..., None]).sum(1).cumsum(1)
    ratio = positives * positives.cumsum(1) / torch.where(retrieved == 0, 1, retrieved)
    is_query = is_positive.any(1)
    per_query = 1 - ratio.sum(1) / is_positive.sum(1).clamp(min=1)
    return torch.where(is_query, per_query, 0), is_query


def _node_masses(place: Tensor, num_bins: int) -> Tensor:
    """What a value at `place`, 0 .. num_bins, gives to each node: [..., num_bins + 1]; NaN for a NaN.

    max(0, 1 - |place - r|), with the derivative of the bin above the node at a node, at the last of the bin below.
    """
    bin_ = place.detach().nan_to_num().floor().clamp(max=num_bins - 1).to(torch.int64)[..., None]
    upper = place[..., None] - bin_
    node = torch.arange(num_bins + 1, device=place.device)
    return torch.where(node == bin_, 1 - upper, 0) + torch.where(node == bin_ + 1, upper, 0)
