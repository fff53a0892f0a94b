# SPDX-License-Identifier: Apache-2.0
"""The kernel's benchmark does all but time on a CPU, so that it is whole where there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_dry_run(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    cells = ["--cells", "kv=bf16,fp8", "heads=8", "ctx=70", "query_len=4"]
    command = [sys.executable, "benchmarks/mla_decode.py", "--dry-run", "--out", str(out), *cells]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in out.read_text().splitlines():
        row = json.loads(line)
        assert row["sm_120"]["error"] < 2e-2
        assert row["commit"] is not None
    assert "2 of 2 cells" in done.stdout
