"""Scores that are Euclidean distances of unit rows, made of the products of a panel."""

from torch import Tensor

from tritonloss.ops.sources import Products
from tritonloss.ops.streaming import empty_scores


class EuclideanScores:
    """-|q - k| / unit of rows of norm 1, in the place of `Products` of scale 1: |q - k|^2 = 2 - 2 q.k.

    The rounding of the product makes an error of a few 2^-24 in the square (2^-53 in float64), so that two equal rows
    may be 5e-4 apart in float32. Where the distance is 0, its derivative is 0.
    """

    def __init__(self, products: Products, unit: float, height: int, need: bool) -> None:
        self.products, self.unit, self.need = products, unit, need
        self.scratch = products.scratch
        self.slope = empty_scores(height if need else 0, self.scratch.shape[1], self.scratch)

    def scores(self, rows: slice) -> Tensor:
        """[rows, N], in memory that the next panel takes."""
        distance = self.products.scores(rows).mul_(-2).add_(2).clamp_(min=0).sqrt_().mul_(1 / self.unit)
        if self.need:
            slope = self.slope[: distance.shape[0]].copy_(distance)
            slope.reciprocal_().mul_(self.unit**-2).masked_fill_(distance == 0, 0)
        return distance.neg_()

    def gradient(self, rows: slice) -> Tensor:
        """Memory for the gradient of the scores of a panel."""
        return self.products.gradient(rows)

    def add(self, rows: slice, grad: Tensor) -> None:
        """Add what the gradient of the scores of the last panel gives to the gradients of the operands."""
        self.products.add(rows, grad.mul_(self.slope[: grad.shape[0]]))

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Those of queries and keys as they were given; empty where not needed."""
        return self.products.gradients()
