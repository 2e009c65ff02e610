"""`python -m bench.sass`: what the inner loops of `soft_rank` cost on sm_90, read from their machine code.

A loop of `soft_rank` looks at its tile of keys and branches: to the form with one reciprocal for two triples, which is
the common path; to the form with a reciprocal per triple; past both, if there is nothing to add or only ones.
The common path is read from the branches alone: of all ways once round a loop, the shortest with at least one
reciprocal for two triples. It includes loading the tile, looking at it, storing its gradient and the loop itself; what
is prepared once for a program's row is left out.
"""

from collections import Counter
from typing import NamedTuple

from bench.aot import basic_blocks, compiled, default_build, nvidia_usage, rounds, sass

MUFU_BUDGET = 1
INSTRUCTION_BUDGET = 8


class Loop(NamedTuple):
    """Of the inner loop, per (query, positive, key) triple; registers per thread, spilled bytes, fences of a kernel."""

    mufu: float
    instructions: float
    registers: int
    spills: int
    fences: int


def common_path(text: str, triples: float) -> Counter[str]:
    """How often each opcode stands on the common path of a loop over tiles of `triples` triples per thread."""
    ways = (way for way in rounds(basic_blocks(text)) if 2 * way.count("MUFU.RCP") >= triples)
    return Counter(min(ways, key=len))


def loop_of(direction: str) -> Loop:
    """The default float32 build of a kernel with four positives a tile and the sigmoid."""
    build = default_build(f"soft_rank_{direction}", "sm_90", 4)
    binary = compiled(build)
    triples = build.constants["BLOCK_P"] * build.constants["BLOCK_N"] / (build.num_warps * 32)
    path = common_path(sass(binary), triples)
    mufu = sum(count for opcode, count in path.items() if opcode.startswith("MUFU"))
    usage = nvidia_usage(binary)
    total = path.total() - path["NOP"]
    return Loop(mufu / triples, total / triples, usage["registers"], usage["spills"], usage["fences"])


def within_budget(loop: Loop) -> bool:
    cheap = loop.mufu <= MUFU_BUDGET and loop.instructions <= INSTRUCTION_BUDGET
    return cheap and not loop.spills and not loop.fences


def main() -> None:
    """Print the figures and the verdicts."""
    for direction in ("forward", "backward"):
        loop = loop_of(direction)
        print(
            f"soft_rank_{direction} on sm_90, per triple: {loop.mufu:.2f} MUFU, {loop.instructions:.2f} instructions; "
            f"{loop.registers} registers, {loop.spills} bytes spilled, {loop.fences} fences: "
            f"{'within' if within_budget(loop) else 'OVER'} the budget of {MUFU_BUDGET} MUFU and "
            f"{INSTRUCTION_BUDGET} instructions without a spill or a fence"
        )


if __name__ == "__main__":
    main()
