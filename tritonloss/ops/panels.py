"""How many rows a panel has on a GPU, and what a walk over panels costs: pure functions of sizes and of a device.

A panel is a block of rows of the similarity matrix. Products, not the cube of a loss, take most of the time on a GPU,
and every panel reads all keys and reads and writes the gradient of all keys. So a panel is as tall as memory allows. On
a CPU a panel has the size of a cache instead, see `rows_per_block` of `tritonloss.ops.streaming`.
"""

from typing import NamedTuple

import torch

# Kernels address rows in units of this many elements, which keeps loads vectorised for every N.
ROW_STRIDE_UNIT = 16
# Tensor cores may round sums towards zero. That error grows with the length of a sum, where rounding to nearest grows
# with its root. So longer sums are cut, and float32 additions put them together. A cut of scores costs 8 bytes of
# memory traffic for each pair, and sums of 512 columns are as exact as those of IEEE (see bench.precision).
LONGEST_DOT = 512
LONGEST_SUM_OF_ROWS = 8192
# Beyond 4096 rows the keys are next to nothing beside the scores themselves (D = 512: 2.5 bytes a pair of about 25).
# From 2048 to 4096 a step gains a few percent, for which no more than a quarter of the budget is taken.
TALL, TALLEST = 2048, 4096
TALLEST_SHARE = 4
# Tiles of matrix products have 128 rows: a height that is no multiple wastes part of the last one.
TILE = 128
PROGRAMS_PER_MULTIPROCESSOR = 4
# A program that reads fewer keys spends its time on its beginning and end.
LEAST_KEYS = 1024


class Panels(NamedTuple):
    """The walk of Q queries over N keys.

    rows: of a panel; the last one may have fewer.
    n_panels: how many.
    key_split: programs that share the keys of one row in a forward launch.
    programs: of a forward launch, of a full panel: rows * key_split.
    bytes: of both buffers of a panel, the scores and their gradient.
    """

    rows: int
    n_panels: int
    key_split: int
    programs: int
    bytes: int


def plan_panels(
    n_queries: int, n_keys: int, itemsize: int, budget: int, multiprocessors: int, rows: int | None = None
) -> Panels:
    """The panels of a walk on a GPU.

    Both buffers of a panel fit the budget, unless one row of them does not. Up to 2048 rows are taken as far as that
    goes, and up to 4096 if they take a quarter of the budget at most. Panels differ by less than a tile of 128 rows
    from one another, where they are taller than that, but for the last.

    A launch needs 4 programs for each multiprocessor, one for each row. Where a panel has fewer rows, the keys of a row
    are split, into pieces of at least 1024. Kernels do not split keys yet: `key_split` says what they would gain from,
    and `programs` counts what would run then.

    Args:
        n_queries, n_keys: rows of the similarity matrix, and columns.
        itemsize: bytes of a similarity.
        budget: bytes for both buffers.
        multiprocessors: of the device.
        rows: a given height, in place of the one above.
    """
    row_bytes = 2 * itemsize * max(1, -(-n_keys // ROW_STRIDE_UNIT) * ROW_STRIDE_UNIT)
    if rows is None:
        rows = _height(n_queries, row_bytes, budget)
    rows = max(1, min(rows, n_queries))
    wanted = -(-PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // rows)
    key_split = max(1, min(wanted, n_keys // LEAST_KEYS))
    return Panels(rows, -(-n_queries // rows), key_split, rows * key_split, rows * row_bytes)


def _height(n_queries: int, row_bytes: int, budget: int) -> int:
    most = max(1, min(TALL, budget // row_bytes))
    most = max(most, min(TALLEST, budget // TALLEST_SHARE // row_bytes))
    if most >= n_queries:
        return n_queries
    if most < TILE:
        return most
    most -= most % TILE
    even = -(-n_queries // -(-n_queries // most))  # as many panels, of one height
    return min(most, -(-even // TILE) * TILE)


class ProductCost(NamedTuple):
    """What the products of `tritonloss.ops.products` take for rows of one dtype in one mode.

    score_products, gradient_products: products of the terms in one product of scores, and in one of the two products
        of their gradient.
    score_bytes: of an entry of a row, as the product of scores reads it.
    row_bytes, gradient_bytes: of an entry of a row, and of the gradient of the scores, as one product of the gradient
        reads them: each of its terms as often as there are products with it.
    operand_bytes: of an entry of a row, beside the rows themselves, while a call lasts; backward_bytes: those that only
        a backward pass adds.
    unit: what multiplies: "tensor" cores in half precision, "tf32", "float32" or "float64".
    """

    score_products: int
    gradient_products: int
    score_bytes: int
    row_bytes: int
    gradient_bytes: int
    operand_bytes: int
    backward_bytes: int
    unit: str


MODES = {
    ("ieee", torch.float64): ProductCost(1, 1, 8, 8, 8, 8, 0, "float64"),
    ("ieee", torch.float32): ProductCost(1, 1, 4, 4, 4, 4, 0, "float32"),
    ("tf32", torch.float32): ProductCost(1, 1, 4, 4, 4, 4, 0, "tf32"),
    ("split", torch.float32): ProductCost(3, 5, 6, 10, 10, 8, 6, "tensor"),
    ("split", torch.float16): ProductCost(1, 4, 2, 8, 8, 0, 4, "tensor"),
    ("split", torch.bfloat16): ProductCost(1, 2, 2, 4, 4, 2, 0, "tensor"),
}


def products_of(mode: str, dtype: torch.dtype) -> ProductCost:
    """The entry of MODES. float64 is IEEE in every mode, and half precision in IEEE or TF32 is converted to float32.

    Raises ValueError for another mode or dtype.
    """
    if dtype == torch.float64 and mode in ("ieee", "split", "tf32"):
        return MODES["ieee", dtype]
    if mode in ("ieee", "tf32") and dtype in (torch.float16, torch.bfloat16):
        return MODES[mode, torch.float32]
    if (mode, dtype) not in MODES:
        raise ValueError(
            f"products is {mode!r} and dtype {dtype}: expected ieee, split or tf32, and a floating dtype"
        )
    return MODES[mode, dtype]


class Work(NamedTuple):
    """Floating point operations and bytes of device memory."""

    flop: int
    bytes: int


def score_work(panels: Panels, n_queries: int, n_keys: int, dimension: int, of: ProductCost, l2: int) -> Work:
    """Of the product of scores: 2 Q N D flop for each product of terms; every score is written.

    Every panel reads the keys, once if they outgrow L2 (`l2` bytes), else all panels together.
    A row of more than LONGEST_DOT entries is multiplied in pieces by tensor cores: scores are read and written again.
    """
    pairs, item = n_queries * n_keys, item_bytes(of)
    pieces = max(1, -(-dimension // LONGEST_DOT)) if of.unit == "tensor" else 1
    keys = n_keys * dimension * of.score_bytes
    reads = n_queries * dimension * of.score_bytes + keys * (panels.n_panels if keys > l2 else 1)
    return Work(2 * pairs * dimension * of.score_products, pairs * item * (2 * pieces - 1) + reads)


def gradient_work(
    panels: Panels,
    n_queries: int,
    n_keys: int,
    dimension: int,
    of: ProductCost,
    l2: int,
    *,
    meet_themselves: bool,
) -> Work:
    """Of both products of the gradient: 2 Q N D flop for each product of terms, twice.

    Once only, of the gradient plus its transpose, for a single panel of rows that meet themselves; then the sum takes
    a pass of 5 N^2 entries.

    Each product of terms reads the gradient of the scores once, reads rows, and reads and writes the sums that it adds
    to. Those of the keys are read and written for every panel, but once where they and the keys fit L2 (`l2` bytes);
    those of the queries for every LONGEST_SUM_OF_ROWS keys.
    """
    pairs, sums = n_queries * n_keys, 2 * item_bytes(of) * of.gradient_products
    resident = n_keys * dimension * (of.row_bytes + item_bytes(of)) <= l2
    pieces = max(1, -(-n_keys // LONGEST_SUM_OF_ROWS)) if of.unit == "tensor" else 1
    keys = n_keys * dimension * (of.row_bytes + sums) * (1 if resident else panels.n_panels)
    queries = n_queries * dimension * (of.row_bytes + sums * pieces)
    if meet_themselves and panels.n_panels == 1:
        flop = 2 * pairs * dimension * of.gradient_products
        return Work(flop, pairs * (of.gradient_bytes + 5 * item_bytes(of)) + queries)
    return Work(4 * pairs * dimension * of.gradient_products, 2 * pairs * of.gradient_bytes + keys + queries)


def item_bytes(of: ProductCost) -> int:
    """Of a score, and of every sum."""
    return 8 if of.unit == "float64" else 4
