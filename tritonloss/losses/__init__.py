"""One file per loss: its stateless function and its module."""

from tritonloss.losses.base import BaseMetricLossFunction, PerQueryLoss
from tritonloss.losses.base_proxy import BaseProxyLoss
from tritonloss.losses.fastap import FastAPLoss
from tritonloss.losses.histogram import HistogramLoss
from tritonloss.losses.pnp import PNPLoss
from tritonloss.losses.proxy_anchor import ProxyAnchorLoss
from tritonloss.losses.ranking import RankingLoss
from tritonloss.losses.semi_variance import SemiVarianceRegularizer
from tritonloss.losses.smoothap import SmoothAPLoss
from tritonloss.losses.soprc import SOPRCLoss

__all__ = [
    "BaseMetricLossFunction",
    "BaseProxyLoss",
    "FastAPLoss",
    "HistogramLoss",
    "PNPLoss",
    "PerQueryLoss",
    "ProxyAnchorLoss",
    "RankingLoss",
    "SOPRCLoss",
    "SemiVarianceRegularizer",
    "SmoothAPLoss",
]
