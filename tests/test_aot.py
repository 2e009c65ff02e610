"""Every kernel in every launch configuration, compiled for GPUs that need not be here.

By default sm_90 has every configuration with the options that take the most registers, and every option where
registers are scarcest; the other architectures have the build of each kernel and dtype that takes the most. With
`--aot-full` all have every build.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[1]
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# In a few builds ptxas of Triton 3.6 and before keeps one float64, or two float32, on the stack.
MAX_SPILLS = 8 if VERSION <= (3, 6) else 0
# What every GPU has for a program without being asked: shared memory on sm_80 to sm_120 and, more, on gfx942 (64 KiB);
# registers on sm_80 to sm_120. A wavefront of gfx942 has up to 512 vector registers per lane, on one of four units.
SHARED_BYTES = 48 << 10
REGISTERS = 64 << 10
# A kernel that was decorated under the interpreter cannot be compiled.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}


def run(*arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_builds_without_spills_or_fences(arch: str, pytestconfig: pytest.Config) -> None:
    if VERSION == (3, 2) and arch not in ("sm_80", "sm_90"):
        pytest.skip("Triton 3.2 knows no GPU after sm_90, and takes ROCm's linker for an AMD one")
    choice = "all" if pytestconfig.getoption("--aot-full") else "cover" if arch == "sm_90" else "scarcest"
    lines = run("-m", "bench.aot", "--arch", arch, "--builds", choice).splitlines()
    builds = [json.loads(line) for line in lines]
    assert {build["kernel"] for build in builds} >= {"soft_rank_forward", "soft_rank_backward"}
    assert {build["dtype"] for build in builds} == {"fp32", "fp64"}
    assert [build for build in builds if build["spills"] > MAX_SPILLS] == []
    assert [build for build in builds if build["fences"] and build["kernel"].startswith("soft_")] == []
    assert all(build["int64_rows"] for build in builds)
    assert max(build["threads"] for build in builds) <= 1024
    assert max(build["shared"] for build in builds) <= SHARED_BYTES
    if arch == "gfx942":
        assert all(build["registers"] * -(-build["num_warps"] // 4) <= 512 for build in builds)
    else:
        # The hardware hands registers to a warp in units of 256: 8 per thread.
        assert all(-(-build["registers"] // 8) * 8 * build["threads"] <= REGISTERS for build in builds)


def test_common_path_stays_within_its_budget() -> None:
    directions = ("forward", "backward")
    program = (
        f"import json, bench.sass; print(json.dumps([bench.sass.loop_of(d)._asdict() for d in {directions}]))"
    )
    for direction, loop in zip(directions, json.loads(run("-c", program)), strict=True):
        # One exponential for four triples and one reciprocal for two: with less the script has counted another way.
        assert 0.75 <= loop["mufu"] <= 1, direction
        assert 5 < loop["instructions"] <= 8, direction
        assert loop["spills"] == 0, direction
        assert loop["fences"] == 0, direction
