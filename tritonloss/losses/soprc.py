"""SOPRC: the area under the precision-recall curve, with a prior that is given and positives that are remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from tritonloss import reference
from tritonloss.backends import selected_backend
from tritonloss.layout import ClassLayout
from tritonloss.losses.base import (
    check_arguments,
    check_bounds,
    check_choice,
    check_embeddings,
    check_labels,
    check_numbers,
    fraction,
    full_precision,
    output_dtype,
    refuse,
)
from tritonloss.losses.score_memory import ScoreMemory, score_quantiles
from tritonloss.losses.semi_variance import Normalize, SemiVarianceRegularizer, is_embeddings, score_matrix
from tritonloss.losses.soprc_pieces import (
    Average,
    Grid,
    Interpolation,
    MemoryInit,
    MemoryUpdate,
    Options,
    Prior,
    ScoreRange,
    class_prior,
)
from tritonloss.ops import (
    PairGradients,
    Pairs,
    Panels,
    Ranking,
    class_labels,
    memory_rank,
    rank_total,
    register_query_function,
)
from tritonloss.ops.library import needs_gradient
from tritonloss.ops.shares import own_share
from tritonloss.ops.streaming import budget_bytes
from tritonloss.types import IndicesTuple, LossDict, ProductMode, accumulation_dtype, upcast


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
    products: ProductMode | None = None,
) -> Tensor:
    """The SOPRC loss of embeddings with labels for a given memory (`SOPRCLoss` without its state and Eq. 9).

    Every row is a query; its positives are the other rows of its class and h is the cosine similarity.

    Args:
        embeddings: [N, D], any floating dtype; normalised here.
        labels: [N] integer, in 0 .. C - 1: the row of the memory.
        memory: [C, V], the remembered scores v of each class; constant.
        prior: the number pi, or one for each class [C], between 0 and 1; or "batch", n_+ / (n_+ + n_-) of the query.
        tau1, tau2, tpr_offset, tpr_grad, average, max_class_size, memory_budget, products: as for `SOPRCLoss`.

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
        queries = Queries.of_embeddings(embeddings, classes, max_class_size, memory_budget, products)
        loss = queries.loss(queries.rows_of(memory), prior_of_queries(prior, queries), options)
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
        of_queries = classes_of_queries(classes, matrix[0], memory.shape[0])
        queries = Queries.of_scores(matrix, of_queries, memory_budget)
        loss = queries.loss(queries.rows_of(memory), prior_of_queries(prior, queries), options)
    return loss.to(output_dtype(scores))


class SOPRCLoss(ScoreMemory):
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
            where positive, num_classes 1: one query. Or multi-label, [B, C] each, num_classes C: one query per column.
            Logits [B, C] of a classifier with class indices [B] would be taken for embeddings with labels: give
            `torch.nn.functional.one_hot(labels, C)` as targets.
        `criterion(scores, positives=mask, negatives=mask, classes=...)`: scores [Q, N] and bool masks [Q, N], one query
            per row; classes [Q] says whose v it uses and may be left out where num_classes is 1 or Q.

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
        update: of a class with several queries in a batch; "mean" of their phi; or "last", the phi of the last of them
            in the batch, as the authors' code on a CPU.
        tpr_offset: in T; 1 counts the positive itself, so that T > 0 and f is still an upper bound of Eq. 3; 0 as in
            the paper, and f is 0 where F and T are.
        tpr_grad: differentiate T by h, as Eq. 11 is written. The authors' code does not: that gradient pushes
            positives down, by up to 1 / (2 tau2), wherever a remembered score is near.
        use_memory: without it, v is the phi of the query in this call (rows 1 and 2 of Table 2), and no state is kept.
        average: "macro", of the queries' means; "micro", of all pairs (Eq. 8 has one query).
        w_var: weight of Eq. 9; 0 leaves it out (row 3 of Table 2). None is 1 for embeddings and 0 for scores: Eq. 9 is
            quadratic in the scale of the scores, and assumes a fixed range such as [-1, 1]. Of logits, whose scale is
            free, it would outweigh the loss; give a weight for cosines or probabilities.
        var_weights, var_normalize, var_detach_mean: of Eq. 9, see `SemiVarianceRegularizer`.
        max_class_size: a bound of the class sizes of a batch of embeddings in place of the host sync, as for `PNPLoss`.
        check_label_range: compare labels with num_classes, one host sync on CUDA; without it, a row whose label is out
            of range is no query, and a negative of all others. The same for targets that are NaN: an error, and
            without the check neither positive nor negative.
        memory_budget: bytes that similarities may take; default TRITONLOSS_MEMORY_BUDGET, else 256 MiB on CPU and a
            sixteenth of the device's memory on CUDA.
        products: how rows are multiplied, "auto", "ieee" or "split"; default TRITONLOSS_PRODUCTS, else "auto": see
            `tritonloss.ops.products`. Results of both have the precision of float32.

    Cost: with embeddings, time O(N^2 D + sum over classes of n^2 (N - n + V)), n the size of a class: one walk over
    panels of the similarity matrix gives value and gradient of the loss, another one those of Eq. 9. Memory
    O(panel + N (D + V)). With scores, time O(Q N + sum over queries of n_+ (n_- + V)), memory of a few numbers for each
    score. Computed in float32 (float64 for float64) with autocast off.

    Raises:
        TypeError: inputs, labels or masks of the wrong kind; an option that is no number.
        ValueError: a prior outside (0, 1) or of another size; an option out of range; shapes or devices that do not
            fit; a label out of range; an `indices_tuple`, `ref_emb` or `ref_labels` that is not None.

    Source: Wen et al., Exploring the Algorithm-Dependent Generalization of AUPRC Optimization with List Stability,
    NeurIPS 2022, arXiv 2209.13262. Where paper and authors' code differ, the default follows the code for the
    gradient and the offset of T, and the paper for Eq. 9; `from_preset` has both.
    """

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
        w_var: float | None = None,
        var_weights: Sequence[float] = (1.0, 5.0),
        var_normalize: Normalize = "count_all",
        var_detach_mean: bool = False,
        max_class_size: int | None = None,
        check_label_range: bool = True,
        memory_budget: int | None = None,
        products: ProductMode | None = None,
    ) -> None:
        if w_var is not None:
            check_numbers(w_var=w_var)
            if not w_var >= 0:
                raise ValueError(f"w_var is {w_var}: expected at least 0, or None")
        super().__init__(num_classes, memory_size, beta, score_range, grid, v_init, update)
        self.options = Options(tau1, tau2, tpr_offset, tpr_grad, average)
        self.use_memory, self.w_var = use_memory, w_var
        self.max_class_size, self.memory_budget = check_bounds(
            max_class_size=max_class_size, memory_budget=memory_budget
        )
        self.products = products
        self.check_label_range = check_label_range
        self.semi_variance = SemiVarianceRegularizer(
            var_weights,
            normalize=var_normalize,
            detach_mean=var_detach_mean,
            max_class_size=max_class_size,
            memory_budget=memory_budget,
            products=products,
        )
        self._given_prior = class_prior(prior, self.num_classes)
        # On the device of the other buffers, which may be the meta device.
        self.register_buffer(
            "prior", None if self._given_prior is None else self._given_prior.to(self.v.device)
        )

    @classmethod
    def from_preset(
        cls, name: Literal["authors", "paper"], num_classes: int = 1, **options: Any
    ) -> SOPRCLoss:
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

    def reset_parameters(self) -> None:
        """Forget everything, and take the prior that was given; what `to_empty` needs."""
        super().reset_parameters()
        prior = getattr(self, "prior", None)
        if prior is not None:
            prior.copy_(self._given_prior)

    if TYPE_CHECKING:

        def __call__(
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
        ) -> Tensor: ...

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
        matrix = score_matrix(inputs, labels, positives, negatives, check=self.check_label_range)
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
        # Half rows get the sum of two gradients: it is rounded once.
        embeddings = upcast(embeddings)
        bounds = self.max_class_size, self.memory_budget
        queries = Queries.of_embeddings(embeddings, classes, *bounds, self.products)
        terms, commit = self._loss_term(queries, (-1.0, 1.0), update)
        w_var = 1 if self.w_var is None else self.w_var
        if w_var:
            if queries.layout is None:
                penalty = self.semi_variance.of_scores(*queries.matrix)
            else:
                # A class of labels out of range has pairs here, as any other; the panels of the loss leave it out.
                panels = queries.panels if self.check_label_range else None
                penalty = self.semi_variance.of_layout(
                    embeddings, queries.layout, queries.layout.query_count, panels
                )
            terms["semi_variance_loss"] = {"losses": w_var * penalty, "indices": None}
        commit()
        return terms

    def _terms_of_scores(
        self, matrix: tuple[Tensor, Tensor, Tensor], classes: Tensor | None, update: bool
    ) -> LossDict:
        of_queries = classes_of_queries(classes, matrix[0], self.num_classes)
        terms, commit = self._loss_term(
            Queries.of_scores(matrix, of_queries, self.memory_budget), None, update
        )
        if self.w_var:  # None: 0
            penalty = self.semi_variance.of_scores(*matrix)
            terms["semi_variance_loss"] = {"losses": self.w_var * penalty, "indices": None}
        commit()
        return terms

    def _loss_term(
        self, queries: Queries, natural_range: ScoreRange, update: bool
    ) -> tuple[LossDict, Callable[[], None]]:
        """The loss, and what writes the memory that it moved: to be called when nothing can raise any more."""
        phi = queries.quantiles(self.interpolation(natural_range))
        moves: Tensor | None = None
        if not self.use_memory:
            memory = phi
        elif update and self.training:
            memory, moves = self.moved(
                queries.classes, phi, queries.is_query, in_class_order=queries.layout is not None
            )
        else:
            memory = self.current(queries.classes, phi)
        prior = prior_of_queries("batch" if self.prior is None else self.prior, queries)
        loss = queries.loss(memory, prior, self.options)

        def commit() -> None:
            if moves is not None:
                self.commit(queries.classes, memory, moves)

        return {"loss": {"losses": loss, "indices": None}}, commit


@dataclass(frozen=True)
class Queries:
    """The queries of a call: rows of embeddings against each other, or rows of a score matrix.

    inputs: embeddings [N, D], or scores [Q, N] with `masks`, their positives and negatives [Q, N] bool.
    start, count: [Q] int64, the positives of each query as `soft_rank` takes them. n_positives, n_negatives: [Q] int64,
    how many of each it is compared with. classes: [Q] int64, -1 for none. layout: of embeddings; all of these are then
    in its order. panels: of the queries of this process, None under torch.compile.
    """

    inputs: Tensor
    masks: tuple[Tensor, ...]
    start: Tensor
    count: Tensor
    n_positives: Tensor
    n_negatives: Tensor
    classes: Tensor
    layout: ClassLayout | None
    max_class_size: int | None
    memory_budget: int | None
    products: ProductMode | None = None
    panels: Panels | None = None

    @classmethod
    def of_embeddings(
        cls,
        embeddings: Tensor,
        classes: Tensor,
        max_class_size: int | None,
        memory_budget: int | None,
        products: ProductMode | None,
    ) -> Queries:
        """Every row is a query, its positives the other rows of its class."""
        if selected_backend() == "reference":
            return cls.of_scores(reference.similarity(upcast(embeddings), classes), classes, memory_budget)
        layout = ClassLayout.from_labels(classes)
        in_order = classes[layout.order]
        # Without a class a row is no query, and a negative of all others.
        count = torch.where(in_order >= 0, layout.query_count, 0)
        n_negatives = classes.shape[0] - layout.count
        return cls(
            embeddings, (), layout.start, count, (count - 1).clamp(min=0), n_negatives, in_order, layout,
            max_class_size, memory_budget, products,
        )._with_panels()  # fmt: skip

    @classmethod
    def of_scores(
        cls, matrix: tuple[Tensor, Tensor, Tensor], classes: Tensor, memory_budget: int | None
    ) -> Queries:
        """The rows of a score matrix with the masks of their positives and negatives."""
        scores, positives, negatives = matrix
        count = positives.sum(1)
        return cls(
            scores, (positives, negatives), torch.zeros_like(count), count, count, negatives.sum(1), classes, None,
            None, memory_budget,
        )._with_panels()  # fmt: skip

    def _with_panels(self) -> Queries:
        if torch.compiler.is_compiling() or selected_backend() == "reference":
            return self
        needs_gradient(self.inputs)  # what cannot be differentiated is refused before anything is computed
        own = self._own[1]
        n_keys = self.inputs.shape[1] if self.masks else self.inputs.shape[0]
        itemsize = accumulation_dtype(self.inputs.dtype).itemsize * (5 if self.masks else 1)
        budget = budget_bytes(self.inputs.device, self.memory_budget)
        panels = Panels.of(self.start[own], self.count[own], n_keys, itemsize, budget, self.max_class_size)
        return replace(self, panels=panels)

    @property
    def _own(self) -> tuple[Any, slice]:
        share = own_share(self.inputs.shape[0])
        return share, slice(0, self.inputs.shape[0]) if share is None else share.rows

    @property
    def matrix(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, positives and negatives [Q, N]."""
        return self.inputs, self.masks[0], self.masks[1]

    @property
    def is_query(self) -> Tensor:
        """[Q] bool: whether the query has a positive, a negative and a class."""
        return (self.n_positives > 0) & (self.n_negatives > 0) & (self.classes >= 0)

    def rows_of(self, memory: Tensor) -> Tensor:
        """The memory of each query's class [Q, V], constant."""
        if memory.ndim != 2 or memory.shape[1] < 1:
            raise ValueError(f"memory must have shape [C, V] with V of at least 1, got {list(memory.shape)}")
        dtype = accumulation_dtype(self.inputs.dtype)
        return memory.detach().to(dtype)[self.classes.clamp(min=0)]

    def quantiles(self, phi: Interpolation) -> Tensor:
        """phi of the scores of each query's positives [Q, V], constant; 0 where there are none."""
        share, own = self._own
        size, grid, score_range = phi
        arguments: tuple[Any, ...] = (
            self.inputs.detach(),
            list(self.masks),
            None if self.layout is None else self.layout.order,
            self.start[own],
            self.count[own],
            self.n_positives[own],
            self.layout is not None,
            own.start,
            own.stop,
            -1 if self.max_class_size is None else self.max_class_size,
            size,
            grid,
            list(score_range or ()),
            budget_bytes(self.inputs.device, self.memory_budget),
            self.products or "",
        )
        part = (
            score_quantiles(*arguments) if self.panels is None else score_quantiles(*arguments, self.panels)
        )
        return cast(Tensor, part if share is None else share.gather(part))

    def loss(self, memory: Tensor, prior: Tensor, options: Options) -> Tensor:
        """The scalar loss. memory: [Q, V]. prior: [Q]. Both constant."""
        is_query, n_positives = self.is_query, self.n_positives.to(memory.dtype)
        if options.average == "micro":
            n_pairs = torch.where(is_query, n_positives, 0).sum().clamp(min=1)
            weights = is_query / n_pairs
        else:
            weights = is_query / (n_positives.clamp(min=1) * is_query.sum().clamp(min=1))
        weights = weights.to(memory.dtype)
        if selected_backend() == "reference":
            terms = reference.soprc(
                *self.matrix,
                memory,
                prior,
                tau1=options.tau1,
                tau2=options.tau2,
                tpr_offset=options.tpr_offset,
                tpr_grad=options.tpr_grad,
            )
            return torch.where(is_query, terms.sum(1) * weights, 0).sum()
        order = None if self.layout is None else self.layout.order
        ranking = Ranking(
            "one_side_huber",
            options.tau1,
            max_class_size=self.max_class_size,
            memory_budget=self.memory_budget,
            products=self.products,
            normalize=order is not None,
        )
        return rank_total(
            self.inputs,
            self.start,
            torch.where(is_query, self.count, 0) if self.panels is None else self.count,
            weights,
            "soprc",
            ranking,
            order=order,
            masks=self.masks,
            numbers=(options.tau2, options.tpr_offset, float(options.tpr_grad)),
            constants=(memory, prior, self.n_negatives),
            panels=self.panels,
        )


def _of_pairs(pairs: Pairs, tau2: float, tpr_offset: float, tpr_grad: float) -> Any:
    """sigma((1 - pi) / pi * FPR / TPR) of each pair, as one fraction that no pi and no TPR can overflow; their sum."""
    memory, prior, n_negatives = pairs.constants
    odds = ((1 - prior) / n_negatives.clamp(min=1).to(prior.dtype))[:, None]
    above, slopes = memory_rank(pairs.scores, memory, temperature=tau2)
    n_remembered = tpr_offset + memory.shape[1]
    false_positives = odds * pairs.ranks
    true_positives = prior[:, None] * (tpr_offset + above) / n_remembered
    losses = fraction(false_positives, true_positives)
    if pairs.is_self is not None:
        losses = losses.masked_fill(pairs.is_self, 0)

    def gradients() -> PairGradients:
        whole = (false_positives + true_positives).square()
        scale = 1 / torch.where(whole == 0, 1, whole)
        if pairs.is_self is not None:
            scale = scale.masked_fill(pairs.is_self, 0)
        by_ranks = true_positives * odds * scale
        if not tpr_grad:
            return PairGradients(ranks=by_ranks)
        return PairGradients(by_ranks, -false_positives * scale * prior[:, None] * slopes / n_remembered)

    return losses, gradients


register_query_function("soprc", _of_pairs)


def prior_of_queries(prior: Prior, queries: Queries) -> Tensor:
    """pi of each query [Q], constant."""
    dtype = accumulation_dtype(queries.inputs.dtype)
    if isinstance(prior, str):
        check_choice("prior", prior, Literal["batch"])
        total = (queries.n_positives + queries.n_negatives).clamp(min=1)
        return queries.n_positives.to(dtype) / total.to(dtype)
    values = torch.as_tensor(prior, dtype=dtype, device=queries.classes.device).detach()
    return values.expand(queries.classes.shape) if values.ndim == 0 else values[queries.classes.clamp(min=0)]


def classes_of_queries(classes: Any, scores: Tensor, num_classes: int) -> Tensor:
    """The class of each query [Q]; -1 never, as a class out of range raises."""
    n_queries = scores.shape[0]
    if classes is not None:
        if not isinstance(classes, Tensor) or classes.is_floating_point():
            raise TypeError(
                f"classes must be an integer tensor, got {getattr(classes, 'dtype', type(classes))}"
            )
        if classes.shape != (n_queries,) or classes.device != scores.device:
            raise ValueError(
                f"classes must have shape [{n_queries}] on {scores.device}, one per row of scores, "
                f"got {list(classes.shape)} on {classes.device}"
            )
        return class_labels(classes, num_classes)
    if num_classes == 1:
        return torch.zeros(n_queries, dtype=torch.int64, device=scores.device)
    if n_queries != num_classes:
        raise ValueError(f"classes are required: there are {n_queries} queries and {num_classes} classes")
    return torch.arange(n_queries, device=scores.device)


PRESETS: dict[str, dict[str, Any]] = {
    "authors": {
        "v_init": "uniform",
        "grid": "authors",
        "update": "last",
        "var_normalize": "selected",
    },
    "paper": {"tpr_offset": 0, "tpr_grad": True, "beta": 0.001},
}
