"""SmoothAP: average precision with every step of a rank replaced by a sigmoid."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tritonloss import reference
from tritonloss.backends import selected_backend
from tritonloss.distances import Distance
from tritonloss.indices import miner_weights
from tritonloss.layout import ClassLayout, segment_mean
from tritonloss.losses.base import (
    PerQueryLoss,
    check_bounds,
    check_choice,
    check_embeddings,
    check_labels,
    check_numbers,
    fraction,
    full_precision,
    mean_of_queries,
    output_dtype,
    require_cosine,
    unit_rows,
)
from tritonloss.ops import SoftRanks, rank_per_query
from tritonloss.types import PairIndices, Reduction, TripletIndices, upcast


def smooth_ap_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.01,
    reduction: Reduction = "mean",
    max_class_size: int | None = None,
    memory_budget: int | None = None,
) -> Tensor:
    """1 - average precision, each rank a sum of sigmoids (`SmoothAPLoss` without its module).

    s is the cosine similarity, G(x) = sigmoid(x / temperature). With P the rows of q's class, q included, and N those
    of the others, the loss of a query q is

        1 - mean over i in P of (1 + P_i) / (1 + P_i + N_i),
        P_i = sum over j in P, j != i, of G(s_qj - s_qi),  N_i = sum over j in N of G(s_qj - s_qi)

    and the loss is the mean over the queries whose class has another row; 0 if there is none.

    Args:
        embeddings: [N, D], any floating dtype; normalised here.
        labels: [N], any integer dtype or bool, in any order. Only equality counts.
        temperature: of the sigmoid, > 0, in units of the cosine; 0.01 in the paper.
        reduction: "mean", or "none" for the loss of each query, [N], 0 for a query without another positive.
        max_class_size: a bound of the class sizes. It replaces the call's one host sync on CUDA, so that the call can
            be captured in a CUDA graph; the device asserts it. Under torch.compile memory then grows with
            N max_class_size.
        memory_budget: bytes that similarities may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU and a
            sixteenth of the device's memory on CUDA.

    Returns:
        Scalar, or [N], in the dtype of the embeddings (float32 inside autocast). Computed in float32 or float64.

    Time O(N^2 D + N sum over classes of n^2), n the size of a class; for classes of about a hundred rows and more
    O(N^2 D + N G^2), G about 8 / temperature, with a relative error of a few 1e-6 in float32: see `soft_rank`. Memory
    O(memory_budget + N D), and the sum of n^2 under torch.compile.

    Raises:
        TypeError: embeddings that are not floating, labels that are not integers, a temperature that is no number, a
            bound that is no int.
        ValueError: an unknown reduction, a temperature that is not positive, a bound below 1, wrong shapes, devices
            that differ.

    Source: Brown et al., Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval, ECCV 2020, Eq. 7; which
    rows are queries as in pytorch-metric-learning 3.
    """
    check_embeddings(embeddings, "embeddings")
    check_labels(labels, embeddings, "labels")
    check_temperature(temperature)
    check_choice("reduction", reduction, Reduction)
    check_bounds(max_class_size=max_class_size, memory_budget=memory_budget)
    with full_precision(embeddings):
        per_query, is_query = per_query_smooth_ap(
            embeddings, labels, temperature, max_class_size, memory_budget
        )
        loss = per_query if reduction == "none" else mean_of_queries(per_query, is_query)
    return loss.to(output_dtype(embeddings))


class SmoothAPLoss(PerQueryLoss):
    """The loss of `smooth_ap_loss` as a module, with pytorch-metric-learning 3's signature.

    `SmoothAPLoss()(embeddings, labels)` takes embeddings [N, D] of any floating dtype and labels [N] of any integer
    dtype, in any order, with classes of any size. Its one term, "ap_loss", has one loss for each row that has another
    of its class; the default reducer is their mean. With an `indices_tuple` the loss of a query is multiplied by the
    weight that `tritonloss.indices.miner_weights` gives to the row; the tuple does not choose positives or negatives.

    Args:
        temperature, max_class_size, memory_budget: as for `smooth_ap_loss`, which has the equation, the cost and the
            source.
        distance: only plain cosine similarity, ours or pytorch-metric-learning's.
        reducer, embedding_regularizer, embedding_reg_weight: as for `BaseMetricLossFunction`. A reducer other than
            `MeanReducer`, and `loss_terms`, cost one more host sync on CUDA and break the graph of torch.compile.

    Raises:
        TypeError: another distance, a temperature that is no number, a bound that is no int.
        ValueError: a temperature that is not positive, a bound below 1; when called, labels that are missing, or a
            `ref_emb` or `ref_labels` that is not None.
    """

    term_name = "ap_loss"

    def __init__(
        self,
        temperature: float = 0.01,
        *,
        distance: Distance | None = None,
        reducer: Callable[..., Tensor] | None = None,
        embedding_regularizer: Callable[[Tensor], Tensor] | None = None,
        embedding_reg_weight: float = 1.0,
        max_class_size: int | None = None,
        memory_budget: int | None = None,
    ) -> None:
        check_temperature(temperature)
        check_bounds(max_class_size=max_class_size, memory_budget=memory_budget)
        super().__init__(
            distance=distance,
            reducer=reducer,
            embedding_regularizer=embedding_regularizer,
            embedding_reg_weight=embedding_reg_weight,
        )
        require_cosine("SmoothAPLoss", self.distance)
        self.temperature = temperature
        self.max_class_size, self.memory_budget = max_class_size, memory_budget

    def per_query(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: PairIndices | TripletIndices | None
    ) -> tuple[Tensor, Tensor]:
        values, is_query = per_query_smooth_ap(
            embeddings, labels, self.temperature, self.max_class_size, self.memory_budget
        )
        if indices_tuple is not None:
            values = values * miner_weights(
                indices_tuple, embeddings.shape[0], dtype=values.dtype, device=values.device
            )
        return values, is_query

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"


def check_temperature(temperature: Any) -> None:
    check_numbers(temperature=temperature)
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: expected a number above 0")


def per_query_smooth_ap(
    embeddings: Tensor,
    labels: Tensor,
    temperature: float,
    max_class_size: int | None,
    memory_budget: int | None,
) -> tuple[Tensor, Tensor]:
    """The loss of each row as a query [N], and whether it is one [N] bool."""
    if selected_backend() == "reference":
        return reference.smooth_ap(upcast(embeddings), labels, temperature=temperature)
    layout = ClassLayout.from_labels(labels)
    rows = layout.sort(unit_rows(embeddings))
    count = layout.query_count
    per_query = rank_per_query(
        rows,
        layout.start,
        count,
        lambda sums, count: segment_mean(smoothed_loss(sums), count),
        temperature=temperature,
        positive_ranks=True,
        max_class_size=max_class_size,
        score_limit=1,
        memory_budget=memory_budget,
    )
    return layout.unsort(per_query), layout.unsort(count > 0)


def smoothed_loss(sums: SoftRanks) -> Tensor:
    """1 - (1 + P) / (1 + P + N) of each pair, without the rounding of a difference from 1."""
    assert sums.positive_ranks is not None
    return fraction(sums.ranks, 1 + sums.positive_ranks)
