"""`python -m bench.aot`: every kernel in every launch configuration, compiled for GPUs that need not be here.

Prints one JSON line per build: what was built, registers, spills, shared memory, fences, and whether row offsets are
multiplied in int64. TRITON_INTERPRET must be unset: a kernel decorated under the interpreter cannot be compiled.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

# Triton announces another default and warns until one is chosen. Line tables only slow the builds down.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

try:
    from triton.backends.compiler import AttrsDescriptor  # Triton 3.2
except ImportError:
    AttrsDescriptor = None

from tritonloss.backends import large_classes, tuning
from tritonloss.backends.surrogates import PLAIN, WITH_NUMBERS
from tritonloss.backends.triton import INTERPRETED, KERNELS, NUMBERS

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ITEMSIZE = {"fp32": 4, "fp64": 8}
NUM_STAGES = 3  # what triton.Config asks for

# What the arguments of a kernel do not say: the values of its constants besides those of tuning.CONFIGS, and which
# pointers are not to scores. A new kernel needs an entry for each new name.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "SURROGATE": PLAIN,
    **dict.fromkeys(NUMBERS, (0.5,)),
    "WITH_SLOPES": (True, False),
    "WITH_POSITIVES": (False, True),
    "ONE_TILE": (True, False),
    "DESCENDING": (False, True),
    "WEIGHED": (True, False),
    "STRICT": (True, False),
    "MAP": ("linear", "circle"),
    "WITH_SCORES": (True, False),
    "PER_UNIT": tuple(sorted({stencil.per_unit for stencil in large_classes.STENCILS.values()})),
    "POINTS": tuple(sorted({stencil.points for stencil in large_classes.STENCILS.values()})),
}
OTHER_POINTERS = {
    "start": "*i64",
    "count": "*i64",
    "counts": "*i32",
    "offset": "*i64",
    "labels": "*i32",
    "ranges": "*i64",
    "words": "*i64",
    "high": "*bf16",
    "low": "*bf16",
}
# The values that take the most registers on sm_90, or as many as any.
HEAVIEST: dict[str, tuple[Any, ...]] = {
    "SURROGATE": ("sigmoid", "upper_step"),
    "WITH_SLOPES": (True,),
    "WITH_POSITIVES": (True,),
    "ONE_TILE": (True,),
    "DESCENDING": (True,),
    "WEIGHED": (True,),
    "STRICT": (True,),
    "PER_UNIT": (8,),
    "POINTS": (12,),
}
TILES = tuple(sorted({tuning.positives_per_tile(width) for width in range(1, 100)}))


@dataclass(frozen=True)
class Build:
    """One kernel for one GPU with all its options."""

    kernel: str
    arch: str
    dtype: str
    constants: dict[str, Any]
    num_warps: int

    def heaviest(self) -> bool:
        return all(
            self.constants[name] in values for name, values in HEAVIEST.items() if name in self.constants
        )

    def pairs_per_thread(self) -> float:
        pairs = self.constants["BLOCK_N"] * self.constants.get("BLOCK_P", 1)
        return pairs / (self.num_warps * TARGETS[self.arch].warp_size)


def options_of(kernel: str) -> dict[str, tuple[Any, ...]]:
    """The constants of a kernel that neither the tile nor the dtype decides, and their values."""
    options = {name: values for name, values in OPTIONS.items() if name in KERNELS[kernel].arg_names}
    return options | {"SURROGATE": tuple(WITH_NUMBERS)} if kernel.startswith("pair_terms") else options


def builds(arch: str, kernel: str) -> Iterator[Build]:
    """Every way in which the package can launch `kernel` on `arch`."""
    tiles = TILES if "BLOCK_P" in KERNELS[kernel].arg_names else (1,)
    options = options_of(kernel)
    for dtype, block_p in itertools.product(ITEMSIZE, tiles):
        for config in tuning.configurations(kernel, block_p, ITEMSIZE[dtype]):
            for values in itertools.product(*options.values()):
                chosen = dict(zip(options, values, strict=True))
                # Only the widest tile leaves positives over for another.
                if chosen.get("ONE_TILE", True) or block_p == max(TILES):
                    yield make_build(kernel, arch, dtype, block_p, config, chosen)


def cover(arch: str, kernel: str) -> list[Build]:
    """Every configuration with the heaviest options, and every combination of options where registers are scarcest."""
    every, scarce = list(builds(arch, kernel)), scarcest(arch, kernel)
    return [
        build for build in every if build.heaviest() or any(same_launch(build, other) for other in scarce)
    ]


def scarcest(arch: str, kernel: str) -> list[Build]:
    """For each dtype of the kernel the build that takes the most registers: the most pairs per thread, then threads."""
    heavy = [build for build in builds(arch, kernel) if build.heaviest()]
    return [
        max(
            (build for build in heavy if build.dtype == dtype),
            key=lambda build: (build.pairs_per_thread(), build.constants.get("BLOCK_P", 1), build.num_warps),
        )
        for dtype in dict.fromkeys(build.dtype for build in heavy)
    ]


def same_launch(a: Build, b: Build) -> bool:
    """Whether two builds of a kernel differ in their options alone."""
    sizes = [
        (build.dtype, build.num_warps, *map(build.constants.get, ("BLOCK_N", "BLOCK_P"))) for build in (a, b)
    ]
    return sizes[0] == sizes[1]


def default_build(kernel: str, arch: str, block_p: int = 4) -> Build:
    """The float32 build that runs without tuning, with the first value of each option."""
    options = {name: values[0] for name, values in options_of(kernel).items()}
    return make_build(kernel, arch, "fp32", block_p, tuning.configurations(kernel, block_p)[0], options)


def make_build(
    kernel: str, arch: str, dtype: str, block_p: int, config: Mapping[str, int], options: Mapping[str, Any]
) -> Build:
    fast = dtype == "fp32" and TARGETS[arch].backend == "cuda"
    constants = {**options, "FAST_MATH": fast, "BLOCK_P": block_p, **config}
    taken = {name: value for name, value in constants.items() if name in KERNELS[kernel].arg_names}
    return Build(kernel, arch, dtype, taken, config["num_warps"])


def signature(build: Build) -> dict[str, str]:
    """The type of each argument: a constant by its annotation, a size by not being specialised, else a pointer."""
    types = {}
    for parameter in KERNELS[build.kernel].params:
        if parameter.is_constexpr:
            types[parameter.name] = "constexpr"
        elif parameter.do_not_specialize:
            types[parameter.name] = "i32"
        else:
            types[parameter.name] = OTHER_POINTERS.get(parameter.name, f"*{build.dtype}")
    return types


def compiled(build: Build) -> Any:
    """The compiled kernel; its `asm` holds every stage by name (ttir, ptx, cubin, amdgcn, ...)."""
    if INTERPRETED:
        raise RuntimeError("kernels were decorated under TRITON_INTERPRET=1 and cannot be compiled")
    options = {"num_warps": build.num_warps, "num_stages": NUM_STAGES}
    return triton.compile(source(build), target=TARGETS[build.arch], options=options)


def source(build: Build) -> ASTSource:
    """The kernel with its constants; every pointer is a multiple of 16, as those of torch are."""
    function = KERNELS[build.kernel]
    types = signature(build)
    if unknown := {name for name, kind in types.items() if kind == "constexpr"} - build.constants.keys():
        raise KeyError(f"{build.kernel} has constants without a value: add {unknown} to OPTIONS")
    names = function.arg_names
    pointers = [i for i, name in enumerate(names) if types[name][0] == "*"]
    if AttrsDescriptor is not None:
        return ASTSource(
            fn=function,
            signature={name: kind for name, kind in types.items() if kind != "constexpr"},
            constants=build.constants,
            attrs=AttrsDescriptor.from_hints(dict.fromkeys(pointers, 16)),
        )
    return ASTSource(
        fn=function,
        signature=types,
        constexprs={(names.index(name),): value for name, value in build.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )


# --- what came out ---


def report(build: Build) -> dict[str, Any]:
    """The line that is printed for a build."""
    kernel = compiled(build)
    usage = amd_usage(kernel) if "amdgcn" in kernel.asm else nvidia_usage(kernel)
    threads = build.num_warps * TARGETS[build.arch].warp_size
    return {
        **asdict(build),
        "threads": threads,
        **usage,
        "shared": kernel.metadata.shared,  # bytes at launch: the tools see none of them
        "int64_rows": rows_in_int64(build, kernel.asm["ttir"]),
    }


def nvidia_usage(kernel: Any) -> dict[str, int]:
    """Registers per thread, bytes of stack (spills), fences."""
    with cubin(kernel) as path:
        text = tool("cuobjdump", "-res-usage", path)
    registers, stack = (int(re.findall(rf"{key}:(\d+)", text)[-1]) for key in ("REG", "STACK"))
    fences = len(re.findall(r"\b(?:membar|fence)\b", kernel.asm["ptx"]))  # each is a MEMBAR in the SASS
    return {"registers": registers, "spills": stack, "fences": fences}


def amd_usage(kernel: Any) -> dict[str, int]:
    """The same from the metadata at the end of the AMD assembly, which counts spilled registers, wherever they are."""
    text = kernel.asm["amdgcn"]

    def value(key: str) -> int:
        return int(re.findall(rf"\.{key}:\s+(\d+)", text)[-1])

    return {
        "registers": value("vgpr_count"),
        "spills": 4 * value("vgpr_spill_count"),  # a spilled SGPR goes to a lane of a VGPR, not to memory
        "fences": len(re.findall(r"\bbuffer_wbl2\b|\bbuffer_inv\b", text)),
    }


def sass(kernel: Any) -> str:
    """The machine code of an NVIDIA build, with labels."""
    with cubin(kernel) as path:
        return tool("nvdisasm", "-c", path)


class Block(NamedTuple):
    """Instructions that run one after the other, by opcode (`MUFU.RCP`), and the blocks that may come next."""

    opcodes: list[str]
    successors: list[int]


def basic_blocks(text: str) -> list[Block]:
    """SASS cut at its labels and branches. BSYNC, where a warp meets again, stands before the label it goes on at."""
    blocks, jumps, labels = [Block([], [])], [], {}

    def cut(falls_through: bool) -> None:
        if falls_through:
            blocks[-1].successors.append(len(blocks))
        blocks.append(Block([], []))

    for line in text.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            cut(falls_through=True)
            labels[label[1]] = len(blocks) - 1
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", line):
            predicate, opcode, operands = instruction.groups()
            blocks[-1].opcodes.append(opcode)
            name = opcode.split(".")[0]
            # A branch may have a predicate among its operands as well.
            conditional = predicate is not None or re.search(r"\bU?P\d", operands) is not None
            if name in ("BRA", "EXIT"):
                if target := re.search(r"\((\.L\w+)\)", operands):
                    jumps.append((len(blocks) - 1, target[1]))
                cut(falls_through=conditional)
    for block, label in jumps:
        blocks[block].successors.append(labels[label])
    return blocks


def rounds(blocks: list[Block]) -> Iterator[list[str]]:
    """The opcodes of every way once round a loop: from the target of a backward branch to that branch."""
    for last, block in enumerate(blocks):
        for header in (n for n in block.successors if n <= last):
            paths = [[header]]
            while paths:
                path = paths.pop()
                if path[-1] == last:
                    yield [opcode for n in path for opcode in blocks[n].opcodes]
                else:
                    paths += [[*path, n] for n in blocks[path[-1]].successors if n not in path]


def rows_in_int64(build: Build, ttir: str) -> bool:
    """Whether every product with a `stride_*` argument, and so every row offset, is an int64."""
    names = [name for name, kind in signature(build).items() if kind != "constexpr"]
    # By position: Triton 3.2 gives the arguments numbers for names.
    arguments = re.findall(r"(%\w+): ", re.findall(r"tt\.func public .*", ttir)[0])
    strides = {argument for argument, name in zip(arguments, names, strict=True) if "stride_" in name}
    products = []
    for result, operation, operands in re.findall(r"(%\w+) = (arith\.\w+|tt\.splat) (.*)", ttir):
        if strides.isdisjoint(re.findall(r"%\w+", operands)):
            continue
        strides.add(result)
        if operation == "arith.muli":
            products.append(operands)
    return bool(products) and all(re.search(r": (tensor<[\dx]+x)?i64", product) for product in products)


@contextlib.contextmanager
def cubin(kernel: Any) -> Iterator[str]:
    """The path of a file with the machine code, as long as the `with` block lasts."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        yield file.name


def tool(name: str, *arguments: str) -> str:
    """Output of one of the CUDA tools that Triton brings along."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


CHOICES = {"all": builds, "cover": cover, "scarcest": scarcest}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--builds", choices=CHOICES, default="all")
    chosen = parser.parse_args()
    for arch, kernel in itertools.product(chosen.arch, chosen.kernel):
        for build in CHOICES[chosen.builds](arch, kernel):
            print(json.dumps(report(build)), flush=True)


if __name__ == "__main__":
    main()
