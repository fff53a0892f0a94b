# SPDX-License-Identifier: Apache-2.0
"""What a row has to say of the GPU that it was measured on, and how kernels are timed there."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
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


def capture(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A graph of all of the calls; what replays it."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # torch.cuda.graph would also empty the allocator's cache.
        calls[0]()  # Compiles, and lets cuBLAS make its workspace.
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph.replay


def measure(
    runs: dict[str, Callable[[], object]], launches: int, *, ms: float, rounds: tuple[int, int]
) -> dict[str, list[float]]:
    """Microseconds per launch of each side, in turns.

    Args:
        runs: by side, what runs all of its launches.
        launches: of a run.
        ms: how long a side shall take in all.
        rounds: the fewest and the most runs of a side, whatever that makes.
    """

    def once(run: Callable[[], object]) -> tuple[Any, Any]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        return start, end

    for run in runs.values():
        run()
    warm = [once(run) for run in runs.values()]
    torch.cuda.synchronize()
    longest = max(start.elapsed_time(end) for start, end in warm)
    count = min(max(rounds[0], round(ms / longest)), rounds[1])
    events = [(name, once(run)) for _ in range(count) for name, run in runs.items()]
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, (start, end) in events:
        times[name].append(start.elapsed_time(end) * 1e3 / launches)
    return times
