"""The walk over row blocks of a similarity matrix that is never held as a whole unless it fits the memory budget."""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonloss.layout import Positives

ENVIRONMENT_VARIABLE = "TRITONLOSS_MEMORY_BUDGET"
MEBIBYTE = 1 << 20
# A block is written by a GEMM and read by a reduction; in the backward pass its gradient lies beside it, and two GEMMs
# read that. Half of the last-level cache each, and most of both is still there. A larger block costs memory bandwidth
# only; below 16 MiB, which take 8 us at 2 TB/s, the launches cost as much. So a block on CUDA is half of the L2 cache
# (50 MB on H100) within these limits; ROCm reports the cache of one die. On the CPU that was measured, with 32 MiB of
# last-level cache, PNP of 4096 rows takes 1.1 times as long with blocks of 2 MiB, and no less with 8 than with 4.
BLOCK_BYTES = {"cpu": 4 * MEBIBYTE, "cuda": 64 * MEBIBYTE}
LEAST_CUDA_BLOCK_BYTES = 16 * MEBIBYTE
# Fewer rows than this starve the GEMM and leave multiprocessors without a program.
MIN_ROWS = {"cpu": 16, "cuda": 64}
# Kernels address rows in units of this many elements, which keeps loads vectorised for every N.
ROW_STRIDE_UNIT = 16


def budget_bytes(device: torch.device, requested: int | None = None) -> int:
    """Bytes that one loss call may hold for similarities: the argument, TRITONLOSS_MEMORY_BUDGET, or the default.

    The default is 256 MiB on CPU and a sixteenth of the device's memory on CUDA. Raises ValueError below 1.
    """
    source = "memory_budget"
    if requested is None and (text := os.environ.get(ENVIRONMENT_VARIABLE)):
        source = ENVIRONMENT_VARIABLE
        if not text.isdecimal():
            raise ValueError(f"{source} is {text!r}: expected a number of bytes")
        requested = int(text)
    if requested is None:
        if device.type == "cuda":
            return torch.cuda.get_device_properties(device).total_memory // 16
        return 256 * MEBIBYTE
    if requested < 1:
        raise ValueError(f"{source} is {requested}: expected at least 1 byte")
    return requested


def keeps_similarity(rows: int, columns: int, itemsize: int, budget: int) -> bool:
    """Whether the whole similarity matrix fits the budget and is kept for the backward pass."""
    return rows * columns * itemsize <= budget


def rows_per_block(rows: int, columns: int, itemsize: int, device: torch.device, budget: int) -> int:
    """Rows of one block: cache-sized, never more than the budget allows."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    row_bytes = max(1, columns * itemsize)
    target = max(_block_bytes(device) // row_bytes, MIN_ROWS[kind])
    return max(1, min(target, budget // row_bytes, rows))


def _block_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return BLOCK_BYTES["cpu"]
    half_of_cache = torch.cuda.get_device_properties(device).L2_cache_size // 2
    return min(max(half_of_cache, LEAST_CUDA_BLOCK_BYTES), BLOCK_BYTES["cuda"])


def padded_scores(rows: int, columns: int, like: Tensor) -> Tensor:
    """An uninitialised [rows, stride] that is contiguous; stride is `columns` rounded up to ROW_STRIDE_UNIT.

    What operators return: whether the [rows, columns] within is contiguous depends on the batch size, and
    torch.compile would compile for either case.
    """
    return like.new_empty(rows, -(-columns // ROW_STRIDE_UNIT) * ROW_STRIDE_UNIT)


def empty_scores(rows: int, columns: int, like: Tensor) -> Tensor:
    """An uninitialised [rows, columns] whose row stride is a multiple of ROW_STRIDE_UNIT."""
    return padded_scores(rows, columns, like)[:, :columns]


def given_or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    """The gradient of an output, contiguous; zeros where the output was not used."""
    return torch.zeros_like(like) if grad is None else grad.contiguous()


class Block(NamedTuple):
    """A slice of the queries and their pairs."""

    rows: slice
    positives: Positives


class PairSizes(NamedTuple):
    """Of each row block, the largest count and the number of pairs."""

    largest: list[int]
    total: list[int]


def pair_sizes(count: Tensor, block_rows: int) -> PairSizes:
    """The sizes of the blocks of block_rows queries with count [Q] pairs each, in one host sync."""
    n_blocks = -(-count.shape[0] // block_rows)
    padded = torch.nn.functional.pad(count, (0, n_blocks * block_rows - count.shape[0]))
    blocks = padded.view(n_blocks, block_rows)
    return PairSizes(*torch.stack([blocks.amax(1), blocks.sum(1)]).tolist())


class BlockPlan:
    """The row blocks of a call, and the place of every pair in the flat tensors [n_pairs]; `largest` bounds a class.

    start, count: [Q] int64. width: a bound of count. sizes: the largest count of each block and the number of pairs,
    which go before. Without either they are read from the device, in one host sync.
    """

    def __init__(
        self,
        start: Tensor,
        count: Tensor,
        block_rows: int,
        width: int | None = None,
        sizes: tuple[Sequence[int], int] | None = None,
    ) -> None:
        # Kernels read both with a stride of one element.
        self.start, self.count, self.block_rows = start.contiguous(), count.contiguous(), block_rows
        self.offset = torch.cumsum(count, 0) - count
        if sizes is not None:
            self.widths, self.n_pairs = list(sizes[0]), sizes[1]
        elif width is not None:
            self.widths = [width] * -(-len(count) // block_rows)
            self.n_pairs = len(count) * width
        else:
            read = pair_sizes(count, block_rows)
            self.widths, self.n_pairs = read.largest, sum(read.total)
        self.largest = max(self.widths, default=0)

    def __iter__(self) -> Iterator[Block]:
        """The blocks that have pairs."""
        for index, width in enumerate(self.widths):
            if width:
                rows = slice(index * self.block_rows, min((index + 1) * self.block_rows, len(self.count)))
                yield Block(rows, Positives(self.start[rows], self.count[rows], self.offset[rows], width))


def own_columns(positives: Positives, n_keys: int) -> tuple[Tensor, Tensor]:
    """The class range of each row as [rows, width], and which slots it uses; the others repeat its first column."""
    slot = torch.arange(positives.width, device=positives.start.device)
    used = slot < positives.count[:, None]
    columns = (positives.start[:, None] + slot).clamp_(max=n_keys - 1)
    return torch.where(used, columns, columns[:, :1]), used
