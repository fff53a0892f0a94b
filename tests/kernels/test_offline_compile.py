# SPDX-License-Identifier: Apache-2.0
"""Every configuration of the launch tables, compiled for its GPU without one.

Builds, fits into the shared memory, spills no register in the loop over the tiles, and as many
programs fit onto a multiprocessor as the table says. The limits are those of the CUDA programming
guide's table of compute capabilities, written down here a second time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_eagle3.kernels import arch

from .offline import LAUNCHES

ROOT = Path(__file__).parents[2]
# Bytes of shared memory a program, and a multiprocessor.
SHARED = {
    "sm_80": (166912, 167936),
    "sm_86": (101376, 102400),
    "sm_89": (101376, 102400),
    "sm_90": (232448, 233472),
    "sm_100": (232448, 233472),
    "sm_120": (101376, 102400),
    "sm_121": (101376, 102400),
}
REGISTERS_PER_SM = 65536
# Bytes a thread may spill: a few addresses that the compiler makes before the loop over requests
# and needs at its end, written once per program. In the loop over tiles there is none of it for
# sm_120; on sm_90 tiles of 64 take all registers, and those of several pages more, which is what
# the rows with --page 16 were measured with.
MOST_SPILLED = {"sm_90": 152}
MOST_SPILLED_ELSEWHERE = 24
# mha_decode of an fp8 cache and 32 rows or more, before and after its loop.
MOST_SPILLED_DRAFTER = 64
MOST_IN_LOOP = {"sm_90": 34, "sm_89": 1}
RESERVED_PER_PROGRAM = 1024
ARCHES = [arch.arch(capability) for capability in arch.CAPABILITIES]


def compiled(name: str, kernels: str) -> list[dict[str, Any]]:
    """The rows of `offline.py`, which needs kernels that are not interpreted: another process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.kernels.offline", "--json", "--arch", name,
            "--kernels", kernels,
        ],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def too_much(rows: list[dict[str, Any]], gpu: arch.Arch, most_spilled: int) -> list[str]:
    """The kernels that do not fit into their GPU, or spill, in words."""
    per_program, per_sm = SHARED[gpu.name]
    found = []
    for row in rows:
        resident = row["kernel"] in ("_attend", "_attend_and_add")
        count = row["programs_per_sm"] if resident else 1
        registers = -(-row["registers"] // 8) * 8 * 32 * row["num_warps"]
        if (
            row["shared"] > per_program
            or row["spilled"] > most_spilled
            or (row["spills_in_loop"] or 0) > MOST_IN_LOOP.get(gpu.name, 0)
            or count * (row["shared"] + RESERVED_PER_PROGRAM) > per_sm
            or count * registers > REGISTERS_PER_SM
        ):
            found.append(
                f"{row['launch']}: {count} {row['kernel']} a multiprocessor take {row['shared']} B "
                f"shared of {per_program}, {row['registers']} registers x {row['num_warps']} "
                f"warps, and spill {row['spilled']} B, {row['spills_in_loop']} times in the loop "
                f"({row['config']})"
            )
    return found


@pytest.mark.parametrize("gpu", ARCHES, ids=lambda gpu: gpu.name)
def test_builds_and_fits(gpu: arch.Arch) -> None:
    per_program, per_sm = SHARED[gpu.name]
    assert (gpu.shared_per_block, gpu.shared_per_sm) == (per_program, per_sm)
    rows = compiled(gpu.name, "verify")
    assert {row["config"] for row in rows} == {
        str(config) for config in arch.mla_decode_configs(gpu.capability)
    }, "a configuration of the table is in none of the launches of offline.py"
    most = MOST_SPILLED.get(gpu.name, MOST_SPILLED_ELSEWHERE)
    assert not (found := too_much(rows, gpu, most)), "\n".join(found)


@pytest.mark.parametrize("gpu", ARCHES, ids=lambda gpu: gpu.name)
def test_the_drafters_kernels_build_and_fit(gpu: arch.Arch) -> None:
    rows = compiled(gpu.name, "drafter")
    assert {row["config"] for row in rows if row["kernel"] == "_attend_and_add"} == {
        str(config) for config in arch.mha_decode_configs(gpu.capability)
    }, "a configuration of the table is in none of the launches of offline.py"
    assert not (found := too_much(rows, gpu, MOST_SPILLED_DRAFTER)), "\n".join(found)


def test_launches_are_many() -> None:
    assert {launch.kv for launch in LAUNCHES} == {"bf16", "fp16", "fp8"}
