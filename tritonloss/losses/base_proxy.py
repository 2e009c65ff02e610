"""What every loss with one learnable vector per class shares."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tritonloss.losses.base import (
    BaseMetricLossFunction,
    check_count,
    check_embeddings,
    full_precision,
    output_dtype,
)
from tritonloss.regularizers import apply_regularizer
from tritonloss.types import IndicesTuple, LossDict, upcast


class BaseProxyLoss(BaseMetricLossFunction):
    """Base of the losses that compare embeddings with learnable vectors, the proxies.

    `weight` [num_weights, embedding_size] is a parameter: give `loss.parameters()` to an optimizer, and move it with
    `loss.to(device, dtype)`; no loss moves or casts it. A subclass defines `compute_loss`, which gets embeddings that
    fit `weight` (see `match_proxies`), and `default_weight_init` where it needs another.

    Args:
        num_weights: number of proxies, C.
        embedding_size: D.
        weight_regularizer: called on `weight`, returns a scalar.
        weight_reg_weight: factor of that scalar, which is added after the reduction.
        weight_init_func: fills `weight` in place; None for `default_weight_init`.
        **options: `distance`, `reducer`, `embedding_regularizer`, `embedding_reg_weight`, as for
            `BaseMetricLossFunction`.

    Raises:
        TypeError: an unknown option, a num_weights or embedding_size that is no int, a weight_regularizer or
            weight_init_func that cannot be called.
        ValueError: num_weights or embedding_size below 1.
    """

    def __init__(
        self,
        num_weights: int,
        embedding_size: int,
        *,
        weight_regularizer: Callable[[Tensor], Tensor] | None = None,
        weight_reg_weight: float = 1.0,
        weight_init_func: Callable[[Tensor], object] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        for name, option in (
            ("weight_regularizer", weight_regularizer),
            ("weight_init_func", weight_init_func),
        ):
            if option is not None and not callable(option):
                raise TypeError(f"{name} must be callable or None, got {type(option).__name__}")
        num_weights = check_count("num_weights", num_weights)
        embedding_size = check_count("embedding_size", embedding_size)
        self.weight_regularizer = weight_regularizer
        self.weight_reg_weight = weight_reg_weight
        self.weight = nn.Parameter(torch.empty(num_weights, embedding_size))
        initialise = self.default_weight_init if weight_init_func is None else weight_init_func
        initialise(self.weight)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "proxies":
            raise AttributeError(
                f"{type(self).__name__} has no proxies, as in pytorch-metric-learning 2: its parameter is `weight`"
            )
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}proxies" in state_dict and f"{prefix}weight" not in state_dict:
            error_msgs = rest[-1]
            error_msgs.append(
                f"{prefix}proxies is the parameter of pytorch-metric-learning 2: convert the state dict with "
                f"{type(self).__name__}.convert_pml_state_dict(state_dict{f', prefix={prefix!r}' if prefix else ''})"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def default_weight_init(self, weight: Tensor) -> None:
        """Fill `weight` in place."""
        nn.init.normal_(weight)

    def objective_terms(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> LossDict:
        # Here, because compute_loss runs outside autocast, where dtypes that differ are an error.
        check_embeddings(embeddings, "embeddings")
        embeddings = match_proxies(embeddings, self.weight)
        return super().objective_terms(embeddings, labels, indices_tuple, ref_emb, ref_labels)

    def regularization_terms(self, embeddings: Tensor) -> LossDict:
        terms = super().regularization_terms(embeddings)
        if self.weight_regularizer is not None:
            penalty = apply_regularizer(self.weight_regularizer, self.weight) * self.weight_reg_weight
            terms["weight_reg_loss"] = {"losses": penalty, "indices": None}
        return terms

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """The similarity, or distance, of every embedding to every proxy: what a classifier ranks.

        Args:
            embeddings: [N, D], any floating dtype that `forward` accepts.

        Returns:
            [N, C], in the dtype that `forward` returns. Time O(N C D).

        Raises:
            TypeError: embeddings that are not floating.
            ValueError: another shape, dtype or device than those of `weight`, as for `forward`.
        """
        check_embeddings(embeddings, "embeddings")
        rows = upcast(match_proxies(embeddings, self.weight))
        with full_precision(embeddings):
            logits = self.distance(rows, self.weight.to(rows.dtype))
        return logits.to(output_dtype(embeddings))

    @staticmethod
    def convert_pml_state_dict(state_dict: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """A state dict of pytorch-metric-learning 2's proxy losses with its key `proxies` renamed to `weight`.

        `loss.load_state_dict(loss.convert_pml_state_dict(torch.load(path)))`. In the state dict of a larger module,
        `prefix` is the path of the loss in it, such as "criterion.". The other keys and the order are kept; the
        argument is not changed. Raises KeyError where there is no such key.
        """
        old = f"{prefix}proxies"
        if old not in state_dict:
            raise KeyError(f"no {old!r} in the state dict: its keys are {', '.join(state_dict) or 'none'}")
        return {f"{prefix}weight" if key == old else key: value for key, value in state_dict.items()}


def match_proxies(embeddings: Tensor, proxies: Any) -> Tensor:
    """The embeddings in the dtype they are compared with the proxies in.

    Inside autocast they are cast up to the dtype of the proxies. Outside, dtypes that differ are an error, as are
    devices and widths that differ, everywhere: nothing is moved or cast silently.
    """
    if not isinstance(proxies, Tensor) or proxies.ndim != 2:
        got = f"shape {list(proxies.shape)}" if isinstance(proxies, Tensor) else type(proxies).__name__
        raise ValueError(
            f"weight, the proxies, must be a tensor [num_classes, embedding_size], got {got}: what a sharding wrapper "
            "keeps in parts must be gathered first"
        )
    if embeddings.shape[1] != proxies.shape[1]:
        raise ValueError(
            f"embeddings must have shape [N, {proxies.shape[1]}] like the proxies, got {list(embeddings.shape)}"
        )
    if embeddings.device != proxies.device:
        raise ValueError(
            f"the proxies are on {proxies.device}, the embeddings on {embeddings.device}: move the loss with loss.to()"
        )
    if torch.is_autocast_enabled(embeddings.device.type):
        return embeddings.to(torch.promote_types(embeddings.dtype, proxies.dtype))
    if embeddings.dtype != proxies.dtype:
        raise ValueError(
            f"the proxies have dtype {proxies.dtype}, the embeddings {embeddings.dtype}: outside autocast they must be "
            "equal; cast the loss with loss.to()"
        )
    return embeddings
