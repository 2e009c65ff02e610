"""HistogramLoss: golden values, the peer, which pairs count, mined tuples, other distances, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import assert_close, assert_same, value_and_grad
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DUP, E1, E3, E4, EQ, GOLDEN_A, GOLDEN_B, Batch, batch, directions, random_batch
from pytorch_metric_learning import distances as pml_distances
from pytorch_metric_learning import losses as pml_losses
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tritonloss import use_backend
from tritonloss.distances import CosineSimilarity, DotProductSimilarity, LpDistance
from tritonloss.functional import histogram_loss
from tritonloss.losses import HistogramLoss
from tritonloss.ops import distance_histogram, pair_histogram, soft_histogram
from tritonloss.reducers import MeanReducer
from tritonloss.types import PairIndices, TripletIndices

TRIPLETS = ((0, 0, 1), (4, 8, 5), (1, 2, 3))


@pytest.fixture(params=["eager", "triton", "reference"])
def any_backend(request: pytest.FixtureRequest, clean_state: None) -> str:
    use_backend(request.param)
    return request.param


@pytest.fixture
def double_default() -> Iterator[None]:
    """The peer's histogram loses 5e-7 under another default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def near(actual: Tensor, expected: float, atol: float) -> bool:
    return actual.item() == pytest.approx(expected, rel=0, abs=atol)


def indices(*entries: Any, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    return tuple(torch.tensor(entry, dtype=torch.int64, device=device) for entry in entries)


def by_definition(rows: Tensor, labels: Tensor, bins: int) -> float:
    """All triplets of the batch, one pair after the other, in Python numbers."""
    unit = torch.nn.functional.normalize(rows.double(), dim=1)
    similarity, label, n = (unit @ unit.T).clamp(-1, 1).tolist(), labels.tolist(), len(labels)
    positives, negatives = set(), set()
    for a in range(n):
        for p in range(n):
            for q in range(n):
                if p != a and label[p] == label[a] != label[q]:
                    positives.add(frozenset((a, p)))
                    negatives.add(frozenset((a, q)))
    densities = []
    for pairs in (positives, negatives):
        density = [0.0] * (bins + 1)
        for i, j in map(sorted, pairs):
            place = (similarity[i][j] + 1) * bins / 2
            node = min(int(place), bins - 1)
            density[node] += (1 - (place - node)) / len(pairs)
            density[node + 1] += (place - node) / len(pairs)
        densities.append(density)
    running = [sum(densities[0][: r + 1]) for r in range(bins + 1)]
    return sum(negative * phi for negative, phi in zip(densities[1], running, strict=True))


# --- values ---


@pytest.mark.parametrize(
    ("given_batch", "bins", "expected"),
    [
        (E1, 10, 0.25),
        (E3, 10, 0.463011774),
        (E3, 100, 0.435515311),
        (E4, 100, 0.5),
        (DUP, 10, 0),
        (DUP, 100, 0),
        (EQ, 10, 1.0),
        (EQ, 100, 1.0),
        (batch([(1, 0), (-1, 0), (1, 0), (-1, 0)], [0, 0, 1, 1]), 10, 1.0),
        (E1.labelled(0, 0, 1, 2), 10, 0.25),  # by the rule of triplets; 0.4 with the pair of lone rows
        (E1.labelled(5, 5, -1, -1), 10, 0.25),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_values(
    given_batch: Batch, bins: int, expected: float, dtype: torch.dtype, any_backend: str, device: torch.device
) -> None:
    """Printed to nine digits. In float32 the place among the nodes is off by up to 3 bins 2^-24."""
    value, grad = value_and_grad(HistogramLoss(bins), *given_batch.on(device, dtype))
    assert value.dtype == dtype
    assert near(value, expected, atol=1e-9 if dtype == torch.float64 else 4 * bins * 2.0**-23)
    assert grad.isfinite().all()


@pytest.mark.parametrize(
    ("given_batch", "bins", "expected", "norm"),
    [
        (GOLDEN_A, 10, 0.2233402605, 0.0443561541),
        (GOLDEN_A, 100, 2 / 9, 0),
        (GOLDEN_B, 10, 0.7292247597, 0.0495977969),
        (GOLDEN_B, 100, 0.7049579677, 0.2386085696),
    ],
)
def test_golden_batches(
    given_batch: Batch, bins: int, expected: float, norm: float, any_backend: str, device: torch.device
) -> None:
    value, grad = value_and_grad(HistogramLoss(bins), *given_batch.on(device))
    assert near(value, expected, atol=6e-11)
    assert near(grad.norm(), norm, atol=6e-11)


# What pytorch-metric-learning does, and torch warns of from some release after 2.6 on.
lists_as_indices = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")


@lists_as_indices
@pytest.mark.parametrize("bins", [1, 10, 100, 4096])
def test_agrees_with_pytorch_metric_learning(
    bins: int, any_backend: str, device: torch.device, double_default: None
) -> None:
    rows, labels = random_batch(40, 8, 9, n_lone=6)
    ours = value_and_grad(HistogramLoss(bins), rows.to(device), labels.to(device))
    peer = value_and_grad(pml_losses.HistogramLoss(n_bins=bins), rows, labels)
    for a, b in zip(ours, peer, strict=True):
        assert_close(a, b, atol=1e-12)


@settings(max_examples=20)
@given(
    labels=st.lists(st.integers(-2, 3), max_size=9),
    bins=st.integers(1, 12),
    backend=st.sampled_from(["eager", "triton", "reference"]),
)
def test_any_labels_agree_with_the_definition(labels: list[int], bins: int, backend: str) -> None:
    rows = torch.randn(len(labels), 3, generator=torch.Generator().manual_seed(bins), dtype=torch.float64)
    target = torch.tensor(labels, dtype=torch.int64)
    with use_backend(backend):
        assert near(HistogramLoss(bins)(rows, target), by_definition(rows, target, bins), atol=1e-12)


def test_gradcheck(backend: str, device: torch.device) -> None:
    """Random similarities are farther from the nodes than the step of 1e-6."""
    rows, labels = random_batch(7, 3, 2, n_lone=1).on(device)
    assert torch.autograd.gradcheck(
        lambda x: HistogramLoss(5)(x, labels), rows, fast_mode=backend == "triton"
    )


@pytest.mark.parametrize("n", [1300, 2100])
def test_large_batches_against_a_chunked_reference(n: int, device: torch.device) -> None:
    """The chunks are float64. A float32 similarity is off by D roundings, which the masses of many pairs average."""
    rows, labels = random_batch(n, 16, n // 4, seed=n)
    value, grad = value_and_grad(HistogramLoss(20), rows.float().to(device), labels.to(device))
    unit = torch.nn.functional.normalize(rows.float().double(), dim=1)
    has_positive = (labels[:, None] == labels).sum(1) > 1
    counts = torch.zeros(2, 21, dtype=torch.float64)
    for first in range(0, n, 512):
        mine = slice(first, min(first + 512, n))
        place = (unit[mine] @ unit.T).clamp(-1, 1) * 10 + 10
        same = labels[mine, None] == labels
        behind = torch.arange(n) > torch.arange(n)[mine, None]
        allowed = behind & (has_positive[mine, None] | has_positive)
        for kind, chosen in enumerate((same & behind, ~same & allowed)):
            node = place[chosen].floor().clamp(max=19)
            rest = place[chosen] - node
            counts[kind] += torch.bincount(node.long(), 1 - rest, minlength=21)
            counts[kind] += torch.bincount(node.long() + 1, rest, minlength=21)
    density = counts / counts.sum(1, keepdim=True)
    assert_close(value, (density[1] * density[0].cumsum(0)).sum(), rtol=1e-5)
    assert grad.isfinite().all()
    assert grad.abs().max() > 0


# --- which pairs count ---


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [7, 7, 7, 7]])
def test_no_triplet_gives_a_zero_in_the_graph(
    labels: list[int], any_backend: str, device: torch.device
) -> None:
    value, grad = value_and_grad(HistogramLoss(), *E1.labelled(*labels).on(device))
    assert value == 0
    assert_same(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("n", [0, 1])
def test_empty_and_single(n: int, any_backend: str, device: torch.device) -> None:
    rows, labels = torch.ones(n, 8, device=device), torch.zeros(n, dtype=torch.int64, device=device)
    value, grad = value_and_grad(HistogramLoss(), rows, labels)
    assert value == 0
    assert_same(grad, torch.zeros(n, 8, device=device))


def test_order_scale_and_names_do_not_matter(any_backend: str, device: torch.device) -> None:
    rows, labels = random_batch(24, 5, 5, n_lone=4)
    expected = HistogramLoss(10)(rows.to(device), labels.to(device))
    place = torch.randperm(24)
    changed = HistogramLoss(10)((3 * rows)[place].to(device), (-9 * labels + 4)[place].to(device))
    assert_close(changed, expected, atol=1e-12)


@pytest.mark.parametrize("form", [tuple, list, lambda t: TripletIndices(*t)])
def test_triplets(form: Callable[..., Any], any_backend: str, device: torch.device) -> None:
    mined = form(indices(*TRIPLETS, device=device))
    loss = HistogramLoss()
    value, grad = value_and_grad(lambda x, y: loss(x, y, mined), *GOLDEN_A.on(device))
    assert near(value, 2 / 3, atol=1e-12)
    assert near(grad.norm(), 0, atol=1e-12)
    assert_same(histogram_loss(GOLDEN_A.rows.to(device), indices_tuple=mined), value)


def test_a_pair_counts_once_in_either_order(any_backend: str, device: torch.device) -> None:
    rows = random_batch(8, 3, 2).rows.to(device)
    once = indices((0, 2), (1, 3), (4, 5), device=device)
    often = indices((0, 1, 2, 0, 3, 2), (1, 0, 3, 1, 2, 3), (4, 4, 5, 4, 5, 5), device=device)
    # (1, 4) and (3, 5) are further pairs: they come with the anchors 1 and 3.
    more = indices((0, 2), (1, 3), (0, 2, 1, 3), (4, 5, 4, 5), device=device)
    joined = indices((0, 1, 2, 3), (1, 0, 3, 2), (0, 2, 1, 3, 4), (4, 5, 4, 5, 0), device=device)
    loss = HistogramLoss(10)
    assert loss(rows, None, once) != loss(rows, None, often)
    # In `more` the anchors 1 and 3 have no positive, so that their negatives drop out.
    assert_same(loss(rows, None, more), loss(rows, None, once))
    assert_same(loss(rows, None, joined), loss(rows, None, often))


@lists_as_indices
@pytest.mark.parametrize("seed", range(3))
def test_mined_tuples_agree_with_pytorch_metric_learning(
    seed: int, any_backend: str, device: torch.device, double_default: None
) -> None:
    rows, labels = random_batch(20, 6, 4, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(20, (4, 30), generator=generator)
    same, other = labels[pick[0]] == labels[pick[1]], labels[pick[2]] != labels[pick[3]]
    pairs = (pick[0][same], pick[1][same], pick[2][other], pick[3][other])
    a, p, n = pick[0][same][:, None], pick[1][same][:, None], pick[2][other][None]
    triplets = tuple(t.expand(a.shape[0], n.shape[1]).flatten() for t in (a, p, n))
    keep = (pairs[0] != pairs[1]).nonzero()[:, 0]  # a row with itself has s = 1, which crashes the peer
    pairs = (pairs[0][keep], pairs[1][keep], *pairs[2:])
    triplets = tuple(t[(triplets[0] != triplets[1]) & (triplets[0] != triplets[2])] for t in triplets)
    for mined in (pairs, triplets):
        ours = value_and_grad(
            lambda x, y, mined=mined: HistogramLoss(10)(x, y, tuple(t.to(device) for t in mined)),
            rows.to(device),
            labels.to(device),
        )
        peer = value_and_grad(
            lambda x, y, mined=mined: pml_losses.HistogramLoss(n_bins=10)(x, y, mined), rows, labels
        )
        for ours_part, peer_part in zip(ours, peer, strict=True):
            assert_close(ours_part, peer_part, atol=1e-12)


@pytest.mark.parametrize(
    "mined", [((), (), ()), ((), (), (), ()), ((0,), (1,), (), ()), ((0,), (1,), (2,), (3,))]
)
def test_tuples_without_a_triplet(mined: Any, any_backend: str, device: torch.device) -> None:
    given_indices = indices(*mined, device=device)
    value, grad = value_and_grad(lambda x, y: HistogramLoss()(x, y, given_indices), *E1.on(device))
    assert value == 0
    assert_same(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("index", [4, -1, 2**31 - 1])
def test_an_index_that_is_no_row(
    index: int, dtype: torch.dtype, any_backend: str, device: torch.device
) -> None:
    """An error that names the entry: what a tuple of another batch, or of a reference set, gives."""
    rows, labels = E1.on(device)
    right = [torch.tensor([0, 2], dtype=dtype, device=device) for _ in range(4)]
    for kind in (TripletIndices, PairIndices):
        for place, name in enumerate(kind._fields):
            mined = right[: len(kind._fields)]
            mined[place] = torch.tensor([1, index], dtype=dtype, device=device)
            with pytest.raises(ValueError, match=rf"{name} must be rows 0 \.\. 3 of the batch, got {index}$"):
                HistogramLoss()(rows, labels, tuple(mined))


def test_int32_indices(any_backend: str, device: torch.device) -> None:
    loss, rows = HistogramLoss(), E3.rows.to(device)
    wide = PairIndices(*indices((0, 3), (1, 4), (0, 3), (3, 1), device=device))
    assert_same(loss(rows, None, wide), loss(rows, None, tuple(t.int() for t in wide)))


# --- distances ---


class Learned(torch.nn.Module):
    """A similarity in [-1, 1] with a parameter."""

    is_inverted = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.8, dtype=torch.float64))

    def forward(self, query: Tensor, ref: Tensor | None = None) -> Tensor:
        return torch.tanh(self.scale * (query @ (query if ref is None else ref).T))


DISTANCES: dict[str, Callable[[], Any]] = {
    "cosine by another name": lambda: DotProductSimilarity(normalize_embeddings=True),
    "cosine squared": lambda: CosineSimilarity(power=2),
    "p = 3 norm": lambda: LpDistance(p=3, power=0.3),
    "peer's dot product": lambda: pml_distances.DotProductSimilarity(),
    "learned": Learned,
}


@pytest.mark.parametrize("mined", [None, ((0, 0, 5, 6, 6), (1, 3, 7, 7, 2), (4, 5, 6, 0, 9))])
@pytest.mark.parametrize("make", DISTANCES.values(), ids=DISTANCES.keys())
@pytest.mark.parametrize("budget", [1 << 20, 400], ids=["one block", "blocks"])
def test_any_distance(
    make: Callable[[], Any], mined: Any, budget: int, backend: str, device: torch.device
) -> None:
    distance = make().to(device)
    loss = HistogramLoss(9, distance=distance, memory_budget=budget)
    mined = None if mined is None else indices(*mined, device=device)
    rows, labels = random_batch(14, 4, 3, n_lone=2).on(device)
    results = []
    for name in (backend, "reference"):
        use_backend(name)
        distance.zero_grad()
        value, grad = value_and_grad(lambda x, y: loss(x, y, mined), rows, labels)
        results.append([value, grad, *(p.grad for p in distance.parameters())])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, atol=1e-12)


def test_the_peers_cosine_is_streamed(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, labels = E3.on(device)
    expected = HistogramLoss()(rows, labels)
    distance = pml_distances.CosineSimilarity()
    monkeypatch.setattr(type(distance), "compute_mat", None)
    assert_same(HistogramLoss(distance=distance)(rows, labels), expected)


def test_distance_and_pair_histograms_of_the_dot_product(backend: str, device: torch.device) -> None:
    """The same pairs by three ways; `pair_histogram` in chunks of 4."""
    rows = torch.nn.functional.normalize(random_batch(10, 4, 1).rows).to(device)
    start, count = torch.zeros(2, 10, dtype=torch.int64, device=device).unbind()
    start, count = start + 2, count + 3
    first, second = torch.ones(10, 10, dtype=torch.bool).triu(1).nonzero().T.to(device)
    positive = (second >= 2) & (second < 5)
    left, right = (torch.cat([t[positive], t[~positive]]) for t in (first, second))
    by_product = soft_histogram(rows, rows, start, count, 6)
    by_distance = distance_histogram(rows, lambda q, k: q @ k.T, start, count, 6, memory_budget=3 * 80)
    by_pairs = pair_histogram(rows, left, right, int(positive.sum()), 6, memory_budget=4 * 32)
    for a, b, c in zip(by_product, by_distance, by_pairs, strict=True):
        assert_close(b, a, atol=1e-12)
        assert_close(c, a, atol=1e-12)


def test_second_derivative(backend: str, device: torch.device) -> None:
    rows, labels = E3.on(device)
    for distance in (CosineSimilarity(), DotProductSimilarity(normalize_embeddings=True)):
        (grad,) = torch.autograd.grad(
            HistogramLoss(10, distance=distance)(rows, labels), rows, create_graph=True
        )
        with pytest.raises(RuntimeError, match="second derivative"):
            grad.square().sum().backward()
    use_backend("reference")
    (grad,) = torch.autograd.grad(HistogramLoss(10)(rows, labels), rows, create_graph=True)
    grad.square().sum().backward()
    assert rows.grad is not None


# --- dtypes, memory, runs ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype, any_backend: str, device: torch.device) -> None:
    """The value is that of the rounded rows, itself rounded once; so is the gradient of each row."""
    rows, labels = random_batch(20, 6, 4, n_lone=2).on(device, dtype)
    value, grad = value_and_grad(HistogramLoss(10), rows, labels)
    exact, exact_grad = value_and_grad(HistogramLoss(10), rows.double(), labels)
    assert value.dtype == grad.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert_close(value, exact, atol=eps)
    assert_close(grad, exact_grad, atol=2 * eps * float(exact_grad.abs().max()))


def test_autocast_stays_in_float32(any_backend: str, device: torch.device) -> None:
    rows, labels = E3.on(device, torch.float32)
    for distance in (CosineSimilarity(), DotProductSimilarity(normalize_embeddings=True)):
        loss = HistogramLoss(10, distance=distance)
        leaf = rows.detach().clone().requires_grad_()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            inside = loss(leaf, labels)
        inside.backward()
        for a, b in zip((inside.detach(), leaf.grad), value_and_grad(loss, rows, labels), strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("mined", [None, ((0, 1), (1, 0), (2, 3))])
@pytest.mark.parametrize("distance", [CosineSimilarity(), DotProductSimilarity(normalize_embeddings=True)])
def test_nan_gives_nan(mined: Any, distance: Any, any_backend: str, device: torch.device) -> None:
    rows = E1.rows.clone()
    rows[2, 1] = torch.nan
    mined = None if mined is None else indices(*mined, device=device)
    loss = HistogramLoss(10, distance=distance)
    value, _ = value_and_grad(lambda x, y: loss(x, y, mined), rows.to(device), E1.labels.to(device))
    assert value.isnan()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool])
def test_label_dtypes(dtype: torch.dtype, any_backend: str, device: torch.device) -> None:
    assert near(HistogramLoss(10)(E1.rows.to(device), E1.labels.to(device, dtype)), 0.25, atol=1e-12)


@pytest.mark.parametrize("mined", [False, True])
def test_same_bits_in_every_run(mined: bool, backend: str, device: torch.device) -> None:
    torch.use_deterministic_algorithms(True)
    rows, labels = random_batch(12, 4, 3, n_lone=1).on(device, torch.float32)
    chosen = (
        indices((0, 1, 2, 3, 4) * 4, (5, 6, 7, 8, 9) * 4, tuple(range(10)) * 2, device=device)
        if mined
        else None
    )
    first = value_and_grad(lambda x, y: HistogramLoss()(x, y, chosen), rows, labels)
    for _ in range(19 if device.type == "cuda" else 2):
        again = value_and_grad(lambda x, y: HistogramLoss()(x, y, chosen), rows, labels)
        for a, b in zip(again, first, strict=True):
            assert_same(a, b)


def test_strides_and_backward_twice(any_backend: str, device: torch.device) -> None:
    rows, labels = E3.on(device)
    value, grad = value_and_grad(HistogramLoss(10), rows, labels)
    for other in (
        rows.detach().new_empty(6, 8)[:, 2:4].copy_(rows.detach()),
        rows.detach().t().contiguous().t(),
    ):
        leaf = other.requires_grad_()
        before = leaf.detach().clone()
        loss = HistogramLoss(10)(leaf, labels)
        grads = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2)]
        assert_close(loss, value, atol=1e-14)
        assert_close(grads[0], grad, atol=1e-13)
        assert_same(*grads)
        assert_same(leaf.detach(), before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, backend: str, device: torch.device) -> None:
    rows, labels = E3.on(device)
    expected = value_and_grad(HistogramLoss(10), rows, labels)
    got = value_and_grad(
        lambda x, y: torch.utils.checkpoint.checkpoint(HistogramLoss(10), x, y, use_reentrant=reentrant),
        rows,
        labels,
    )
    for a, b in zip(got, expected, strict=True):
        assert_same(a, b)


def test_without_grad(any_backend: str, device: torch.device) -> None:
    rows, labels = E1.rows.to(device), E1.labels.to(device)
    assert near(HistogramLoss(10)(rows, labels), 0.25, atol=1e-12)
    with torch.no_grad():
        assert near(HistogramLoss(10)(rows.requires_grad_(), labels), 0.25, atol=1e-12)


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about itself
def test_compiled_equals_eager_for_many_sizes_in_two_builds(compiler: None) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    loss = HistogramLoss(10)
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for n in (24, 23, 40, 17, 31, 64):
        rows, labels = random_batch(n, 6, max(1, n // 3), n_lone=2, seed=n)
        for a, b in zip(
            value_and_grad(compiled, rows, labels), value_and_grad(loss, rows, labels), strict=True
        ):
            assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert counter.frame_count <= 2


@pytest.mark.filterwarnings("ignore")  # torch.compile warns where it leaves its graph
def test_compiled_with_a_distance_or_a_tuple(compiler: None) -> None:
    rows, labels = random_batch(12, 4, 3)
    loss = HistogramLoss(10, distance=DotProductSimilarity(normalize_embeddings=True))
    compiled = torch.compile(loss, backend="eager")
    for mined in (None, indices(*TRIPLETS)):
        expected = value_and_grad(lambda x, y, mined=mined: loss(x, y, mined), rows, labels)
        got = value_and_grad(lambda x, y, mined=mined: compiled(x, y, mined), rows, labels)
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b, rtol=1e-12, atol=1e-12)


# --- the module ---


def test_terms_and_regularizer(any_backend: str, device: torch.device) -> None:
    loss = HistogramLoss(10, embedding_regularizer=lambda x: x.norm(), embedding_reg_weight=0.5)
    rows, labels = E1.rows.to(device), E1.labels.to(device)
    terms = loss.loss_terms(rows, labels)
    assert set(terms) == {"loss", "embedding_reg_loss"}
    assert terms["loss"]["indices"] is None
    assert near(terms["loss"]["losses"], 0.25, atol=1e-12)
    assert near(loss(rows, labels), 0.25 + 0.5 * 2, atol=1e-12)


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "save"])
def test_copies(copied: str, device: torch.device) -> None:
    loss = HistogramLoss(10)
    loss(E1.rows.to(device), E1.labels.to(device))
    buffer = io.BytesIO()
    torch.save(loss, buffer)
    buffer.seek(0)
    other = {
        "deepcopy": lambda: copy.deepcopy(loss),
        "pickle": lambda: pickle.loads(pickle.dumps(loss)),
        "save": lambda: torch.load(buffer, weights_only=False),
    }[copied]()
    assert near(other(E1.rows.to(device), E1.labels.to(device)), 0.25, atol=1e-12)
    assert loss.state_dict() == {}
    assert "num_bins=10" in repr(other)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_bins": True}, TypeError, "num_bins must be an int, got bool"),
        ({"num_bins": 2.5}, TypeError, "num_bins must be an int, got float"),
        ({"num_bins": 0}, ValueError, "num_bins is 0"),
        ({"reducer": MeanReducer()}, TypeError, "reducer"),
        ({"distance": CosineSimilarity}, TypeError, "pass an instance"),
        ({"distance": torch.matmul}, TypeError, "is_inverted"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        HistogramLoss(**options)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"labels": None}, ValueError, "labels or an indices_tuple"),
        ({"labels": E1.labels[:3]}, ValueError, r"labels must have shape \[4\]"),
        ({"labels": E1.labels[:, None]}, ValueError, r"labels must have shape \[4\]"),
        ({"labels": E1.labels.double()}, TypeError, "integer"),
        ({"embeddings": E1.rows.long()}, TypeError, "floating"),
        ({"embeddings": E1.rows[0]}, ValueError, r"\[N, D\]"),
        ({"ref_emb": E1.rows}, ValueError, "does not support ref_emb"),
        ({"indices_tuple": (E1.labels, E1.labels)}, ValueError, "3 tensors"),
        ({"indices_tuple": tuple(E1.labels.double() for _ in range(3))}, TypeError, "int64"),
    ],
)
def test_bad_calls(change: dict[str, Any], error: type[Exception], text: str, any_backend: str) -> None:
    with pytest.raises(error, match=text):
        HistogramLoss()(**{"embeddings": E1.rows, "labels": E1.labels, **change})
    if "ref_emb" not in change:
        with pytest.raises(error, match=text):
            histogram_loss(**{"embeddings": E1.rows, "labels": E1.labels, **change})


def test_a_distance_of_the_wrong_shape(backend: str, device: torch.device) -> None:
    class Wrong(CosineSimilarity):
        def forward(self, query: Tensor, ref: Tensor | None = None) -> Tensor:
            return query.sum(1)

    with pytest.raises(ValueError, match=r"distance must return shape \[6, 6\], got \[6\]"):
        HistogramLoss(distance=Wrong())(*E3.on(device))


def test_far_classes_cost_nothing_and_crossed_ones_do() -> None:
    apart, crossed = directions(0, 10, 170, 180), directions(0, 170, 10, 180)
    assert HistogramLoss()(*batch(apart, [0, 0, 1, 1])) == 0
    assert HistogramLoss()(*batch(crossed, [0, 0, 1, 1])) >= 0.5
