"""The losses straight from their equations: dense, any floating dtype, differentiable any number of times.

The oracle of the tests, and what `use_backend("reference")` runs. Memory grows with N^3 where the definition has a sum
over pairs for each query: for small N only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tritonloss.distances import CosineSimilarity, Distance
from tritonloss.types import IndicesTuple


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


def recall_at_k(
    embeddings: Tensor,
    labels: Tensor,
    *,
    ks: Sequence[int] = (1, 2, 4, 8),
    rank_temperature: Sequence[float] = (1, 1, 1, 1),
    temperature: float = 0.01,
) -> tuple[Tensor, Tensor]:
    """1 - the smooth recall of each query [N], 0 where a row has no other positive, and whether it has one [N] bool.

    embeddings: [N, D]. labels: [N] integer. See `tritonloss.functional.recall_at_k_loss`.
    """
    s, is_positive, _ = similarity(embeddings, labels)
    others = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    # above[q, i, j]: j is neither q nor i.
    above = torch.sigmoid((s[:, None, :] - s[:, :, None]) / temperature) * (others[:, None] & others)
    rank = 1 + above.sum(2)
    n_positives = is_positive.sum(1)
    recalls = []
    for k, width in zip(ks, rank_temperature, strict=True):
        hits = (torch.sigmoid((k - rank) / width) * is_positive).sum(1)
        recalls.append(hits.clamp(max=k) / n_positives.clamp(1, k))
    is_query = n_positives > 0
    return (1 - torch.stack(recalls).mean(0)) * is_query, is_query


def sup_ap(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.01,
    rho: float = 100,
    delta: float = 0.05,
    start: float = 0.5,
    offset: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The SupAP loss of each query [N], 0 where a row has no other positive, and whether it has one [N] bool.

    embeddings: [N, D]. labels: [N] integer. See `tritonloss.functional.sup_ap_loss`.
    """
    rows = F.normalize(embeddings, dim=1)
    s = rows @ rows.T
    is_positive = labels[:, None] == labels
    difference = s[:, None, :] - s[:, :, None]
    own = 1 + ((difference > 0) & is_positive[:, None]).sum(2)
    step = torch.sigmoid(difference / temperature)
    if offset is None:
        offset = start + torch.sigmoid(torch.tensor(delta / temperature, dtype=torch.float64)).item()
    step = torch.where(difference > 0, start + step, step)
    step = torch.where(difference > delta, offset + rho * (difference - delta), step)
    above = (step * ~is_positive[:, None]).sum(2)
    n_positives = is_positive.sum(1)
    is_query = n_positives > 1
    return (above / (above + own) * is_positive).sum(1) / n_positives * is_query, is_query


def triplet_margin(
    scores: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    margin: float = 0.05,
    smooth_loss: bool = False,
    triplets: str = "all",
) -> tuple[Tensor, Tensor]:
    """The loss of each triplet and whether it is one, [Q, N, N] each: query, positive, negative.

    scores: [Q, N], larger for closer. positive, negative: [Q, N] bool. See `tritonloss.losses.TripletMarginLoss`.
    """
    is_triplet = positive[:, :, None] & negative[:, None]
    if triplets == "hard":
        farthest = torch.where(positive, scores, torch.inf).argmin(1)
        nearest = torch.where(negative, scores, -torch.inf).argmax(1)
        column = torch.arange(scores.shape[1], device=scores.device)
        is_triplet = (
            is_triplet & (column[:, None] == farthest[:, None, None]) & (column == nearest[:, None, None])
        )
    elif triplets == "semihard":
        below = negative[:, None] & (scores[:, None] < scores[:, :, None])
        highest = torch.where(below, scores[:, None], -torch.inf).argmax(2)
        lowest = torch.where(negative, scores, torch.inf).argmin(1)[:, None]
        chosen = torch.where(below.any(2), highest, lowest)
        is_triplet = is_triplet & (torch.arange(scores.shape[1], device=scores.device) == chosen[:, :, None])
    violation = torch.where(is_triplet, scores[:, None] - scores[:, :, None] + margin, -1e3)
    losses = F.softplus(violation, threshold=1e3) if smooth_loss else torch.relu(violation)
    return losses * is_triplet, is_triplet


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


def pairs(
    embeddings: Tensor,
    labels: Tensor | None,
    ref_emb: Tensor | None,
    ref_labels: Tensor | None,
    indices_tuple: IndicesTuple | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine similarity [Q, N], and how often each (query, key) is a positive and a negative pair, [Q, N] int64.

    Without `ref_emb` the keys are the queries, and no row is a positive of itself. With mined indices the pairs are
    those of the tuple.
    """
    keys = embeddings if ref_emb is None else ref_emb
    s = F.normalize(embeddings, dim=1) @ F.normalize(keys, dim=1).T
    if indices_tuple is not None:
        anchors, positives = indices_tuple[0], indices_tuple[1]
        others, negatives = (anchors, indices_tuple[2]) if len(indices_tuple) == 3 else indices_tuple[2:]
        return s, _occurrences(anchors, positives, s), _occurrences(others, negatives, s)
    assert labels is not None
    same = labels[:, None] == (labels if ref_labels is None else ref_labels)
    positive = same & ~torch.eye(len(same), dtype=torch.bool, device=s.device) if ref_emb is None else same
    return s, positive.to(torch.int64), (~same).to(torch.int64)


def _occurrences(rows: Tensor, columns: Tensor, like: Tensor) -> Tensor:
    count = torch.zeros_like(like, dtype=torch.int64)
    return count.index_put_((rows, columns), torch.ones_like(rows, dtype=torch.int64), accumulate=True)


def _log_sum_exp(exponents: Tensor, count: Tensor) -> Tensor:
    """ln of the sum of count e^x over each row; -inf, with derivative 0, for a sum of nothing."""
    is_empty = ~count.bool().any(1)
    weights = count.clamp(min=1).to(exponents.dtype)
    terms = torch.where(count > 0, exponents + torch.log(weights), -torch.inf)
    total = torch.logsumexp(torch.where(is_empty[:, None], 0, terms), 1)
    return torch.where(is_empty, -torch.inf, total)


def _softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x); 0, with derivative 0, for -inf."""
    is_empty = x == -torch.inf
    return torch.where(is_empty, 0, -F.logsigmoid(-torch.where(is_empty, 0, x)))


def nt_xent(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float | Tensor = 0.07,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    indices_tuple: IndicesTuple | None = None,
) -> Tensor:
    """The NTXent loss of each positive pair [M], by query, then by key; a pair that was mined twice occurs twice.

    embeddings: [Q, D]. labels: [Q] integer. ref_emb: [N, D], ref_labels: [N] integer; None takes the queries, without
    the pairs of a row with itself. A query without a negative has a loss of 0.
    """
    s, positive, negative = pairs(embeddings, labels, ref_emb, ref_labels, indices_tuple)
    logits = s / temperature
    above = _log_sum_exp(logits, negative)
    query, key = positive.nonzero(as_tuple=True)
    losses = _softplus(above[query] - logits[query, key])
    return losses.repeat_interleave(positive[query, key])


def sup_con(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float | Tensor = 0.1,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    indices_tuple: IndicesTuple | None = None,
) -> Tensor:
    """The SupCon loss of each query [Q]; 0 without a positive, and for all where the batch has no negative pair.

    Arguments as for `nt_xent`; a pair that was mined twice counts once.
    """
    s, positive, negative = pairs(embeddings, labels, ref_emb, ref_labels, indices_tuple)
    logits = s / temperature
    is_positive, is_counted = positive > 0, positive + negative > 0
    total = _log_sum_exp(logits, is_counted)
    log_probability = torch.where(is_positive, logits - torch.where(is_positive.any(1), total, 0)[:, None], 0)
    losses = -log_probability.sum(1) / is_positive.sum(1).clamp(min=1)
    return losses * negative.bool().any()


def multi_similarity(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    alpha: float = 2,
    beta: float = 50,
    base: float = 0.5,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    indices_tuple: IndicesTuple | None = None,
) -> Tensor:
    """The multi-similarity loss of each query [Q]. Arguments as for `sup_con`."""
    s, positive, negative = pairs(embeddings, labels, ref_emb, ref_labels, indices_tuple)
    attraction = _softplus(_log_sum_exp(-alpha * (s - base), positive.bool()))
    repulsion = _softplus(_log_sum_exp(beta * (s - base), negative.bool()))
    return attraction / alpha + repulsion / beta


def circle(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    m: float = 0.4,
    gamma: float = 80,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    indices_tuple: IndicesTuple | None = None,
) -> Tensor:
    """The circle loss of each query [Q]; 0 without a positive or without a negative. Arguments as for `sup_con`.

    The factors of both exponents are constants for the gradient, as in the paper.
    """
    s, positive, negative = pairs(embeddings, labels, ref_emb, ref_labels, indices_tuple)
    attraction = -gamma * torch.relu(1 + m - s.detach()) * (s - (1 - m))
    repulsion = gamma * torch.relu(s.detach() + m) * (s - m)
    return _softplus(_log_sum_exp(attraction, positive.bool()) + _log_sum_exp(repulsion, negative.bool()))


def info_nce(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float | Tensor = 0.05,
    positives: str = "mean",
    label_smoothing: float = 0.0,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The InfoNCE loss of each query [Q], 0 where it has no positive, and whether it has one [Q] bool.

    positives: of several, the mean of their losses ("mean"), or one loss whose logarithm holds their sum ("sum").
    label_smoothing: the share of the loss of all keys, of each the same. Only for "mean".
    Without labels query i belongs to key i of `ref_emb`. Other arguments as for `nt_xent`. The other direction is that
    with keys and queries exchanged.
    """
    if labels is None:
        assert ref_emb is not None
        labels = torch.arange(len(embeddings), device=embeddings.device)
        ref_labels = torch.arange(len(ref_emb), device=embeddings.device)
    s, positive, negative = pairs(embeddings, labels, ref_emb, ref_labels, None)
    logits = s / temperature
    is_positive = positive.bool()
    is_query = is_positive.any(1)
    total = _log_sum_exp(logits, positive + negative)
    if positives == "mean":
        chosen = torch.where(is_positive, logits, 0).sum(1) / is_positive.sum(1).clamp(min=1)
        is_key = positive + negative > 0
        uniform = torch.where(is_key, logits, 0).sum(1) / is_key.sum(1).clamp(min=1)
        chosen = (1 - label_smoothing) * chosen + label_smoothing * uniform
    else:
        chosen = _log_sum_exp(logits, is_positive)
    return torch.where(
        is_query, torch.where(is_query, total, 0) - torch.where(is_query, chosen, 0), 0
    ), is_query
