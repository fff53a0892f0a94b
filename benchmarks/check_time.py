# SPDX-License-Identifier: Apache-2.0
"""How long `vllm-kimi-eagle3 check` takes over a whole Kimi-K2.5, and how much memory.

    python benchmarks/check_time.py [--rounds 7] [--write]

Makes a folder with the 64 shards of the published int4 checkpoint, headers of their real size and
holes for weights, and an MLA drafter; then checks the pair in fresh processes, cold and warm in
turns: cold is without the files in the page cache, which takes root (`drop_caches`); without, the
row says so. Prints medians with the 20th and 80th percentiles of wall and processor time, and the
peak of the process's memory. What the check says of the folder is looked at first. `--write`
appends a row to benchmarks/results/. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import rows  # noqa: E402
from tests.assets.synthetic import write_header, write_kimi  # noqa: E402
from vllm_kimi_eagle3.checkpoint.drafter import TargetShape, read_drafter  # noqa: E402
from vllm_kimi_eagle3.checkpoint.drafter_tensors import expected_tensors  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "check_time.jsonl"
DRAFTER = ROOT / "tests" / "data" / "configs" / "lightseekorg__kimi-k2.5-eagle3-mla" / "config.json"
RELEASE, GPU = "0.26.0", "sm_120,96GiB,8"
TOTAL_GIB, TENSORS, SHARDS = 554, 208_550, 64
LIMIT_S, LIMIT_MB = 5.0, 200

# As the console script runs it; the peak is this process's own.
PROGRAM = """\
import sys
from vllm_kimi_eagle3.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
sys.stdout.flush()
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak, code, file=sys.stderr)
"""


def make_pair(root: Path) -> list[str]:
    """The two folders, and the command that names them."""
    target, drafter = root / "Kimi-K2.5", root / "drafter"
    write_kimi(target)
    config = json.loads(DRAFTER.read_text(encoding="utf-8"))
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps(config), encoding="utf-8")
    read = read_drafter(config, TargetShape(61, 7168, 163840))
    assert read is not None
    wants = expected_tensors(read.expected)
    tensors = [(name, "BF16", want.shape) for name, want in wants.items()]
    write_header(drafter / "model.safetensors", tensors)
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3}
    return [
        "check", "--json", "--vllm", RELEASE, "--gpu", GPU, str(target),
        "--speculative-config", json.dumps(speculative),
        "--tensor-parallel-size", "8", "--max-model-len", "131072", "--trust-remote-code",
    ]  # fmt: skip


def run(command: list[str]) -> tuple[float, float, float, Any]:
    """Seconds of a fresh process from start to end, those of the processor, its peak memory in MB,
    and the report."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True, check=True
    )
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peak, _ = done.stderr.split()[-2:]
    return seconds, busy, int(peak) * 1024 / 1e6, json.loads(done.stdout)


def drop_caches() -> bool:
    """Take files out of the page cache; False where that is not allowed."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")
    except OSError:
        return False
    return True


def look(report: Any) -> None:
    """Stop unless the report is that of a whole checkpoint: no speed on a wrong answer."""
    facts = {finding["id"]: finding["fact"] for finding in report["findings"]}
    wrong = [id for id in facts if id.startswith("files-") or id == "host-check-stopped"]
    if wrong or f"{TOTAL_GIB}." not in facts.get("memory-summary", ""):
        sys.exit(f"the check does not see a whole Kimi-K2.5, nothing is timed: {facts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        command = make_pair(Path(scratch))
        look(run(command)[-1])
        dropped, cold, warm, busy, peaks = True, [], [], [], []
        for _ in range(arguments.rounds):
            dropped = drop_caches() and dropped
            for seconds in (cold, warm):
                elapsed, processor, peak, report = run(command)
                look(report)
                seconds.append(elapsed)
                busy.append(processor)
                peaks.append(peak)
    row = {
        "vllm_facts": RELEASE,
        "tensors": TENSORS,
        "shards": SHARDS,
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "rounds": arguments.rounds,
        "page_cache_dropped": dropped,
        "cold_s": rows.spread(cold),
        "warm_s": rows.spread(warm),
        "processor_s": rows.spread(busy),
        "peak_mb": round(max(peaks), 1),
    }
    print(json.dumps(row, indent=1))
    if arguments.write:
        rows.append(RESULTS, row)
    if row["cold_s"]["median"] > LIMIT_S or max(peaks) > LIMIT_MB:
        sys.exit(f"over {LIMIT_S} s or {LIMIT_MB} MB")


if __name__ == "__main__":
    main()
