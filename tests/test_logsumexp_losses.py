"""NTXent, SupCon, MultiSimilarity, Circle, InfoNCE: published values, pytorch-metric-learning, references, towers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_close, assert_same
from inputs import E1, E3, Batch, random_batch
from torch import Tensor, nn
from torch.nn import functional as F

from tritonloss import functional, losses, use_backend
from tritonloss.ops import pair_logsumexp
from tritonloss.reducers import AvgNonZeroReducer, MeanReducer

E3L = E3.labelled(0, 0, 0, 0, 1, 2)
# By brute force in float64, of E1, E3 and E3L.
GOLDEN = {
    "NTXentLoss": (1.221855983496, 3.225816391602, 1.329135030850),
    "SupConLoss": (0.966801729697, 2.975620037438, 2.564346943594),
    "MultiSimilarityLoss": (0.498811128881, 0.806681463446, 0.639374888574),
    "CircleLoss": (28.864830089207, 53.815343326789, 32.406666519586),
}
BATCH = random_batch(22, 5, 5, n_lone=3)
REFERENCES = random_batch(17, 5, 6, n_lone=2, seed=1)
# Exponents up to 50 and 80 / 0.6 have rounding errors of 1e-14, and slopes of as much again.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


# Named pairs and dense forms reach no kernel, and the interpreter is slow.
EAGER = pytest.mark.parametrize("backend", ["eager"], indirect=True)


@pytest.fixture(params=GOLDEN)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("which", ["eager", "triton", "reference"])
def test_golden_values(name: str, which: str) -> None:
    with use_backend(which):
        values = [getattr(losses, name)()(*batch) for batch in (E1, E3, E3L)]
    assert_close(torch.stack(values), torch.tensor(GOLDEN[name], dtype=torch.float64), rtol=1e-11, atol=1e-12)


# --- pytorch-metric-learning 2.9.0 ---


def gradients(call: Callable[..., Tensor], *tensors: Tensor | None) -> list[Tensor]:
    """The value of the call on copies of the tensors, and their gradients."""
    leaves = [None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in tensors]
    value = call(*leaves)
    return [value.detach(), *torch.autograd.grad(value, [leaf for leaf in leaves if leaf is not None])]


def triplets(n_keys: int) -> tuple[Tensor, ...]:
    """With repetitions; positives and negatives are told apart by the parity of anchor and partner."""
    generator = torch.Generator().manual_seed(2)
    anchors = torch.randint(len(BATCH.rows), (60,), generator=generator)
    partners = torch.randint(n_keys // 2, (2, 60), generator=generator) * 2
    odd = (anchors + 1) % 2
    return anchors, partners[0] + anchors % 2, partners[1] + odd


def pairs(n_keys: int) -> tuple[Tensor, ...]:
    anchors, positives, negatives = triplets(n_keys)
    return anchors[:40], positives[:40], anchors[25:], negatives[25:]


def exact(peer: nn.Module) -> nn.Module:
    """Without the shortcut of its softplus, which is x from x = 20 on: wrong by e^-20."""
    if hasattr(peer, "soft_plus"):
        peer.soft_plus.threshold = 700
    return peer


@EAGER
@pytest.mark.parametrize("references", [False, True], ids=["self", "references"])
@pytest.mark.parametrize("mined", [None, triplets, pairs], ids=["labels", "triplets", "pairs"])
def test_equals_pytorch_metric_learning(
    name: str, mined: Callable[..., Any] | None, references: bool, backend: str
) -> None:
    peer = pytest.importorskip("pytorch_metric_learning.losses")
    keys, key_labels = REFERENCES if references else (None, None)
    indices = None if mined is None else mined(16 if references else 22)

    def loss_of(module: nn.Module) -> Callable[..., Tensor]:
        return lambda rows, keys: module(rows, BATCH.labels, indices, keys, key_labels)

    expected = gradients(loss_of(exact(getattr(peer, name)())), BATCH.rows, keys)
    assert_close(gradients(loss_of(getattr(losses, name)()), BATCH.rows, keys), expected, **EXACT)
    with use_backend("reference"):
        assert_close(gradients(loss_of(getattr(losses, name)()), BATCH.rows, keys), expected, **EXACT)


OPTIONS = {
    "NTXentLoss": {"temperature": 0.3},
    "SupConLoss": {"temperature": 0.02},
    "MultiSimilarityLoss": {"alpha": 3.0, "beta": 20.0, "base": 0.1},
    "CircleLoss": {"m": 0.25, "gamma": 128.0},
}


@EAGER
def test_options_are_those_of_pytorch_metric_learning(name: str, backend: str) -> None:
    peer = pytest.importorskip("pytorch_metric_learning.losses")
    ours, theirs = getattr(losses, name)(**OPTIONS[name]), exact(getattr(peer, name)(**OPTIONS[name]))
    expected = gradients(lambda rows: theirs(rows, BATCH.labels), BATCH.rows)
    assert_close(gradients(lambda rows: ours(rows, BATCH.labels), BATCH.rows), expected, **EXACT)


@EAGER
@pytest.mark.parametrize("references", [False, True], ids=["self", "references"])
@pytest.mark.parametrize("mined", [None, pairs], ids=["labels", "pairs"])
def test_terms_and_other_reducers(
    name: str, mined: Callable[..., Any] | None, references: bool, backend: str
) -> None:
    """The values of the terms, their mean with any reducer and its gradient, which take another walk."""

    class Mean(MeanReducer):
        pass

    class AvgNonZero(AvgNonZeroReducer):
        pass

    keys, key_labels = REFERENCES if references else (None, None)
    indices = None if mined is None else mined(16 if references else 22)
    call = (BATCH.rows, BATCH.labels, indices, keys, key_labels)
    plain = getattr(losses, name)()
    terms = plain.loss_terms(*call)["loss"]
    with use_backend("reference"):
        dense = plain.loss_terms(*call)["loss"]
    assert_close(terms["losses"], dense["losses"], **EXACT)
    assert_close(terms["indices"], dense["indices"])
    for reducer, default in ((Mean(), MeanReducer), (AvgNonZero(), AvgNonZeroReducer)):
        module = getattr(losses, name)(reducer=reducer)

        def reduced(rows: Tensor, keys: Tensor | None, module: nn.Module = module) -> Tensor:
            return module(rows, BATCH.labels, indices, keys, key_labels)

        actual = gradients(reduced, BATCH.rows, keys)
        with use_backend("reference"):
            assert_close(actual, gradients(reduced, BATCH.rows, keys), **EXACT)
        if type(plain.reducer) is default:
            assert_close(actual[0], plain(*call), **EXACT)


FUNCTIONS = {
    "NTXentLoss": functional.nt_xent_loss,
    "SupConLoss": functional.sup_con_loss,
    "MultiSimilarityLoss": functional.multi_similarity_loss,
    "CircleLoss": functional.circle_loss,
}


@EAGER
def test_functional_forms(name: str, backend: str) -> None:
    function, module = FUNCTIONS[name], getattr(losses, name)(**OPTIONS[name])
    references = dict(zip(("ref_emb", "ref_labels"), REFERENCES, strict=True))
    for extra in ({}, references):
        assert_same(function(*BATCH, **OPTIONS[name], **extra), module(*BATCH, **extra))
        values = function(*BATCH, **OPTIONS[name], **extra, reduction="none")
        assert_same(values, module.loss_terms(*BATCH, **extra)["loss"]["losses"])


@pytest.mark.parametrize("references", [False, True], ids=["self", "references"])
def test_kernels_equal_eager(name: str, references: bool) -> None:
    """Value and gradients, in one walk and in two."""
    keys, key_labels = REFERENCES if references else (None, None)
    module = getattr(losses, name)()
    weights = torch.arange(200, dtype=torch.float64).cos()

    def reduced(rows: Tensor, keys: Tensor | None) -> Tensor:
        return module(rows, BATCH.labels, None, keys, key_labels)

    def weighted(rows: Tensor, keys: Tensor | None) -> Tensor:
        values = module.loss_terms(rows, BATCH.labels, None, keys, key_labels)["loss"]["losses"]
        return (values * weights[: len(values)]).sum()

    function = weighted if references else reduced
    found = {}
    for backend in ("eager", "triton"):
        with use_backend(backend):
            found[backend] = gradients(function, BATCH.rows, keys)
    assert_close(found["triton"], found["eager"], **EXACT)


# --- derivatives ---


@EAGER
@pytest.mark.parametrize("loss", ["NTXentLoss", "SupConLoss", "InfoNCELoss"])
@pytest.mark.parametrize("call", ["self", "references", "mined"])
@pytest.mark.parametrize("reduced", [True, False])
def test_gradcheck_with_a_learned_temperature(loss: str, call: str, reduced: bool, backend: str) -> None:
    """In rows, references and temperature."""
    if loss == "InfoNCELoss" and call == "mined":
        pytest.skip("it takes no indices")
    rows, labels = random_batch(7, 3, 2, n_lone=1)
    others, other_labels = random_batch(5, 3, 3, seed=3) if call == "references" else (None, None)
    indices = (torch.tensor([0, 0, 1]), torch.tensor([2, 2, 3]), torch.tensor([0, 4]), torch.tensor([1, 5]))

    def function(temperature: Tensor, rows: Tensor, *keys: Tensor) -> Tensor:
        module = getattr(losses, loss)(temperature)
        arguments = (
            rows,
            labels,
            indices if call == "mined" else None,
            keys[0] if keys else None,
            other_labels,
        )
        return module(*arguments) if reduced else module.loss_terms(*arguments)["loss"]["losses"]

    leaves = [torch.tensor(0.4, dtype=torch.float64), rows, *([] if others is None else [others])]
    assert torch.autograd.gradcheck(function, [leaf.requires_grad_() for leaf in leaves])


@pytest.mark.parametrize("loss", ["NTXentLoss", "SupConLoss", "InfoNCELoss", "MultiSimilarityLoss"])
def test_gradcheck_of_kernels(loss: str) -> None:
    """Along one direction; that of Circle is not the derivative of its value."""
    rows, labels = random_batch(5, 3, 2, n_lone=1)
    with use_backend("triton"):
        assert torch.autograd.gradcheck(
            lambda rows: getattr(losses, loss)()(rows, labels), rows.requires_grad_(), fast_mode=True
        )


@EAGER
@pytest.mark.parametrize("references", [False, True])
def test_gradcheck_of_multi_similarity(references: bool, backend: str) -> None:
    rows, labels = random_batch(7, 3, 2, n_lone=1)
    others, other_labels = random_batch(5, 3, 3, seed=3) if references else (None, None)

    def function(rows: Tensor, *keys: Tensor) -> Tensor:
        return losses.MultiSimilarityLoss()(rows, labels, None, *keys, *([other_labels] if keys else []))

    leaves = [rows] if others is None else [rows, others]
    assert torch.autograd.gradcheck(function, [leaf.requires_grad_() for leaf in leaves])


@EAGER
@pytest.mark.parametrize("loss", ["NTXentLoss", "SupConLoss", "InfoNCELoss"])
def test_a_learned_temperature_is_a_parameter(loss: str, backend: str) -> None:
    """The value of the number, up to another order of divisions, and the gradient of the reference."""
    module = getattr(losses, loss)(nn.Parameter(torch.tensor(0.2, dtype=torch.float64)))
    assert [name for name, _ in module.named_parameters()] == ["temperature"]
    value = module(*BATCH)
    assert_close(value, getattr(losses, loss)(0.2)(*BATCH), **EXACT)
    (grad,) = torch.autograd.grad(value, list(module.parameters()))
    with use_backend("reference"):
        assert_close(grad, *torch.autograd.grad(module(*BATCH), list(module.parameters())), **EXACT)
    assert "learned" in repr(module)


# --- the primitive ---


@pytest.mark.parametrize("kind", ["linear", "circle"])
@pytest.mark.parametrize("towers", [False, True])
def test_pair_logsumexp(kind: str, towers: bool, backend: str) -> None:
    """Against dense sums, by autograd; two panels."""
    rows, labels = BATCH
    labels, order = torch.sort(labels)
    queries = rows[order] / 3
    keys = random_batch(22, 5, 1, seed=5).rows / 3 if towers else queries
    start, stop = torch.searchsorted(labels, labels), torch.searchsorted(labels, labels, right=True)
    maps = ((-8.0, 2.0, 0.3), (5.0, 1.0, 0.5))
    place = torch.arange(22)

    def streamed(queries: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
        options = {"positive_map": maps[0], "negative_map": maps[1], "exponent_map": kind, "position": place}
        other = keys[0] if keys else queries
        return pair_logsumexp(queries, other, start, stop - start, memory_budget=11 * 22 * 8, **options)

    def dense(queries: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
        s = queries @ (keys[0] if keys else queries).T
        same = labels[:, None] == labels
        positive = same & ~torch.eye(22, dtype=torch.bool)
        sums = []
        for mask, (scale, offset, width) in zip((positive, ~same), maps, strict=True):
            x = scale * s + offset
            if kind == "circle":
                x = x * torch.relu(x / abs(scale) + width).detach()
            some = mask.any(1)
            x = torch.where(mask | ~some[:, None], x, -torch.inf)
            sums.append(torch.where(some, torch.logsumexp(x, 1), -torch.inf))
        return *sums, s[positive]

    def weighted(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
        def total(*tensors: Tensor) -> Tensor:
            parts = (part.clamp(min=-1e3) for part in function(*tensors))
            return torch.stack([(part * torch.arange(len(part)).cos()).sum() for part in parts]).sum()

        return total

    tensors = [queries, keys] if towers else [queries]
    assert_close(list(streamed(*tensors)), list(dense(*tensors)), **EXACT)
    assert_close(gradients(weighted(streamed), *tensors), gradients(weighted(dense), *tensors), **EXACT)


def test_pair_logsumexp_refuses_an_unknown_map() -> None:
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="exponent_map is 'square'"):
        pair_logsumexp(torch.ones(1, 2), torch.ones(1, 2), one, one, exponent_map="square")


# --- InfoNCE ---


def cross_entropy(queries: Tensor, keys: Tensor, temperature: float = 0.05) -> Tensor:
    logits = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T / temperature
    return F.cross_entropy(logits, torch.arange(len(queries)))


KEYS = random_batch(22, 5, 1, seed=7).rows
EXTRA = random_batch(6, 5, 1, seed=8).rows


@EAGER
@pytest.mark.parametrize("positives", ["mean", "sum"])
def test_info_nce_is_a_cross_entropy(positives: str, backend: str) -> None:
    """With keys beyond the queries as hard negatives."""
    keys = torch.cat([KEYS, EXTRA])
    module = losses.InfoNCELoss(positives=positives)
    expected = gradients(cross_entropy, BATCH.rows, keys)
    assert_close(gradients(lambda q, k: module(q, ref_emb=k), BATCH.rows, keys), expected, **EXACT)
    assert_close(
        gradients(lambda q, k: functional.info_nce_loss(q, k, positives=positives), BATCH.rows, keys),
        expected,
        **EXACT,
    )


@EAGER
@pytest.mark.parametrize("directions", ["one", "both"])
def test_label_smoothing_is_that_of_cross_entropy(directions: str, backend: str) -> None:
    def expected(q: Tensor, k: Tensor) -> Tensor:
        logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T / 0.3
        sides = [logits, logits.T[: len(q)]][: 1 if directions == "one" else 2]
        target = torch.arange(len(q))
        return torch.stack([F.cross_entropy(side, target, label_smoothing=0.2) for side in sides]).mean()

    keys = torch.cat([KEYS, EXTRA])
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    right = gradients(expected, BATCH.rows, keys)
    for tau in (0.3, temperature):
        module = losses.InfoNCELoss(tau, directions=directions, label_smoothing=0.2)
        assert_close(gradients(lambda q, k, m=module: m(q, ref_emb=k), BATCH.rows, keys), right, **EXACT)
        terms = module.loss_terms(BATCH.rows, ref_emb=keys)
        assert_close(sum(term["losses"].mean() for term in terms.values()), right[0], **EXACT)


@EAGER
@pytest.mark.parametrize("references", [False, True])
def test_label_smoothing_of_labels(references: bool, backend: str) -> None:
    """With several positives, queries without one, and a learned temperature; against the reference."""
    keys, key_labels = REFERENCES if references else (None, None)

    def call(temperature: Tensor, q: Tensor, k: Tensor | None) -> Tensor:
        module = losses.InfoNCELoss(temperature, directions="both", label_smoothing=0.1)
        return module(q, BATCH.labels, None, k, key_labels)

    leaves = torch.tensor(0.2, dtype=torch.float64), BATCH.rows, keys
    actual = gradients(call, *leaves)
    with use_backend("reference"):
        assert_close(actual, gradients(call, *leaves), **EXACT)


@pytest.mark.parametrize("n_extra", [0, 6])
def test_info_nce_in_both_directions(n_extra: int, backend: str) -> None:
    """Extra keys have no loss of their own: the other direction is that of the keys of queries."""
    keys = torch.cat([KEYS, EXTRA[:n_extra]])

    def expected(q: Tensor, k: Tensor) -> Tensor:
        return (cross_entropy(q, k) + cross_entropy(k[: len(q)], q)) / 2

    module = losses.InfoNCELoss(directions="both")
    actual = gradients(lambda q, k: module(q, ref_emb=k), BATCH.rows, keys)
    assert_close(actual, gradients(expected, BATCH.rows, keys), **EXACT)
    terms = module.loss_terms(BATCH.rows, ref_emb=keys)
    assert list(terms) == ["loss", "reverse_loss"]
    assert_close(sum(term["losses"].mean() for term in terms.values()), actual[0], **EXACT)


@EAGER
@pytest.mark.parametrize("positives", ["mean", "sum"])
@pytest.mark.parametrize("directions", ["one", "both"])
def test_info_nce_of_labels(positives: str, directions: str, backend: str) -> None:
    """Several positives, queries without one, and keys without a query; against the reference."""
    module = losses.InfoNCELoss(positives=positives, directions=directions)

    def call(q: Tensor, k: Tensor | None) -> Tensor:
        return module(q, BATCH.labels, None, k, None if k is None else REFERENCES.labels)

    for keys in (REFERENCES.rows, None):
        actual = gradients(call, BATCH.rows, keys)
        with use_backend("reference"):
            assert_close(actual, gradients(call, BATCH.rows, keys), **EXACT)


def test_info_nce_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from checks import record_syncs

    use_backend("triton")
    syncs = record_syncs(monkeypatch)
    losses.InfoNCELoss(directions="both")(BATCH.rows.clone().requires_grad_(), ref_emb=KEYS).backward()
    assert syncs == []


# --- edges and errors ---


@EAGER
@pytest.mark.parametrize("loss", [*GOLDEN, "InfoNCELoss"])
@pytest.mark.parametrize("sizes", [(0, 0), (3, 0), (0, 3)])
def test_empty_sets(loss: str, sizes: tuple[int, int], backend: str) -> None:
    """A differentiable 0."""
    rows, keys = (torch.randn(size, 4, dtype=torch.float64, requires_grad=True) for size in sizes)
    labels, key_labels = (torch.zeros(size, dtype=torch.int64) for size in sizes)
    value = getattr(losses, loss)()(rows, labels, None, keys, key_labels)
    assert value == 0
    value.backward()
    assert rows.grad is not None
    assert not rows.grad.any()
    if loss != "InfoNCELoss":
        none = torch.zeros(0, dtype=torch.int64)
        assert getattr(losses, loss)()(rows, labels, (none,) * 4, keys, key_labels) == 0


@EAGER
def test_a_single_mined_triplet(name: str, backend: str) -> None:
    """Is a loss, and not 0 as in pytorch-metric-learning."""
    triplet = tuple(torch.tensor([index]) for index in (0, 1, 2))
    rows = F.normalize(BATCH.rows[:3], dim=1)
    expected = getattr(losses, name)()(rows, torch.tensor([0, 0, 1]))
    assert getattr(losses, name)()(rows, None, triplet) > 0
    assert expected > 0


def bad_calls() -> dict[str, tuple[type[Exception], str, Callable[[], Any]]]:
    rows, labels = E1
    keys = torch.ones(3, 2, dtype=torch.float64)
    info = losses.InfoNCELoss()
    return {
        "temperature": (ValueError, "temperature is 0", lambda: losses.NTXentLoss(0)),
        "text": (TypeError, "temperature must be a number", lambda: losses.SupConLoss("0.1")),
        "shape": (
            ValueError,
            r"temperature must be of shape \[\]",
            lambda: losses.InfoNCELoss(torch.ones(1)),
        ),
        "integer": (TypeError, "temperature must be .*int64", lambda: losses.NTXentLoss(torch.tensor(1))),
        "alpha": (ValueError, "alpha is 0", lambda: losses.MultiSimilarityLoss(0)),
        "base": (ValueError, "base is nan", lambda: losses.MultiSimilarityLoss(base=float("nan"))),
        "gamma": (ValueError, "gamma is -1", lambda: losses.CircleLoss(gamma=-1)),
        "positives": (ValueError, "positives is 'max'", lambda: losses.InfoNCELoss(positives="max")),
        "directions": (ValueError, "directions is 2", lambda: losses.InfoNCELoss(directions=2)),
        "smoothing": (ValueError, "label_smoothing is 1", lambda: losses.InfoNCELoss(label_smoothing=1)),
        "smoothed sum": (
            ValueError,
            "label_smoothing is 0.1 with positives='sum'",
            lambda: losses.InfoNCELoss(positives="sum", label_smoothing=0.1),
        ),
        "labels": (ValueError, "labels are required", lambda: losses.NTXentLoss()(rows)),
        "ref_labels": (
            ValueError,
            "ref_labels are required",
            lambda: losses.CircleLoss()(rows, labels, None, keys),
        ),
        "width": (
            ValueError,
            r"ref_emb must have shape \[N, 2\]",
            lambda: losses.SupConLoss()(rows, labels, None, torch.ones(4, 3).double(), labels),
        ),
        "dtype": (
            ValueError,
            "ref_emb must be of torch.float64",
            lambda: losses.SupConLoss()(rows, labels, None, rows.float(), labels),
        ),
        "neither": (ValueError, "ref_emb or labels", lambda: info(rows)),
        "few": (ValueError, "at least 4 rows", lambda: info(rows, ref_emb=keys)),
        "one label": (ValueError, "ref_labels are required", lambda: info(rows, labels, None, rows)),
        "other label": (ValueError, "labels are required", lambda: info(rows, None, None, rows, labels)),
        "mined": (ValueError, "indices_tuple", lambda: info(rows, labels, (labels, labels, labels))),
        "none": (
            ValueError,
            "reduction is 'none'",
            lambda: functional.info_nce_loss(rows, rows, directions="both", reduction="none"),
        ),
    }


@pytest.mark.parametrize("call", list(bad_calls()))
def test_errors_name_the_argument(call: str) -> None:
    kind, text, function = bad_calls()[call]
    with pytest.raises(kind, match=text):
        function()


def test_half_of_a_batch_of_references(name: str, backend: str) -> None:
    """float16 queries and keys: the value in float32 of the same numbers, rounded once."""
    half = Batch(BATCH.rows.half(), BATCH.labels)
    keys = REFERENCES.rows.half()
    module = getattr(losses, name)()
    value = module(*half, None, keys, REFERENCES.labels)
    exact = module(half.rows.double(), half.labels, None, keys.double(), REFERENCES.labels)
    assert value.dtype == torch.float16
    assert_close(value.double(), exact, rtol=2.0**-10)
