"""How each kernel is launched: its configurations, and the choice among them.

A configuration decides the order of sums, and so the last bits of a result. The choice is made by the first that has
one: a complete table of the device (`tritonloss.backends.tables`); timing at first use, whose result is kept on disk;
the static model. Timing is left out where its result could differ from that of another process or another run: among
the ranks of a group, with torch.use_deterministic_algorithms(True), and with TRITONLOSS_AUTOTUNE=0. So is then what
was timed before.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from tritonloss.backends import tables

ENVIRONMENT_VARIABLE = "TRITONLOSS_AUTOTUNE"
# Sums are kept until the end of a row, one for two keys: more float32 pairs a thread than this spill registers.
MAX_PAIRS_PER_THREAD = 64
# The arithmetic of float64 takes most of the registers itself. It is not tuned: no GPU is fast at it.
FLOAT64_PAIRS = 512
LANES = 32
# What a kernel is tuned for besides its constants, which are in capitals.
BUCKETS = ("n_bucket", "p_bucket")

CONFIGS: dict[str, list[dict[str, int]]] = {
    # The first is the one used without tuning, but for soft_rank_forward: see `static_configuration`.
    # A tile is looked at before it is summed: with one warp that needs no barrier.
    "soft_rank_forward": [
        {"BLOCK_N": 512, "num_warps": 1},
        {"BLOCK_N": 256, "num_warps": 1},
        {"BLOCK_N": 1024, "num_warps": 4},
        {"BLOCK_N": 2048, "num_warps": 8},
    ],
    "soft_rank_backward": [
        {"BLOCK_N": 512, "num_warps": 1},
        {"BLOCK_N": 256, "num_warps": 1},
        {"BLOCK_N": 512, "num_warps": 4},
    ],
    "pair_terms_forward": [
        {"BLOCK_N": 256, "num_warps": 4},
        {"BLOCK_N": 128, "num_warps": 1},
        {"BLOCK_N": 512, "num_warps": 8},
    ],
    "pair_terms_backward": [
        {"BLOCK_N": 256, "num_warps": 4},
        {"BLOCK_N": 128, "num_warps": 1},
        {"BLOCK_N": 512, "num_warps": 8},
    ],
    "proxy_logsumexp_forward": [
        {"BLOCK_N": 1024, "num_warps": 4},
        {"BLOCK_N": 512, "num_warps": 2},
        {"BLOCK_N": 2048, "num_warps": 4},
        {"BLOCK_N": 2048, "num_warps": 8},
    ],
    "proxy_logsumexp_backward": [
        {"BLOCK_N": 1024, "num_warps": 4},
        {"BLOCK_N": 512, "num_warps": 4},
        {"BLOCK_N": 2048, "num_warps": 8},
    ],
    # A tile has eight rows: with 1024 columns per warp they lie in one thread, four columns wide.
    "pair_logsumexp_forward": [
        {"BLOCK_N": 1024, "num_warps": 1},
        {"BLOCK_N": 2048, "num_warps": 2},
        {"BLOCK_N": 4096, "num_warps": 4},
    ],
    "pair_logsumexp_backward": [
        {"BLOCK_N": 2048, "num_warps": 4},
        {"BLOCK_N": 1024, "num_warps": 4},
        {"BLOCK_N": 4096, "num_warps": 4},
    ],
    "soft_histogram_forward": [
        {"BLOCK_N": 1024, "num_warps": 4},
        {"BLOCK_N": 512, "num_warps": 4},
        {"BLOCK_N": 2048, "num_warps": 8},
    ],
    "soft_histogram_backward": [
        {"BLOCK_N": 1024, "num_warps": 4},
        {"BLOCK_N": 512, "num_warps": 4},
        {"BLOCK_N": 2048, "num_warps": 8},
    ],
    "soft_rank_spread": [
        {"BLOCK_N": 512, "num_warps": 4},
        {"BLOCK_N": 256, "num_warps": 4},
        {"BLOCK_N": 1024, "num_warps": 8},
    ],
    "soft_rank_read": [
        {"BLOCK_N": 512, "num_warps": 4},
        {"BLOCK_N": 256, "num_warps": 4},
        {"BLOCK_N": 1024, "num_warps": 8},
    ],
    # 16 pairs a thread: with 32, ptxas keeps to 64 registers and spills.
    "rank_counts": [
        {"BLOCK_N": 256, "num_warps": 4},
        {"BLOCK_N": 64, "num_warps": 1},
        {"BLOCK_N": 128, "num_warps": 2},
        {"BLOCK_N": 512, "num_warps": 8},
    ],
    # Maps of one element each wait for memory in any configuration.
    "weigh": [{"BLOCK_N": 1024, "num_warps": 4}],
    "split_in_two": [{"BLOCK_N": 1024, "num_warps": 4}],
}
FLOAT32_ONLY = {"weigh", "split_in_two"}
# What a kernel adds to, and so must be zero before each trial of a configuration.
ACCUMULATED = {"words"}


def bucket(size: int) -> int:
    """The power of two at or above `size`: kernels are tuned once per bucket, not once per batch size."""
    return 1 << max(0, size - 1).bit_length()


def positives_per_tile(width: int) -> int:
    """BLOCK_P for classes of up to `width`."""
    return min(bucket(width), 8)


def fits_registers(config: dict[str, int], block_p: int) -> bool:
    return config["BLOCK_N"] * block_p <= MAX_PAIRS_PER_THREAD * LANES * config["num_warps"]


def configurations(kernel: str, block_p: int = 1, itemsize: int = 4) -> list[dict[str, int]]:
    """The configurations of a kernel that do not spill with `block_p` positives a tile; at most one for float64."""
    if itemsize > 4:
        if kernel in FLOAT32_ONLY:
            return []
        return [{"BLOCK_N": FLOAT64_PAIRS // block_p, "num_warps": 4}]
    return [config for config in CONFIGS[kernel] if fits_registers(config, block_p)]


def tuning_enabled() -> bool:
    return os.environ.get(ENVIRONMENT_VARIABLE, "1") != "0"


# --- the static model ---

# Counted in the SASS of sm_90: the instructions of a lane per key of a tile, per key and positive, and per tile; its
# registers, and those per key and positive.
PER_KEY, PER_TRIPLE, PER_TILE = 7.3, 5.0, 17
REGISTERS, REGISTERS_PER_TRIPLE = 40, 2
# Assumed: cycles from the load of a tile to its sums in one warp (L2 280, exponential 40, maxima 30, branch 28), and
# what a barrier adds.
LATENCY, BARRIER = 378, 131
# Of a multiprocessor: registers, warps, programs and schedulers of an A100, H100 or H200.
SM_REGISTERS, SM_WARPS, SM_PROGRAMS, SCHEDULERS = 65536, 64, 32, 4


def static_configuration(n_keys: int, block_p: int, rows: int, multiprocessors: int) -> dict[str, int]:
    """The configuration of soft_rank_forward in float32 that takes the fewest cycles by `static_cycles`.

    rows: programs of the launch, one per row and tile of block_p positives. The first of CONFIGS wins a tie.
    """
    choices = configurations("soft_rank_forward", block_p)
    return min(choices, key=lambda config: static_cycles(config, n_keys, block_p, rows, multiprocessors))


def static_cycles(
    config: Mapping[str, int], n_keys: int, block_p: int, rows: int, multiprocessors: int
) -> float:
    """Cycles of a launch of soft_rank_forward by a model; it was compared with counted instructions, not with a GPU.

    A multiprocessor holds as many programs as registers and warps allow; the programs come in waves. A tile takes the
    longer of two times: until its schedulers have issued the instructions of all programs there, one per cycle, and
    until one program has got through, its latency included. All tiles take the factorised path, memory keeps up, and
    programs of one wave end together.
    """
    warps = config["num_warps"]
    keys_per_lane = config["BLOCK_N"] / (LANES * warps)
    issue = keys_per_lane * (PER_KEY + PER_TRIPLE * block_p) + PER_TILE
    latency = LATENCY + (BARRIER if warps > 1 else 0)
    registers = REGISTERS + REGISTERS_PER_TRIPLE * block_p * keys_per_lane
    fitting = int(min(SM_REGISTERS / (registers * LANES * warps), SM_WARPS / warps, SM_PROGRAMS))
    resident = max(1, min(fitting, math.ceil(rows / multiprocessors)))
    waves = math.ceil(rows / (multiprocessors * resident))
    busy = math.ceil(resident * warps / SCHEDULERS) * issue
    alone = latency + math.ceil(warps / SCHEDULERS) * issue
    return waves * math.ceil(n_keys / config["BLOCK_N"]) * max(busy, alone)


def static_choice(
    kernel: str,
    choices: list[dict[str, int]],
    n_keys: int,
    block_p: int,
    programs: int | None,
    multiprocessors: int,
) -> dict[str, int]:
    """The configuration without a table and without timing. Other kernels have programs enough for their first one."""
    if kernel == "soft_rank_forward" and programs is not None:
        return static_configuration(n_keys, block_p, programs, multiprocessors)
    return choices[0]


# --- what is known of a device ---


class Gpu(NamedTuple):
    """What the choice depends on."""

    name: str
    multiprocessors: int


@cache
def gpu(device: torch.device) -> Gpu:
    """The name of a CUDA or ROCm device, by which its table is kept, and its multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.name, properties.multi_processor_count)


def key(kernel: str, arguments: Mapping[str, Any], itemsize: int) -> str:
    """All that makes a launch another kernel or another amount of work: constants, buckets, element size."""
    parts = [f"{name}={value}" for name, value in arguments.items() if name.isupper() or name in BUCKETS]
    return " ".join([kernel, f"itemsize={itemsize}", *sorted(parts)])


# What was read from disk, or timed since, by the name of the device.
_tables: dict[str, tables.Table] = {}
_collecting: set[str] = set()


def table_of(name: str) -> tables.Table:
    """The table of a device: read once per process."""
    if name not in _tables:
        _tables[name] = tables.load(name)
    return _tables[name]


def known(name: str, key: str, choices: list[dict[str, int]]) -> dict[str, int] | None:
    """What a complete table has for a key, or for the nearest n_bucket; else what was timed, if timing is allowed."""
    table = table_of(name)
    found = table.nearest(key) if table.complete else None
    if may_time(name):
        found = table.entries.get(key)
    # A configuration of another version may not be among those of today.
    return found if found in choices else None


def keep(name: str, key: str, config: dict[str, int]) -> None:
    """Remember what was timed, in this process and, if it can be written, on disk."""
    table_of(name).entries[key] = config
    if name not in _collecting:
        tables.add(name, key, config)


def may_time(name: str) -> bool:
    """Whether a configuration may be chosen by timing, now, on the device of this name."""
    if name in _collecting:
        return True
    return (
        not table_of(name).complete
        and tuning_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and ranks() == 1
    )


def ranks() -> int:
    """Processes of the group, or those that a launcher says it has started."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1


@contextmanager
def collecting(name: str) -> Iterator[dict[str, dict[str, int]]]:
    """Time everything that is launched in the block, whatever was known, and hand it out: nothing is kept."""
    before, table = _tables.get(name), tables.Table({}, complete=False)
    _tables[name] = table
    _collecting.add(name)
    try:
        yield table.entries
    finally:
        _collecting.discard(name)
        if before is None:
            del _tables[name]
        else:
            _tables[name] = before
