# SPDX-License-Identifier: Apache-2.0
"""Every published drafter with Kimi-K2.5, on releases that differ in what they do with it.

    python -m tests.unit.check.published            # shows what `check` says
    python -m tests.unit.check.published --write    # writes tests/data/check/published anew

One page per drafter: for each release the path and every finding. Configs and headers are those of
tests/data/configs; where that has no header, one that fits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3.findings import Finding

from .corpus import CONFIGS, CORPUS, run

FOLDER = CORPUS / "published"
TARGET = "moonshotai__Kimi-K2.5"
RELEASES = ("0.15.1", "0.17.1", "0.21.0", "0.22.1", "0.26.0", "0.29.0", "0.33.0")
DRAFTERS = sorted(f.name for f in CONFIGS.iterdir() if f.is_dir() and f.name != TARGET)
COMMAND = (
    "vllm serve {target} --trust-remote-code --tensor-parallel-size 8 "
    "--speculative-config {speculative}"
)


def recipe(drafter: str) -> dict[str, Any]:
    """A drafter's folder, as tests/data/check/README.md has it."""
    header = CONFIGS / drafter / "tensors.json"
    if not header.exists():
        return {"config": drafter}
    tensors = json.loads(header.read_text(encoding="utf-8"))
    values: dict[str, Any] = {}
    if "d2t" in tensors:
        rows, tokens = tensors["d2t"][1][0], tensors["t2d"][1][0]
        every = tokens // rows  # Every so manyth token.
        marked = set(range(0, rows * every, every))
        values["d2t"] = {"start": 0, "step": every - 1}
        values["t2d"] = [int(token in marked) for token in range(tokens)]
    return {"config": drafter, "tensors": None, "set_tensors": tensors, "values": values}


def page(drafter: str, root: Path) -> tuple[str, list[Finding]]:
    """What `check` says of a drafter on every release, built below ``root``: as a page, and all
    findings."""
    folder = recipe(drafter)
    found: list[Finding] = []
    lines = [f"{drafter.replace('__', '/')} with {TARGET.replace('__', '/')}"]
    for release in RELEASES:
        case = {
            "about": "",
            "vllm": release,
            "gpu": "sm_90,141GB,8",
            "command": COMMAND,
            "drafter": folder,
        }
        report, _ = run(case, root)
        lines += ["", f"vLLM {release}, {report.runner} runner", f"  path: {report.path}"]
        found += report.findings
        for finding in report.findings:
            fact = finding.fact
            for name in ("target", "drafter"):
                fact = fact.replace(str(root / name), f"{{{name}}}")
            label = "untold" if finding.undecided else finding.severity.value
            lines.append(f"  {label} {finding.id}: {fact}")
    return "\n".join(lines) + "\n", found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the pages anew")
    arguments = parser.parse_args()
    for drafter in DRAFTERS:
        with tempfile.TemporaryDirectory() as scratch:
            text, _ = page(drafter, Path(scratch))
        if arguments.write:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{drafter}.txt").write_text(text, encoding="utf-8")
        else:
            print(text)


if __name__ == "__main__":
    main()
