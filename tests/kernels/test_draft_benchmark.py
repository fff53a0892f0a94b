# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the drafter's kernels does all but time on a CPU, and its cases are right there;
tests/gpu takes the same cases at the real sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = {
    "add_rms_norm", "draft_inputs", "fc_norm", "head_keys", "head_products", "mha_decode",
    "mla_latents", "mla_rope_q", "next_step", "rope_kv_write", "silu_mul", "skinny_gemm",
    "stage_inputs", "stage_tail", "take_rows", "top_ids",
}  # fmt: skip


def test_dry_run(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "benchmarks/draft_kernels.py", "--dry-run", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["kernel"] for line in lines} == KERNELS
    assert all(line["error"] <= line["allowed"] and line["width"] == "tiny" for line in lines)
