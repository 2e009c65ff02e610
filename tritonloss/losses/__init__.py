"""One file a loss: its stateless function and its module."""

from tritonloss.losses.base import BaseMetricLossFunction
from tritonloss.losses.pnp import PNPLoss

__all__ = ["BaseMetricLossFunction", "PNPLoss"]
