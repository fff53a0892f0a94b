# SPDX-License-Identifier: Apache-2.0
"""What a row has to say of the GPU that it was measured on."""

from __future__ import annotations

import subprocess
from typing import Any

import torch

QUERIES = {
    "gpu": "name",
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
}


def gpu_facts() -> dict[str, Any]:
    """Name, driver, clocks as they are now, and power limit of the current device."""
    index = torch.cuda.current_device()
    fields = ",".join(QUERIES.values())
    line = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={index}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    facts: dict[str, Any] = {"gpu": torch.cuda.get_device_name(index)}
    if line.returncode == 0:
        values = [value.strip() for value in line.stdout.strip().split(",")]
        facts = dict(zip(QUERIES, values, strict=True))
    major, minor = torch.cuda.get_device_capability(index)
    facts["capability"] = f"sm_{major}{minor}"
    return facts


def copy_bandwidth(gigabytes: float = 2.0, rounds: int = 10) -> float:
    """Bytes per second of a large copy within the device, those read and those written counted."""
    source = torch.empty(int(gigabytes * 1e9), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    times = sorted(times[1:])  # The first one warms up.
    return 2 * source.numel() / times[len(times) // 2]
