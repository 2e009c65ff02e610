"""The semi-variance of the scores: positives below their mean and negatives above theirs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from tritonloss import reference
from tritonloss.backends import selected_backend
from tritonloss.layout import ClassLayout
from tritonloss.losses.base import (
    check_bounds,
    check_choice,
    check_embeddings,
    check_labels,
    check_products,
    full_precision,
    output_dtype,
)
from tritonloss.ops import Deviation, Panels, SemiVariance, negative_targets, semi_variance_total
from tritonloss.types import ProductMode, upcast

Normalize: TypeAlias = Literal["count_all", "selected"]


class SemiVarianceRegularizer(nn.Module):
    """Draw positive scores that are below their mean, and negative scores that are above theirs, to the mean.

        L_var = w_1 / n_+ * sum over positive pairs with h < mu_+ of (mu_+ - h)^2
              + w_2 / n_- * sum over negative pairs with h > mu_- of (h - mu_-)^2

    The means mu and the sums pool the pairs of all queries of the batch that have a positive and a negative. It is
    added to a SOPRC loss by `SOPRCLoss(w_var=...)` and may be added to any other loss by hand; it needs labels, so it
    is no `embedding_regularizer`.

    `regularizer(embeddings, labels)` takes embeddings [N, D] of any floating dtype, normalised here, and labels [N]:
    h is the cosine similarity, every row a query, itself never its positive. `regularizer(scores, targets)` takes
    scores [B] with targets [B], or [B, C] with targets [B, C] (each column is a query), above 0 where positive.
    `regularizer(scores, positives=..., negatives=...)` takes scores [Q, N] and two bool masks [Q, N].

    Args:
        weights: (w_1, w_2), >= 0; lambda of the paper.
        normalize: n is "count_all", the number of all such pairs, as in the paper; or "selected", the number of pairs
            in the sum, as in the authors' code, about twice the value.
        detach_mean: take the means as constants. Without it, as in the paper and the code, the gradient also passes
            through them: a negative below the mean is drawn up to it.
        max_class_size: a bound of the class sizes in place of the one host sync of the first form.
        memory_budget: bytes that similarities may take at a time; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU
            and a sixteenth of the device's memory on CUDA.
        products: how rows are multiplied, "auto", "ieee" or "split"; default TRITONLOSS_PRODUCTS, else "auto": see
            `tritonloss.ops.products`. Results of both have the precision of float32.

    Returns:
        Scalar in the dtype of the input (float32 inside autocast), 0 where no query has a positive and a negative.

    Time O(N^2 D), memory O(memory_budget + N D) with embeddings. O(Q N) of both with scores.

    Raises:
        TypeError, ValueError: as the losses for embeddings and labels; scores, targets or masks whose shapes, dtypes
            or devices do not fit; an unknown `normalize`; a weight below 0; a bound that is no int or below 1.

    Source: Wen et al., Exploring the Algorithm-Dependent Generalization of AUPRC Optimization with List Stability,
    NeurIPS 2022, Eq. 9.
    """

    def __init__(
        self,
        weights: Sequence[float] = (1.0, 5.0),
        *,
        normalize: Normalize = "count_all",
        detach_mean: bool = False,
        max_class_size: int | None = None,
        memory_budget: int | None = None,
        products: ProductMode | None = None,
    ) -> None:
        super().__init__()
        if len(weights) != 2 or not all(weight >= 0 for weight in weights):
            raise ValueError(f"weights must be two numbers of at least 0, got {tuple(weights)}")
        check_choice("normalize", normalize, Normalize)
        check_products(products)
        self.max_class_size, self.memory_budget = check_bounds(
            max_class_size=max_class_size, memory_budget=memory_budget
        )
        self.products = products
        self.weights = (float(weights[0]), float(weights[1]))
        self.normalize, self.detach_mean = normalize, detach_mean

    if TYPE_CHECKING:

        def __call__(
            self,
            inputs: Tensor,
            labels: Tensor | None = None,
            *,
            positives: Tensor | None = None,
            negatives: Tensor | None = None,
        ) -> Tensor: ...

    def forward(
        self,
        inputs: Tensor,
        labels: Tensor | None = None,
        *,
        positives: Tensor | None = None,
        negatives: Tensor | None = None,
    ) -> Tensor:
        with full_precision(inputs):
            if is_embeddings(inputs, labels):
                assert labels is not None
                check_embeddings(inputs, "embeddings")
                check_labels(labels, inputs, "labels")
                penalty = self.of_embeddings(inputs, labels)
            else:
                penalty = self.of_scores(*score_matrix(inputs, labels, positives, negatives))
        return penalty.to(output_dtype(inputs))

    def of_embeddings(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The penalty, in float32 or float64, for checked arguments."""
        if selected_backend() == "reference":
            return self.of_scores(*reference.similarity(upcast(embeddings), labels))
        layout = ClassLayout.from_labels(labels)
        return self.of_layout(embeddings, layout, layout.query_count, None)

    def of_layout(
        self, embeddings: Tensor, layout: ClassLayout, count: Tensor, panels: Panels | None
    ) -> Tensor:
        """The same for a layout that is known; count: [N], 0 for a row that is no query. panels: of these ranges."""
        bounds = self.max_class_size, self.memory_budget
        deviation = Deviation(*bounds, True, layout.order, self.detach_mean, self.products)
        return semi_variance_total(
            embeddings,
            layout.start,
            count,
            self._factors,
            deviation,
            panels=panels,
            known=self.normalize == "count_all",
        )

    def of_scores(self, scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """The same for scores [Q, N] and bool masks [Q, N]."""
        is_query = (positives.any(1) & negatives.any(1))[:, None]
        squares, selected, n_pairs = [], [], []
        for mask, sign in ((positives & is_query, -1), (negatives & is_query, 1)):
            n = mask.sum()
            level = torch.where(mask, scores, 0).sum() / n.clamp(min=1)
            level = level.detach() if self.detach_mean else level
            deviation = torch.where(mask, sign * (scores - level), 0).clamp(min=0)
            squares.append(deviation.square().sum())
            selected.append((deviation > 0).sum())
            n_pairs.append(n)
        sums = SemiVariance(torch.stack(squares), torch.stack(selected), torch.stack(n_pairs))
        return torch.dot(sums.squares, self._factors(sums))

    def _factors(self, sums: SemiVariance) -> Tensor:
        """Of the squares [2]: the weights over the numbers of pairs; 0 where all rows are of one class."""
        n = (sums.pairs if self.normalize == "count_all" else sums.selected).clamp(min=1)
        positive, negative = (sums.pairs[1] > 0).to(sums.squares.dtype) / n
        return torch.stack([self.weights[0] * positive, self.weights[1] * negative]).to(sums.squares.dtype)

    def extra_repr(self) -> str:
        return f"weights={self.weights}, normalize={self.normalize!r}, detach_mean={self.detach_mean}"


def is_embeddings(inputs: Any, labels: Any) -> bool:
    """Whether the call is (embeddings [N, D], labels [N]); an error for (scores [B, 1], targets [B])."""
    if not (
        isinstance(inputs, Tensor) and isinstance(labels, Tensor) and (inputs.ndim, labels.ndim) == (2, 1)
    ):
        return False
    if inputs.shape[1] == 1:
        raise ValueError(
            f"expected scores [B] with targets [B], or [B, 1] with [B, 1], got {list(inputs.shape)} with "
            f"{list(labels.shape)}: take scores.squeeze(1)"
        )
    return True


def score_matrix(
    scores: Any, targets: Any, positives: Any, negatives: Any, *, check: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [Q, N] in float32 or float64, positives and negatives [Q, N] bool, of any of the forms with scores.

    check: refuse targets that are NaN, at the cost of a host sync; otherwise they are neither.
    """
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise TypeError(f"scores must be a floating tensor, got {getattr(scores, 'dtype', type(scores))}")
    if targets is None:
        return _masked_matrix(scores, positives, negatives)
    if positives is not None or negatives is not None:
        raise ValueError("targets were given together with positives or negatives: expected one of the two")
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets must be a tensor, got {type(targets).__name__}")
    if targets.shape != scores.shape or scores.ndim not in (1, 2):
        raise ValueError(
            "expected embeddings [N, D] with labels [N], scores [B] with targets [B], or scores [B, C] with "
            f"targets [B, C], got {list(scores.shape)} with {list(targets.shape)}"
        )
    if targets.device != scores.device:
        raise ValueError(f"targets must be on {scores.device} like the scores, got {targets.device}")
    is_positive, is_negative = targets > 0, targets <= 0
    if targets.is_floating_point():
        is_negative = negative_targets(targets, check=check)
    if scores.ndim == 1:
        return upcast(scores)[None], is_positive[None], is_negative[None]
    return upcast(scores).T, is_positive.T, is_negative.T


def _masked_matrix(scores: Tensor, positives: Any, negatives: Any) -> tuple[Tensor, Tensor, Tensor]:
    if positives is None or negatives is None:
        raise ValueError("expected labels, or both masks positives and negatives")
    if scores.ndim != 2:
        raise ValueError(f"scores with masks must have shape [Q, N], got {list(scores.shape)}")
    for name, mask in (("positives", positives), ("negatives", negatives)):
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"{name} must be a bool tensor, got {getattr(mask, 'dtype', type(mask))}")
        if mask.shape != scores.shape or mask.device != scores.device:
            raise ValueError(
                f"{name} must have shape {list(scores.shape)} on {scores.device} like the scores, "
                f"got {list(mask.shape)} on {mask.device}"
            )
    return upcast(scores), positives, negatives & ~positives
