"""`python -m bench.sass`: what the inner loop of the forward kernel costs on sm_90, read from its machine code."""

import re
from collections import Counter
from typing import NamedTuple

from bench.aot import compiled, default_build, nvidia_usage, sass

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
    """The opcodes between a label and the branch back to it, of the loop that has the most MUFU."""
    lines = text.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*(\.L\w+):", line))}
    loops = []
    for i, line in enumerate(lines):
        branch = re.search(r"\bBRA(?:\.\w+)*\s+`\((\.L\w+)\)", line)
        if branch and labels.get(branch[1], i) < i:
            body = "\n".join(lines[labels[branch[1]] : i + 1])
            loops.append(Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", body)))
    return max(loops, key=lambda loop: loop["MUFU"])


def forward_loop() -> Loop:
    """The default float32 build of the forward kernel with four positives a tile and the sigmoid."""
    build = default_build("soft_rank_forward", "sm_90", 4)
    kernel = compiled(build)
    loop = inner_loop(sass(kernel))
    threads = build.num_warps * 32
    # The loop may be unrolled: a sigmoid takes one exp2 and one reciprocal.
    triples = build.constants["BLOCK_P"] * build.constants["BLOCK_N"] / threads
    usage = nvidia_usage(kernel)
    total = sum(loop.values()) - loop["NOP"]
    return Loop(loop["MUFU"] / triples, total / triples, usage["registers"], usage["spills"], usage["fences"])


def main() -> None:
    """Print the figures and the verdict."""
    loop = forward_loop()
    fits = loop.mufu <= MUFU_BUDGET and loop.instructions <= INSTRUCTION_BUDGET and not loop.spills
    print(
        f"soft_rank_forward on sm_90, per triple: {loop.mufu:.2f} MUFU, {loop.instructions:.2f} instructions;"
    )
    print(f"{loop.registers} registers, {loop.spills} bytes spilled, {loop.fences} fences")
    print(
        "within the budget"
        if fits
        else f"OVER THE BUDGET of {MUFU_BUDGET} MUFU and {INSTRUCTION_BUDGET} instructions"
    )


if __name__ == "__main__":
    main()
