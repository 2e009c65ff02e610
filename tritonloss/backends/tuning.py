"""How each kernel is launched: its configurations, and Triton's autotuner over them.

Triton is a parameter here, not an import: this module can be read without it.
"""

import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

ENVIRONMENT_VARIABLE = "TRITONLOSS_AUTOTUNE"
# Sums are kept until the end of a row, one for two keys: more float32 pairs a thread than this spill registers.
MAX_PAIRS_PER_THREAD = 64
# The arithmetic of float64 takes most of the registers itself. It is not tuned: no GPU is fast at it.
FLOAT64_PAIRS = 512
LANES = 32
# What a kernel is tuned for, of those it takes.
KEYS = ("n_bucket", "p_bucket", "SURROGATE", "MAP")

CONFIGS: dict[str, list[dict[str, int]]] = {
    # The first is the one used without tuning.
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
}
# What a kernel adds to, and so must be zero before each trial of a configuration.
ACCUMULATED = ("words",)


def bucket(size: int) -> int:
    """The power of two at or above `size`: kernels are tuned once per bucket, not once per batch size."""
    return 1 << max(0, size - 1).bit_length()


def positives_per_tile(width: int) -> int:
    """BLOCK_P for classes of up to `width`."""
    return min(bucket(width), 8)


def fits_registers(config: dict[str, int], block_p: int) -> bool:
    return config["BLOCK_N"] * block_p <= MAX_PAIRS_PER_THREAD * LANES * config["num_warps"]


def configurations(kernel: str, block_p: int = 1, itemsize: int = 4) -> list[dict[str, int]]:
    """The configurations of a kernel that do not spill with `block_p` positives a tile; a single one for float64."""
    if itemsize > 4:
        return [{"BLOCK_N": FLOAT64_PAIRS // block_p, "num_warps": 4}]
    return [config for config in CONFIGS[kernel] if fits_registers(config, block_p)]


def tuning_enabled() -> bool:
    return os.environ.get(ENVIRONMENT_VARIABLE, "1") != "0"


def autotuner(triton: Any, kernel: Any, name: str, do_bench: Callable[..., Any] | None = None) -> Any:
    """`kernel` under triton.autotune: keyed by the buckets and the tile, remembered on disk where Triton can."""

    def prune(configs: Iterable[Any], arguments: dict[str, Any], **kwargs: Any) -> list[Any]:
        given = {**arguments, **kwargs}
        kept = configurations(name, given.get("BLOCK_P", 1))
        return [config for config in configs if {**config.kwargs, "num_warps": config.num_warps} in kept]

    configs = [
        triton.Config({"BLOCK_N": config["BLOCK_N"]}, num_warps=config["num_warps"])
        for config in CONFIGS[name]
    ]
    accepted = inspect.signature(triton.autotune).parameters
    options = {"cache_results": True} if "cache_results" in accepted else {}
    return triton.autotune(
        configs,
        key=[name for name in KEYS if name in kernel.arg_names],
        prune_configs_by={"early_config_prune": prune},
        reset_to_zero=[name for name in ACCUMULATED if name in kernel.arg_names],
        do_bench=do_bench,
        **options,
    )(kernel)
