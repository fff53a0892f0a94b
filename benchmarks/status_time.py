# SPDX-License-Identifier: Apache-2.0
"""How much longer `vllm-kimi-eagle3 status` takes than importing the vLLM that it asks.

    python benchmarks/status_time.py [--rounds 5] [--write]

Runs both in fresh processes, in turns, and prints medians with the 20th and 80th percentiles, those
of the differences within a round included. `--write` appends a row to benchmarks/results/. What
`status` says is checked first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import rows  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "status_time.jsonl"
IMPORT = [sys.executable, "-c", "from vllm import LLM"]
STATUS = [str(Path(sys.executable).with_name("vllm-kimi-eagle3")), "status", "--json"]


def seconds(command: list[str]) -> tuple[float, str]:
    """Wall time of a command in a fresh process, and its output."""
    started = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return time.perf_counter() - started, result.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()

    answer = json.loads(seconds(STATUS)[1])  # Also warms the file cache for both.
    if not answer["complete"]:
        sys.exit("status says that not everything is in place; nothing is timed")
    imports, statuses = [], []
    for _ in range(arguments.rounds):
        imports.append(seconds(IMPORT)[0])
        statuses.append(seconds(STATUS)[0])
    row = {
        "host": answer["host"]["version"],
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "rounds": arguments.rounds,
        "import_s": rows.spread(imports),
        "status_s": rows.spread(statuses),
        "difference_s": rows.spread([s - i for s, i in zip(statuses, imports, strict=True)]),
    }
    print(json.dumps(row, indent=1))
    if arguments.write:
        rows.append(RESULTS, row)


if __name__ == "__main__":
    main()
