"""Regularizers: penalties on embeddings or proxies that are added to a loss."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tritonloss.absent import attributes_of
from tritonloss.types import upcast

_BLOCK_ELEMENTS = 1 << 22  # largest block of a similarity matrix: 16 MiB in float32


class BaseRegularizer(nn.Module):
    """Base of the regularizers: the mean over the rows of a penalty per row; 0 without rows.

    A subclass defines `penalties`. Half precision is converted to float32 first. Autocast has no effect inside.
    """

    if TYPE_CHECKING:

        def __call__(self, tensor: Tensor) -> Tensor: ...

    def forward(self, tensor: Tensor) -> Tensor:
        """The mean penalty.

        Args:
            tensor: floating tensor [N, D].

        Returns:
            Scalar, float64 for float64 input and float32 for any other.

        Raises:
            TypeError: `tensor` is not floating.
            ValueError: `tensor` is not two-dimensional.
        """
        if not tensor.is_floating_point():
            raise TypeError(f"tensor must be a floating tensor, got {tensor.dtype}")
        if tensor.ndim != 2:
            raise ValueError(
                f"tensor must have two dimensions, rows and features, got shape {list(tensor.shape)}"
            )
        with torch.autocast(tensor.device.type, enabled=False):
            return self.penalties(upcast(tensor)).sum() / max(tensor.shape[0], 1)

    def penalties(self, tensor: Tensor) -> Tensor:
        """The penalty [N] of each row of a float32 or float64 tensor [N, D]. Defined by the subclass."""
        raise NotImplementedError(f"{type(self).__name__} must define penalties")


class LpRegularizer(BaseRegularizer):
    """`||x||_p ** power` of each row. Time and memory O(N D).

    Args:
        p: order of the norm.
        power: exponent applied to it.
    """

    def __init__(self, p: float = 2, power: float = 1) -> None:
        super().__init__()
        self.p = p
        self.power = power

    def penalties(self, tensor: Tensor) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(tensor, ord=self.p, dim=1)
        return norms if self.power == 1 else norms.pow(self.power)


class ZeroMeanRegularizer(BaseRegularizer):
    """The absolute value of the sum of each row: small where the features of a row cancel. Time O(N D)."""

    def penalties(self, tensor: Tensor) -> Tensor:
        return tensor.sum(1).abs()


class CenterInvariantRegularizer(BaseRegularizer):
    """`(||x||^2 - m)^2 / 4` of each row, m being the mean of `||x||^2`: draws the rows to one norm. Time O(N D).

    Source: Wu et al., Deep Face Recognition with Center Invariant Loss, ACM Multimedia Workshops 2017.
    """

    def penalties(self, tensor: Tensor) -> Tensor:
        squared_norms = tensor.square().sum(1)
        return (squared_norms - squared_norms.mean()).square() / 4


class RegularFaceRegularizer(BaseRegularizer):
    """The cosine of each row with the most similar other row: drives class centers apart. 0 below two rows.

    The similarity matrix is walked in blocks of rows: time O(N^2 D), memory O(N D) beside one block.

    Source: Zhao et al., RegularFace: Deep Face Recognition via Exclusive Regularization, CVPR 2019.
    """

    def penalties(self, tensor: Tensor) -> Tensor:
        if tensor.shape[0] < 2:
            return tensor[:0].sum(1)
        rows = F.normalize(tensor, dim=1)
        return (rows * rows[_nearest_other(rows.detach())]).sum(1)


def apply_regularizer(regularizer: Callable[[Tensor], object], tensor: Tensor) -> Tensor:
    """The penalty that any regularizer gives to `tensor`.

    Args:
        regularizer: one of the above, one of pytorch-metric-learning's, or any callable that takes `tensor` and
            returns a scalar tensor. It is called on `tensor` as it is.
        tensor: floating tensor [N, D].

    Returns:
        Scalar, converted to float32 if it has a lower precision.

    Raises:
        TypeError: the regularizer is not callable, is a class instead of an instance, or does not return a
            scalar tensor.
    """
    if isinstance(regularizer, type):
        raise TypeError(
            f"regularizer must be callable, got the class {regularizer.__name__}: pass an instance of it"
        )
    if not callable(regularizer):
        raise TypeError(f"regularizer must be callable, got {type(regularizer).__name__}")
    penalty = regularizer(tensor)
    if not isinstance(penalty, Tensor) or penalty.ndim != 0:
        got = f"shape {list(penalty.shape)}" if isinstance(penalty, Tensor) else type(penalty).__name__
        raise TypeError(f"regularizer {type(regularizer).__name__} must return a scalar tensor, got {got}")
    return upcast(penalty)


def _nearest_other(rows: Tensor) -> Tensor:
    """For each of the normalised rows [N, D], the index of the most similar other row: [N]."""
    block = max(1, _BLOCK_ELEMENTS // rows.shape[0])
    nearest = []
    for start in range(0, rows.shape[0], block):
        similarities = rows[start : start + block] @ rows.T
        similarities.diagonal(start).fill_(-torch.inf)
        nearest.append(similarities.argmax(1))
    return torch.cat(nearest)


if not TYPE_CHECKING:
    __getattr__ = attributes_of(
        __name__,
        [
            "BaseRegularizer",
            "LpRegularizer",
            "ZeroMeanRegularizer",
            "CenterInvariantRegularizer",
            "RegularFaceRegularizer",
        ],
    )
