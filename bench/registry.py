"""Every loss, and what tests and measurements of all of them must know about it. A new loss is one entry of LOSSES.

The tests, the benchmarks, the check on a GPU, the distributed measurements and the tables of the guide follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tritonloss import losses


@dataclass(frozen=True)
class LossCase:
    """A loss as `criterion(embeddings, labels)`.

    build: the module for labels 0 .. n_classes - 1 and rows of `dim` numbers; further options go to the loss.
    opaque_labels: any label values will do; else they must be in 0 .. n_classes - 1.
    needs_pair: 0, with a gradient of 0, where no row has another of its class.
    host_syncs: how often a call on the Triton path waits for the device.
    bounded: the options with which it never does, for classes of up to 9 rows; None if there are none.
    regularized: takes `embedding_regularizer`.
    twice: has a second derivative under use_backend("reference").
    references: takes `ref_emb`.
    interpreted: whether the tests of every loss run its kernels under the interpreter too, not on a GPU alone.
    measured: the options with which it is timed, where these are not those of the tests.
    per_proxy: compares rows with the proxies of classes, whose number is a size of its own.
    """

    build: Callable[..., nn.Module]
    opaque_labels: bool = True
    needs_pair: bool = True
    host_syncs: int = 1
    bounded: dict[str, Any] | None = None
    regularized: bool = True
    twice: bool = True
    references: bool = False
    interpreted: bool = True
    measured: dict[str, Any] = field(default_factory=dict)
    per_proxy: bool = False

    def timed(self, n_classes: int, dim: int, **options: Any) -> nn.Module:
        """The loss as it is measured."""
        return self.build(n_classes, dim, **{**self.measured, **options})

    def module(self, n_classes: int, like: Tensor, **options: Any) -> nn.Module:
        """A new module with the same parameters each time, in the dtype and on the device of the rows."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build(n_classes, like.shape[1], **options).to(like.device, like.dtype)


LOSSES = {
    "PNPLoss": LossCase(
        lambda n_classes, dim, **options: losses.PNPLoss(**{"variant": "Ds", **options}),
        bounded={"max_class_size": 9},
        measured={"variant": "O"},
    ),
    "SmoothAPLoss": LossCase(
        lambda n_classes, dim, **options: losses.SmoothAPLoss(**options),
        bounded={"max_class_size": 9},
    ),
    "HistogramLoss": LossCase(
        lambda n_classes, dim, **options: losses.HistogramLoss(**options),
        host_syncs=0,
        bounded={},
    ),
    "FastAPLoss": LossCase(
        lambda n_classes, dim, **options: losses.FastAPLoss(**options),
        host_syncs=0,
        bounded={},
    ),
    "ProxyAnchorLoss": LossCase(
        losses.ProxyAnchorLoss,
        opaque_labels=False,
        needs_pair=False,
        bounded={"check_label_range": False},
        per_proxy=True,
    ),
    "RecallAtKLoss": LossCase(
        lambda n_classes, dim, **options: losses.RecallAtKLoss(**{"ks": (1, 2, 4), **options}),
        bounded={"max_class_size": 9},
        measured={"ks": (1, 2, 4, 8)},
    ),
    "SupAPLoss": LossCase(
        lambda n_classes, dim, **options: losses.SupAPLoss(**options),
        bounded={"max_class_size": 9},
    ),
    "TripletMarginLoss": LossCase(
        lambda n_classes, dim, **options: losses.TripletMarginLoss(**options),
        bounded={"max_class_size": 9},
        references=True,
    ),
    "SOPRCLoss": LossCase(
        lambda n_classes, dim, **options: losses.SOPRCLoss(n_classes, **{"memory_size": 8, **options}),
        opaque_labels=False,
        host_syncs=2,
        bounded={"max_class_size": 9, "check_label_range": False},
        regularized=False,
        measured={"memory_size": 100},
    ),
    # Their kernels have tests of their own, and test_logsumexp_losses.py.
    "NTXentLoss": LossCase(
        lambda n_classes, dim, **options: losses.NTXentLoss(**options),
        bounded={"max_class_size": 9},
        references=True,
        interpreted=False,
    ),
    "SupConLoss": LossCase(
        lambda n_classes, dim, **options: losses.SupConLoss(**options),
        bounded={"max_class_size": 9},
        references=True,
        interpreted=False,
    ),
    "MultiSimilarityLoss": LossCase(
        lambda n_classes, dim, **options: losses.MultiSimilarityLoss(**options),
        needs_pair=False,
        host_syncs=0,
        bounded={},
        references=True,
        interpreted=False,
    ),
    "CircleLoss": LossCase(
        lambda n_classes, dim, **options: losses.CircleLoss(**options),
        host_syncs=0,
        bounded={},
        references=True,
        interpreted=False,
    ),
    "InfoNCELoss": LossCase(
        lambda n_classes, dim, **options: losses.InfoNCELoss(**options),
        bounded={"max_class_size": 9},
        references=True,
        interpreted=False,
    ),
}


def title(name: str) -> str:
    """The name of a loss in tables."""
    return name.removesuffix("Loss")
