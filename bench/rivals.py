"""What others would write: the comparisons of the benchmark. Only those named `pml_` need pytorch-metric-learning."""

import importlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def pnp_dense(embeddings: Tensor, labels: Tensor) -> Tensor:
    """PNP-O as pytorch-metric-learning goes about it: the N x N x N cube of differences. Every row needs a positive."""
    rows = F.normalize(embeddings, dim=1)
    similarity = rows @ rows.T
    same = labels[:, None] == labels
    above = torch.sigmoid((similarity[:, None, :] - similarity[:, :, None]) / 0.01)
    ranks = (above * ~same[:, None, :]).sum(2)
    return ((ranks * same).sum(1) / same.sum(1)).mean()


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


def pml(loss: str, *arguments: Any, **options: Any) -> torch.nn.Module:
    """A criterion of pytorch-metric-learning, which need not be installed for the other rivals."""
    return getattr(importlib.import_module("pytorch_metric_learning.losses"), loss)(*arguments, **options)


def pml_proxy_anchor(n_classes: int, dimension: int) -> torch.nn.Module:
    return pml("ProxyAnchorLoss", n_classes, dimension)


def proxy_anchor_dense(embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
    """ProxyAnchor with margin 0.1 and alpha 32 in plain torch, as pytorch-metric-learning goes about it."""
    similarity = F.normalize(embeddings, dim=1) @ F.normalize(proxies, dim=1).T
    is_own = labels[:, None] == torch.arange(len(proxies), device=labels.device)
    one = similarity.new_zeros(1, len(proxies))
    positive = (-32 * (similarity - 0.1)).masked_fill(~is_own, -torch.inf)
    negative = (32 * (similarity + 0.1)).masked_fill(is_own, -torch.inf)
    positive, negative = (torch.logsumexp(torch.cat([one, x]), 0) for x in (positive, negative))
    return positive.sum() / is_own.any(0).sum() + negative.mean()


class ProxyAnchorDense(torch.nn.Module):
    """`proxy_anchor_dense` with its proxies, eager or under torch.compile."""

    def __init__(self, n_classes: int, dimension: int, compiled: bool) -> None:
        super().__init__()
        self.proxies = torch.nn.Parameter(torch.empty(n_classes, dimension))
        self.loss = torch.compile(proxy_anchor_dense, dynamic=False) if compiled else proxy_anchor_dense

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.loss(embeddings, labels, self.proxies)


def pml_smooth_ap() -> torch.nn.Module:
    return pml("SmoothAPLoss")


def smooth_ap_dense(embeddings: Tensor, labels: Tensor) -> Tensor:
    """SmoothAP with the N x N x N cube of differences, in plain torch. Every row needs a positive."""
    rows = F.normalize(embeddings, dim=1)
    similarity = rows @ rows.T
    same = labels[:, None] == labels
    steps = torch.sigmoid((similarity[:, None, :] - similarity[:, :, None]) / 0.01)
    # A positive stands 1/2 above itself: with another 1/2 it counts itself once.
    among = (steps * same[:, None, :]).sum(2) + 0.5
    precision = among / (among + (steps * ~same[:, None, :]).sum(2))
    return 1 - ((precision * same).sum(1) / same.sum(1)).mean()


def smooth_ap_gathered(embeddings: Tensor, labels: Tensor) -> Tensor:
    """SmoothAP in plain torch with the positives of each query gathered: a [N, 4, N] tensor.

    Labels must come in runs of four, so that no search for the positives is timed.
    """
    rows = F.normalize(embeddings, dim=1)
    n = embeddings.shape[0]
    similarity = rows @ rows.T
    first = torch.arange(n, device=rows.device) // 4 * 4
    positive = similarity.gather(1, first[:, None] + torch.arange(4, device=rows.device))
    steps = torch.sigmoid((similarity[:, None, :] - positive[:, :, None]) / 0.01)
    is_positive = (labels[:, None] == labels)[:, None, :]
    # A positive stands 1/2 above itself: with another 1/2 it counts itself once.
    among = (steps * is_positive).sum(2) + 0.5
    return 1 - (among / (among + (steps * ~is_positive).sum(2))).mean()


class SOPRCGathered(torch.nn.Module):
    """SOPRC as its authors go about it, for labels in runs of four: a [N, 3, N - 4] tensor of pairs, no Eq. 9.

    Written from the equations; prior 0.1, tau 0.1 and 0.001, beta 0.1, 100 remembered scores, midpoint grid.
    """

    memory: Tensor

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(n_classes, 100))
        self.is_first = True

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        rows = F.normalize(embeddings, dim=1)
        n = embeddings.shape[0]
        similarity = rows @ rows.T
        same = labels[:, None] == labels
        positive = similarity[same & ~torch.eye(n, dtype=torch.bool, device=rows.device)].view(n, 3)
        negative = similarity[~same].view(n, n - 4)
        tpr = self.true_positive_rate(positive.detach())
        x = (positive[:, :, None] - negative[:, None, :]) / 0.1
        fpr = torch.where(x < 0, 1 - 2 * x, torch.where(x < 1, (1 - x) ** 2, 0)).mean(2)
        return (0.9 * fpr / (0.9 * fpr + 0.1 * tpr)).mean()

    @torch.no_grad()
    def true_positive_rate(self, positive: Tensor) -> Tensor:
        """Moves the memory, then T of every pair [N, 3]."""
        s = positive.sort(1).values
        low = (2 * s[:, :1] - s[:, 1:2]).clamp(min=-1)
        high = (2 * s[:, 2:] - s[:, 1:2]).clamp(max=1)
        knots = torch.cat([low, s, high], 1)
        place = (torch.arange(100, device=s.device) + 0.5) * 3 / 100
        k = place.long()
        a = place - k
        phi = ((1 - a) * knots[:, k] + knots[:, k + 1] + a * knots[:, k + 2]) / 2
        target = phi.view(-1, 4, 100).mean(1)
        self.memory.copy_(target if self.is_first else torch.lerp(self.memory, target, 0.1))
        self.is_first = False
        x = positive.view(-1, 12)[:, :, None] - self.memory[:, None, :]
        above = torch.tanh((-x / 0.002).clamp(min=0)).sum(2)
        return ((1 + above) / 101).view(-1, 3)


def histogram_dense(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The histogram loss in plain torch, 100 bins: all pairs of the similarity matrix, scattered to their nodes."""
    rows = F.normalize(embeddings, dim=1)
    n = embeddings.shape[0]
    left, right = torch.triu_indices(n, n, 1, device=rows.device)
    place = (rows @ rows.T)[left, right].clamp(-1, 1) * 50 + 50
    node = place.detach().long().clamp(max=99)
    upper, same = place - node, labels[left] == labels[right]

    def density(kind: Tensor) -> Tensor:
        masses = place.new_zeros(101).index_add(0, node[kind], 1 - upper[kind])
        return masses.index_add(0, node[kind] + 1, upper[kind]) / kind.sum()

    return (density(~same) * density(same).cumsum(0)).sum()


def fastap_dense(embeddings: Tensor, labels: Tensor) -> Tensor:
    """FastAP in plain torch, 10 bins: one N x N tensor for each node. Every row must have a positive."""
    rows = F.normalize(embeddings, dim=1)
    place = (2 - 2 * rows @ rows.T).clamp(0, 4) * 2.5
    others = ~torch.eye(len(labels), dtype=torch.bool, device=rows.device)
    positive = (labels[:, None] == labels) & others
    masses = [(1 - (place - node).abs()).clamp(min=0) for node in range(11)]
    hits = torch.stack([(mass * positive).sum(1) for mass in masses], 1)
    retrieved = torch.stack([(mass * others).sum(1) for mass in masses], 1).cumsum(1)
    precision = hits * hits.cumsum(1) / retrieved.clamp(min=1e-30)
    return (1 - precision.sum(1) / positive.sum(1)).mean()


def pml_histogram() -> torch.nn.Module:
    return pml("HistogramLoss", n_bins=100)


def pml_fastap() -> torch.nn.Module:
    return pml("FastAPLoss")


def info_nce_dense(queries: Tensor, keys: Tensor) -> Tensor:
    """InfoNCE in both directions at temperature 0.05, as torch users write it: the N x N logits, twice."""
    logits = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T / 0.05
    target = torch.arange(len(queries), device=queries.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def info_nce_linear(queries: Tensor, keys: Tensor) -> Tensor:
    """The same with the chunks of torch 2.13, which hold no N x N tensor."""
    queries, keys = F.normalize(queries, dim=1) / 0.05, F.normalize(keys, dim=1)
    target = torch.arange(len(queries), device=queries.device)
    options = torch.nn.LinearCrossEntropyOptions()
    forward = F.linear_cross_entropy(queries, keys, target, options=options)
    return (forward + F.linear_cross_entropy(keys, queries, target, options=options)) / 2


def _of_each_query(embeddings: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    """The differences of all rows from the positives [N, P], which rows are positives [N], and the query.

    As published code of losses of ranks does it: one query after the other.
    """
    rows = F.normalize(embeddings, dim=1)
    for query in range(len(rows)):
        scores = rows @ rows[query]
        is_positive = labels == labels[query]
        yield scores[:, None] - scores[is_positive], is_positive, query


def recall_at_k_loop(embeddings: Tensor, labels: Tensor) -> Tensor:
    """RecallAtK of its defaults, one query after the other."""
    terms = []
    for difference, is_positive, query in _of_each_query(embeddings, labels):
        members = is_positive.nonzero().squeeze(1)
        counts = torch.ones_like(difference)
        counts[members, torch.arange(len(members), device=members.device)] = 0
        counts[query] = 0
        rank = (1 + (torch.sigmoid(difference / 0.01) * counts).sum(0))[members != query]
        hits = [torch.sigmoid(k - rank).sum().clamp(max=k) / min(k, len(rank)) for k in (1, 2, 4, 8)]
        terms.append(1 - torch.stack(hits).mean())
    return torch.stack(terms).mean()


def sup_ap_loop(embeddings: Tensor, labels: Tensor) -> Tensor:
    """SupAP of its defaults, one query after the other."""
    terms = []
    for difference, is_positive, _ in _of_each_query(embeddings, labels):
        sigmoid = torch.sigmoid(difference / 0.01)
        step = torch.where(difference > 0, 0.5 + sigmoid, sigmoid)
        height = 0.5 + 1 / (1 + math.exp(-5))
        step = torch.where(difference > 0.05, height + 100 * (difference - 0.05), step)
        own = 1 + (difference[is_positive] > 0).sum(0)
        above = step[~is_positive].sum(0)
        terms.append((above / (own + above)).mean())
    return torch.stack(terms).mean()
