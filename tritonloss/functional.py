"""The losses as stateless functions, in the manner of `torch.nn.functional`."""

from tritonloss.losses.circle import circle_loss
from tritonloss.losses.fastap import fastap_loss
from tritonloss.losses.histogram import histogram_loss
from tritonloss.losses.infonce import info_nce_loss
from tritonloss.losses.multi_similarity import multi_similarity_loss
from tritonloss.losses.ntxent import nt_xent_loss
from tritonloss.losses.pnp import pnp_loss
from tritonloss.losses.proxy_anchor import proxy_anchor_loss
from tritonloss.losses.recall_at_k import recall_at_k_loss
from tritonloss.losses.smoothap import smooth_ap_loss
from tritonloss.losses.soprc import soprc_loss, soprc_scores_loss
from tritonloss.losses.soprc_pieces import exact_prior, interpolate_scores, scaled_prior
from tritonloss.losses.sup_ap import sup_ap_loss
from tritonloss.losses.supcon import sup_con_loss
from tritonloss.losses.triplet_margin import triplet_margin_loss

__all__ = [
    "circle_loss",
    "exact_prior",
    "fastap_loss",
    "histogram_loss",
    "info_nce_loss",
    "interpolate_scores",
    "multi_similarity_loss",
    "nt_xent_loss",
    "pnp_loss",
    "proxy_anchor_loss",
    "recall_at_k_loss",
    "scaled_prior",
    "smooth_ap_loss",
    "soprc_loss",
    "soprc_scores_loss",
    "sup_ap_loss",
    "sup_con_loss",
    "triplet_margin_loss",
]
