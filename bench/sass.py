"""`python -m bench.sass`: what the inner loops of `soft_rank` cost on sm_90, read from their machine code."""

from collections import Counter
from typing import NamedTuple

from bench.aot import compiled, default_build, loops, nvidia_usage, sass

MUFU_BUDGET = 2
INSTRUCTION_BUDGET = 10


class Loop(NamedTuple):
    """Of the inner loop, per (query, positive, key) triple; registers a thread, spilled bytes, fences of the kernel."""

    mufu: float
    instructions: float
    registers: int
    spills: int
    fences: int


def inner_loop(text: str) -> Counter[str]:
    """How often each opcode stands in the loop over triples.

    ptxas may put an unrolled copy beside the loop: of the loops with a MUFU, the shortest has the triples of one tile.
    """
    counted = [Counter(loop) for loop in loops(text)]
    return min((loop for loop in counted if loop["MUFU"]), key=Counter.total)


def loop_of(kernel: str) -> Loop:
    """The default float32 build of a kernel with four positives a tile and the sigmoid."""
    build = default_build(kernel, "sm_90", 4)
    binary = compiled(build)
    loop = inner_loop(sass(binary))
    triples = build.constants["BLOCK_P"] * build.constants["BLOCK_N"] / (build.num_warps * 32)
    usage = nvidia_usage(binary)
    total = loop.total() - loop["NOP"]
    return Loop(loop["MUFU"] / triples, total / triples, usage["registers"], usage["spills"], usage["fences"])


def forward_loop() -> Loop:
    return loop_of("soft_rank_forward")


def backward_loop() -> Loop:
    return loop_of("soft_rank_backward")


def within_budget(loop: Loop) -> bool:
    return loop.mufu <= MUFU_BUDGET and loop.instructions <= INSTRUCTION_BUDGET and not loop.spills


def main() -> None:
    """Print the figures and the verdicts."""
    for name, loop in (("forward", forward_loop()), ("backward", backward_loop())):
        print(
            f"soft_rank_{name} on sm_90, per triple: {loop.mufu:.2f} MUFU, {loop.instructions:.2f} instructions; "
            f"{loop.registers} registers, {loop.spills} bytes spilled, {loop.fences} fences: "
            f"{'within' if within_budget(loop) else 'OVER'} the budget of {MUFU_BUDGET} MUFU and "
            f"{INSTRUCTION_BUDGET} instructions without a spill"
        )


if __name__ == "__main__":
    main()
