"""One file per loss: its stateless function and its module."""

from typing import TYPE_CHECKING

from tritonloss.absent import attributes_of
from tritonloss.losses.base import BaseMetricLossFunction, PerQueryLoss
from tritonloss.losses.base_proxy import BaseProxyLoss
from tritonloss.losses.circle import CircleLoss
from tritonloss.losses.fastap import FastAPLoss
from tritonloss.losses.histogram import HistogramLoss
from tritonloss.losses.infonce import InfoNCELoss
from tritonloss.losses.multi_similarity import MultiSimilarityLoss
from tritonloss.losses.ntxent import NTXentLoss
from tritonloss.losses.pairwise import PairLoss
from tritonloss.losses.pnp import PNPLoss
from tritonloss.losses.proxy_anchor import ProxyAnchorLoss
from tritonloss.losses.ranking import RankingLoss
from tritonloss.losses.recall_at_k import RecallAtKLoss
from tritonloss.losses.semi_variance import SemiVarianceRegularizer
from tritonloss.losses.smoothap import SmoothAPLoss
from tritonloss.losses.soprc import SOPRCLoss
from tritonloss.losses.sup_ap import SupAPLoss
from tritonloss.losses.supcon import SupConLoss
from tritonloss.losses.triplet_margin import TripletMarginLoss

__all__ = [
    "BaseMetricLossFunction",
    "BaseProxyLoss",
    "CircleLoss",
    "FastAPLoss",
    "HistogramLoss",
    "InfoNCELoss",
    "MultiSimilarityLoss",
    "NTXentLoss",
    "PNPLoss",
    "PairLoss",
    "PerQueryLoss",
    "ProxyAnchorLoss",
    "RankingLoss",
    "RecallAtKLoss",
    "SOPRCLoss",
    "SemiVarianceRegularizer",
    "SmoothAPLoss",
    "SupAPLoss",
    "SupConLoss",
    "TripletMarginLoss",
]

if not TYPE_CHECKING:
    __getattr__ = attributes_of(__name__, __all__)
