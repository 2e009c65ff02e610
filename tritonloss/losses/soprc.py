"""SOPRC: the area under the precision-recall curve, with a prior that is given and positives that are remembered."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tritonloss import reference
from tritonloss.backends import selected_backend
from tritonloss.layout import ClassLayout, runs, segment_sum
from tritonloss.losses.base import (
    check_arguments,
    check_choice,
    check_count,
    check_embeddings,
    check_labels,
    check_numbers,
    full_precision,
    output_dtype,
    refuse,
    unit_rows,
)
from tritonloss.losses.semi_variance import Normalize, SemiVarianceRegularizer, is_embeddings, score_matrix
from tritonloss.losses.soprc_pairs import (
    Pairs,
    Queries,
    classes_of_queries,
    dense_pairs,
    loss_of_queries,
    memory_of_queries,
    pairs_of_scores,
    prior_of_queries,
    queries_of_embeddings,
    queries_of_sorted_rows,
)
from tritonloss.losses.soprc_pieces import (
    Average,
    Grid,
    Interpolation,
    MemoryInit,
    MemoryUpdate,
    Options,
    Prior,
    ScoreRange,
    arranged,
    check_interpolation,
    class_prior,
)
from tritonloss.ops import class_labels
from tritonloss.types import IndicesTuple, LossDict, upcast


def soprc_loss(
    embeddings: Tensor,
    labels: Tensor,
    memory: Tensor,
    prior: Prior,
    *,
    tau1: float = 0.1,
    tau2: float = 0.001,
    tpr_offset: float = 1,
    tpr_grad: bool = False,
    average: Average = "macro",
    max_class_size: int | None = None,
    memory_budget: int | None = None,
) -> Tensor:
    """The SOPRC loss of embeddings with labels for a given memory (`SOPRCLoss` without its state and Eq. 9).

    Every row is a query; its positives are the other rows of its class and h is the cosine similarity.

    Args:
        embeddings: [N, D], any floating dtype; normalised here.
        labels: [N] integer, in 0 .. C - 1: the row of the memory.
        memory: [C, V], the remembered scores v of each class; constant.
        prior: the number pi, or one for each class [C], between 0 and 1; or "batch", n_+ / (n_+ + n_-) of the query.
        tau1, tau2, tpr_offset, tpr_grad, average, max_class_size, memory_budget: as for `SOPRCLoss`.

    Returns:
        Scalar in the dtype of the embeddings (float32 inside autocast); 0 where no query has a positive and a negative.

    Time and memory as for `SOPRCLoss` with embeddings.

    Raises:
        TypeError, ValueError: as `SOPRCLoss`; a label out of range.
    """
    check_arguments(embeddings, labels, None, None, None)
    options = Options(tau1, tau2, tpr_offset, tpr_grad, average)
    with full_precision(embeddings):
        classes = class_labels(labels, memory.shape[0])
        queries = queries_of_embeddings(embeddings, classes, tau1, max_class_size, memory_budget)
        loss = loss_of_queries(
            queries, memory_of_queries(memory, queries), prior_of_queries(prior, queries), options
        )
    return loss.to(output_dtype(embeddings))


def soprc_scores_loss(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    memory: Tensor,
    prior: Prior,
    *,
    classes: Tensor | None = None,
    tau1: float = 0.1,
    tau2: float = 0.001,
    tpr_offset: float = 1,
    tpr_grad: bool = False,
    average: Average = "macro",
    memory_budget: int | None = None,
) -> Tensor:
    """The SOPRC loss of a score matrix for a given memory (`SOPRCLoss` without its state and Eq. 9).

    Args:
        scores: [Q, N], any floating dtype.
        positives, negatives: [Q, N] bool. A column that is neither is left out, one that is both is a positive.
        memory: [C, V], the remembered scores v; constant.
        prior: as for `soprc_loss`.
        classes: [Q] integer, the row of the memory of each query; None if C is 1 or Q.
        tau1, tau2, tpr_offset, tpr_grad, average, memory_budget: as for `SOPRCLoss`.

    Returns:
        Scalar in the dtype of the scores (float32 inside autocast); 0 where no query has a positive and a negative.

    Raises:
        TypeError, ValueError: as `SOPRCLoss`.
    """
    matrix = score_matrix(scores, None, positives, negatives)
    options = Options(tau1, tau2, tpr_offset, tpr_grad, average)
    with full_precision(scores):
        pairs = pairs_of_scores(
            *matrix, classes_of_queries(classes, matrix[0], memory.shape[0]), tau1, memory_budget
        )
        loss = loss_of_queries(
            pairs, memory_of_queries(memory, pairs), prior_of_queries(prior, pairs), options
        )
    return loss.to(output_dtype(scores))


class SOPRCLoss(nn.Module):
    """1 - AUPRC for any sampling of the batch: stochastic optimisation of the area under the precision-recall curve.

    For a query with positive scores h_i and negative scores h_k, the prior pi and the memory v of its class [V],

        F_i = mean over k of l_1(h_i - h_k)                              (Eq. 8; l_1 the one-side Huber of Eq. 7)
        T_i = (offset + sum over j of l_2(h_i - v_j)) / (offset + V)     (Eq. 8; l_2 the one-side sigmoid of Eq. 7)
        f_i = (1 - pi) F_i / ((1 - pi) F_i + pi T_i)                     (Eq. 4)

    and the loss is the mean of f over the positives of a query, then over the queries that have a positive and a
    negative, plus w_var times the semi-variance of Eq. 9. An average precision taken on a batch silently uses the
    batch's own share of positives for pi; this loss does not, and T is taken against remembered scores, so that it
    estimates the curve of the whole data.

    Forms:
        `criterion(embeddings, labels)`: embeddings [N, D] of any floating dtype, normalised here, labels [N] in
            0 .. num_classes - 1. Each row is a query, its positives are the other rows of its class, h is the cosine
            similarity, and v belongs to the class.
        `criterion(scores, targets)`: binary classification, scores [B] of any floating dtype, targets [B], above 0
            where positive, num_classes 1: one query. Or multi-label, [B, C] each and num_classes C: a query a column.
        `criterion(scores, positives=mask, negatives=mask, classes=...)`: scores [Q, N] and bool masks [Q, N], a query
            a row; classes [Q] says whose v it uses and may be left out where num_classes is 1 or Q.

    The memory: in training mode each call first computes phi of the positive scores (Algorithm 2), moves the rows of
    the classes that it meets, v <- (1 - beta) v + beta phi (Eq. 10), and then uses them (Eq. 11). In eval mode, or
    with `criterion(..., update=False)`, nothing is changed and v is used as it is: do that for a second forward of the
    same batch (gradient checkpointing, closures). A class that was never met uses the phi of its queries. A query
    whose scores are not finite moves nothing. A call that raises changes nothing. The state is in `state_dict`: buffers
    v [C, V] and prior [C] float32, visits [C] int64; a state of another size is refused as a whole. Over several
    processes use `tritonloss.distributed.DistributedLoss`, else each keeps another memory.

    Args:
        num_classes: C, rows of the memory.
        prior: pi of Eq. 1, one number or one for each class [C], above 0 and below 1: see `exact_prior` and
            `scaled_prior`. Its scale acts as a temperature: with a tiny pi gradients vanish for badly ranked positives.
            "batch": n_+ / (n_+ + n_-) of the query, the biased estimator of Eq. 5 and of row 1 in Table 2.
        tau1: width of l_1, > 0.
        tau2: width of l_2, > 0.
        memory_size: V, N_+ in the paper.
        beta: step of the memory, in (0, 1] (Eq. 10). Theory sets it to about 1 / n_+ (Theorems 2 and 3).
        score_range: the smallest and largest score (b, B of Algorithm 2), or None; "auto" is (-1, 1) for embeddings and
            None for scores. Give (0, 1) for probabilities.
        grid: of Algorithm 2, see `interpolate_scores`.
        v_init: v_1; "first", the first phi (Proposition 1 favours it), or "uniform", j / V, as the authors' code.
        update: of a class with several queries in a batch; "mean" of their phi; "last", the phi of the last of them in
            the batch, as the authors' code on a CPU; or "pool", phi of the scores of all of them as one list.
        tpr_offset: in T; 1 counts the positive itself, so that T > 0 and f is still an upper bound of Eq. 3; 0 as in
            the paper, and f is 0 where F and T are.
        tpr_grad: differentiate T by h, as Eq. 11 is written. The authors' code does not: that gradient pushes
            positives down, by up to 1 / (2 tau2), wherever a remembered score is near.
        use_memory: without it, v is the phi of the query in this call (rows 1 and 2 of Table 2), and no state is kept.
        average: "macro", of the queries' means; "micro", of all pairs (Eq. 8 has one query).
        w_var: weight of Eq. 9; 0 leaves it out (row 3 of Table 2).
        var_weights, var_normalize, var_detach_mean: of Eq. 9, see `SemiVarianceRegularizer`.
        max_class_size: a bound of the class sizes of a batch of embeddings in place of the host sync, as for `PNPLoss`.
        check_label_range: compare labels with num_classes, one host sync on CUDA; without it, a row whose label is out
            of range is no query, and a negative of all others.
        memory_budget: bytes that similarities may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU and a
            sixteenth of the device's memory on CUDA.

    Cost: with embeddings, time O(N^2 D + sum over classes of n^2 (N - n + V)), n the size of a class, and memory
    O(memory_budget + N (D + V)). Where the pairs of all classes would take more than the budget, queries are taken in
    blocks: for the memory, for the loss, and once more in the backward pass. update="pool" then also sorts the n^2
    scores of one class at a time; torch.compile, which cannot ask for the number of pairs, holds those of all classes.
    With scores, time O(Q N + sum over queries of n_+ (n_- + V)), memory of a few numbers for each score: they are given
    as a whole, and are not taken in blocks. Computed in float32 (float64 for float64) with autocast off.

    Raises:
        TypeError: inputs, labels or masks of the wrong kind; an option that is no number.
        ValueError: a prior outside (0, 1) or of another size; an option out of range; shapes or devices that do not
            fit; a label out of range; an `indices_tuple`, `ref_emb` or `ref_labels` that is not None.

    Source: Wen et al., Exploring the Algorithm-Dependent Generalization of AUPRC Optimization with List Stability,
    NeurIPS 2022, arXiv 2209.13262. Where paper and authors' code differ, the default follows the code for the
    gradient and the offset of T, and the paper for Eq. 9; `from_preset` has both.
    """

    v: Tensor
    visits: Tensor
    prior: Tensor | None

    def __init__(
        self,
        num_classes: int = 1,
        *,
        prior: Prior = 0.1,
        tau1: float = 0.1,
        tau2: float = 0.001,
        memory_size: int = 100,
        beta: float = 0.1,
        score_range: ScoreRange | Literal["auto"] = "auto",
        grid: Grid = "midpoint",
        v_init: MemoryInit = "first",
        update: MemoryUpdate = "mean",
        tpr_offset: float = 1,
        tpr_grad: bool = False,
        use_memory: bool = True,
        average: Average = "macro",
        w_var: float = 1,
        var_weights: Sequence[float] = (1.0, 5.0),
        var_normalize: Normalize = "count_all",
        var_detach_mean: bool = False,
        max_class_size: int | None = None,
        check_label_range: bool = True,
        memory_budget: int | None = None,
    ) -> None:
        super().__init__()
        check_count("num_classes", num_classes)
        check_interpolation(memory_size, grid, None if score_range == "auto" else score_range)
        check_choice("v_init", v_init, MemoryInit)
        check_choice("update", update, MemoryUpdate)
        check_numbers(beta=beta, w_var=w_var)
        if not 0 < beta <= 1:
            raise ValueError(f"beta is {beta}: expected a number above 0 and at most 1")
        if not w_var >= 0:
            raise ValueError(f"w_var is {w_var}: expected at least 0")
        self.options = Options(tau1, tau2, tpr_offset, tpr_grad, average)
        self.num_classes, self.memory_size, self.beta = num_classes, memory_size, beta
        self.score_range, self.grid, self.v_init, self.update = score_range, grid, v_init, update
        self.use_memory, self.w_var = use_memory, w_var
        self.max_class_size, self.memory_budget = max_class_size, memory_budget
        self.check_label_range = check_label_range
        self.semi_variance = SemiVarianceRegularizer(
            var_weights,
            normalize=var_normalize,
            detach_mean=var_detach_mean,
            max_class_size=max_class_size,
            memory_budget=memory_budget,
        )
        row = torch.zeros(memory_size, dtype=torch.float32)
        if v_init == "uniform":
            row = torch.arange(memory_size, dtype=torch.float32) / memory_size
        self.register_buffer("v", row.repeat(num_classes, 1))
        self.register_buffer("visits", torch.zeros(num_classes, dtype=torch.int64))
        self.register_buffer("prior", class_prior(prior, num_classes))

    @classmethod
    def from_preset(
        cls, name: Literal["authors", "paper"], num_classes: int = 1, **options: Any
    ) -> "SOPRCLoss":
        """The loss as in the authors' code or as in the paper; `options` are those of the class and go first.

        "authors": uniform v_1, their grid, the last query of a class, offset 1, no gradient through T, Eq. 9 over the
        selected pairs. Give `prior=scaled_prior(class_counts)`.

        "paper": offset 0, gradient through T, beta 0.001, Eq. 9 over all pairs. `memory_size`, N_+, is required, and
        `prior=exact_prior(class_counts)` is meant.

        Raises:
            TypeError: "paper" without a memory_size; an unknown option.
            ValueError: another name.
        """
        if name not in PRESETS:
            raise ValueError(f"preset is {name!r}: expected one of {', '.join(PRESETS)}")
        if name == "paper" and "memory_size" not in options:
            raise TypeError("preset 'paper' needs memory_size, the number of positives N_+ of a query")
        return cls(num_classes, **{**PRESETS[name], **options})

    def forward(
        self,
        inputs: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        positives: Tensor | None = None,
        negatives: Tensor | None = None,
        classes: Tensor | None = None,
        update: bool = True,
    ) -> Tensor:
        """The loss, a scalar in the dtype of the inputs (float32 inside autocast). The class has the forms."""
        terms = self.loss_terms(
            inputs,
            labels,
            indices_tuple,
            ref_emb,
            ref_labels,
            positives=positives,
            negatives=negatives,
            classes=classes,
            update=update,
        )
        loss = terms["loss"]["losses"]
        if "semi_variance_loss" in terms:
            loss = loss + terms["semi_variance_loss"]["losses"]
        return loss.to(output_dtype(inputs))

    def loss_terms(
        self,
        inputs: Tensor,
        labels: Tensor | None = None,
        indices_tuple: IndicesTuple | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        positives: Tensor | None = None,
        negatives: Tensor | None = None,
        classes: Tensor | None = None,
        update: bool = True,
    ) -> LossDict:
        """The scalars that `forward` adds: "loss" and, unless w_var is 0, "semi_variance_loss". It moves the memory."""
        refuse("SOPRCLoss", indices_tuple=indices_tuple, ref_emb=ref_emb, ref_labels=ref_labels)
        if is_embeddings(inputs, labels):
            refuse("SOPRCLoss with embeddings", positives=positives, negatives=negatives, classes=classes)
            check_embeddings(inputs, "embeddings")
            check_labels(labels, inputs, "labels")
            assert labels is not None
            with full_precision(inputs):
                return self._terms_of_embeddings(inputs, labels, update)
        matrix = score_matrix(inputs, labels, positives, negatives)
        if labels is not None:
            self._check_form(matrix[0], classes)
        with full_precision(inputs):
            return self._terms_of_scores(matrix, classes, update)

    def extra_repr(self) -> str:
        return (
            f"num_classes={self.num_classes}, memory_size={self.memory_size}, beta={self.beta}, "
            f"tau1={self.options.tau1}, tau2={self.options.tau2}, w_var={self.w_var}"
        )

    def _check_form(self, scores: Tensor, classes: Tensor | None) -> None:
        refuse("SOPRCLoss with targets", classes=classes)
        if scores.shape[0] != self.num_classes:
            raise ValueError(
                f"num_classes is {self.num_classes}: expected scores of as many columns, got {scores.shape[0]}"
            )

    def _terms_of_embeddings(self, embeddings: Tensor, labels: Tensor, update: bool) -> LossDict:
        classes = class_labels(labels, self.num_classes, check=self.check_label_range)
        if selected_backend() == "reference":
            dense = dense_pairs(*reference.similarity(upcast(embeddings), classes), classes)
            penalty = self._penalty(dense)
            return self._terms(dense, (-1.0, 1.0), update, penalty)
        layout = ClassLayout.from_labels(classes)
        rows = layout.sort(unit_rows(embeddings))
        queries = queries_of_sorted_rows(
            rows,
            classes[layout.order],
            layout,
            self.options.tau1,
            self.max_class_size,
            self.memory_budget,
        )
        penalty = (
            self.semi_variance.of_sorted_rows(rows, layout, queries.largest_class) if self.w_var else None
        )
        return self._terms(queries, (-1.0, 1.0), update, penalty)

    def _terms_of_scores(
        self, matrix: tuple[Tensor, Tensor, Tensor], classes: Tensor | None, update: bool
    ) -> LossDict:
        rows = classes_of_queries(classes, matrix[0], self.num_classes)
        pairs = pairs_of_scores(*matrix, rows, self.options.tau1, self.memory_budget)
        penalty = self.semi_variance.of_scores(*matrix) if self.w_var else None
        return self._terms(pairs, None, update, penalty)

    def _penalty(self, pairs: Pairs) -> Tensor | None:
        assert pairs.matrix is not None
        return self.semi_variance.of_scores(*pairs.matrix) if self.w_var else None

    def _terms(
        self, queries: Queries, natural_range: ScoreRange, update: bool, penalty: Tensor | None
    ) -> LossDict:
        score_range = natural_range if self.score_range == "auto" else self.score_range
        moving = update and self.training and self.use_memory
        memory, moved = self._memory(queries, Interpolation(self.memory_size, self.grid, score_range), moving)
        loss = loss_of_queries(
            queries,
            memory,
            prior_of_queries("batch" if self.prior is None else self.prior, queries),
            self.options,
        )
        terms: LossDict = {"loss": {"losses": loss, "indices": None}}
        if penalty is not None:
            terms["semi_variance_loss"] = {"losses": self.w_var * penalty, "indices": None}
        if moving:
            # Last: nothing that raises may leave a memory that has moved.
            self._commit(queries.classes, memory, moved)
        return terms

    @torch.no_grad()
    def _memory(self, queries: Queries, phi: Interpolation, moving: bool) -> tuple[Tensor, Tensor]:
        """v for each query [Q, V], after the step if `moving`, and whether its class has moved [Q] bool."""
        own = queries.interpolated(phi)
        is_fresh = queries.is_query & own.isfinite().all(1)
        if not self.use_memory:
            return own, is_fresh
        rows = queries.classes.clamp(min=0)
        old = self.v.to(own.dtype)[rows]
        is_known = (self.visits[rows] > 0) | (self.v_init == "uniform")
        current = torch.where(is_known[:, None], old, own)
        if not moving:
            return current, torch.zeros_like(is_fresh)
        target, moved = self._targets(queries, phi, own, is_fresh)
        step = torch.ones_like(own[:, :1]).masked_fill(is_known[:, None], self.beta)
        return torch.where(moved[:, None], old + step * (target - old), current), moved

    def _targets(
        self, queries: Queries, phi: Interpolation, own: Tensor, is_fresh: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What v of each query's class moves to [Q, V], and whether there is such a target [Q] bool."""
        order = None if queries.in_class_order else torch.argsort(queries.classes, stable=True)
        place = None if order is None else torch.argsort(order)
        run, length = runs(arranged(queries.classes, order))
        chosen = arranged(is_fresh, order)
        if self.update == "last":
            seen = torch.cumsum(chosen, 0)
            chosen = chosen & (seen == seen[torch.cumsum(length, 0)[run] - 1])
        n_chosen = segment_sum(chosen.to(own.dtype), length)
        if self.update == "pool":
            targets = queries.pooled(phi, arranged(chosen, place), arranged(run, place))
        else:
            total = segment_sum(torch.where(chosen[:, None], arranged(own, order), 0), length)
            targets = total / n_chosen.clamp(min=1)[:, None]
        return arranged(targets[run], place), arranged((n_chosen > 0)[run], place)

    @torch.no_grad()
    def _commit(self, classes: Tensor, memory: Tensor, moved: Tensor) -> None:
        # Queries of one class write the same row, so the order of the writes does not matter.
        rows = classes.clamp(min=0)
        entries = torch.where(moved[:, None], memory.to(self.v.dtype), self.v[rows])
        visits = self.visits[rows] + moved
        self.v[rows] = entries
        self.visits[rows] = visits

    def _apply(self, fn: Any, recurse: bool = True) -> "SOPRCLoss":
        # model.half() must not round remembered scores: tau2 is below the spacing of half precision.
        kept = {name: getattr(self, name) for name in ("v", "prior")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = getattr(self, name)
            if before is not None and after.dtype != upcast(after).dtype:
                setattr(self, name, before.to(after.device))
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # torch would copy the buffers that fit and leave a state that is half another's.
        for name, buffer in self.named_buffers(recurse=False):
            given = state_dict.get(prefix + name)
            if given is not None and given.shape != buffer.shape:
                error_msgs.append(
                    f"{prefix}{name}: the state of a SOPRCLoss of another size, {list(given.shape)} for "
                    f"{list(buffer.shape)} (num_classes={self.num_classes}, memory_size={self.memory_size}); "
                    "nothing of it was loaded"
                )
        if not error_msgs:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )


PRESETS: dict[str, dict[str, Any]] = {
    "authors": {
        "v_init": "uniform",
        "grid": "authors",
        "update": "last",
        "var_normalize": "selected",
    },
    "paper": {"tpr_offset": 0, "tpr_grad": True, "beta": 0.001},
}
