# SPDX-License-Identifier: Apache-2.0
"""Which GPUs there are: from the driver's own program, or from the user for another machine."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping

from .subject import GIB, Gpus

OPTION = "--gpu sm_120,96GiB,8"

_UNITS = {"gib": GIB, "gb": 10**9, "g": GIB, "mib": 1024**2, "mb": 10**6, "m": 1024**2}
_QUERY = ["--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
# The driver answers in well under a second, except where persistence mode is off and it first has
# to wake eight cards.
_PATIENCE_SECONDS = 20.0


def parse_gpus(text: str) -> Gpus:
    """The GPUs that ``--gpu`` names: architecture, memory of each and how many, ``sm_90,141GB,8``.

    Memory and count may be left out of the end: they are unknown then (0).

    Raises:
        ValueError: with the reason and an example.
    """
    parts = [part.strip() for part in text.split(",")]
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)[af]?", parts[0].lower())
    if parts[0].lower().startswith("gfx"):
        raise ValueError(f"{parts[0]!r}, in --gpu: GPUs of AMD are not judged; leave it out")
    if match is None:
        raise ValueError(f"{parts[0]!r} is no architecture such as sm_120, in --gpu; try {OPTION}")
    memory = 0
    if len(parts) > 1:
        size = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s*([a-z]{1,3})", parts[1].lower())
        if size is None or size[2] not in _UNITS:
            raise ValueError(f"{parts[1]!r} is no memory such as 96GiB, in --gpu; try {OPTION}")
        memory = int(float(size[1]) * _UNITS[size[2]])
        if not memory:
            raise ValueError(f"{parts[1]!r} is no memory, in --gpu; try {OPTION}")
    count = 0
    if len(parts) > 2:
        if not re.fullmatch(r"[1-9]\d{0,3}", parts[2]):
            raise ValueError(f"{parts[2]!r} is no number of GPUs, in --gpu; try {OPTION}")
        count = int(parts[2])
    if len(parts) > 3:
        raise ValueError(f"{text!r} has more than three parts, in --gpu; try {OPTION}")
    capability = int(match[1]), int(match[2])
    return Gpus(f"sm_{match[1]}{match[2]}", capability, memory, count)


def find_gpus(environ: Mapping[str, str]) -> Gpus | None:
    """The GPUs that a server would see here, or None. Initialises no CUDA; may take a second.

    Of unlike GPUs the smallest memory and the oldest architecture count.
    """
    program = shutil.which("nvidia-smi")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if program is None or (visible is not None and visible.strip() in ("", "-1", "NoDevFiles")):
        return None
    try:
        answer = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=_PATIENCE_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = [gpu for line in answer.stdout.splitlines() if (gpu := _parse_line(line)) is not None]
    if answer.returncode or not found:
        return None
    count = len(found)
    if visible is not None:
        # By number or by UUID; the driver stops at the first that it does not know.
        count = min(count, len([name for name in visible.split(",") if name.strip()]))
    return Gpus(
        found[0].name,
        min(gpu.capability for gpu in found),
        min(gpu.memory for gpu in found),
        count,
    )


def _parse_line(line: str) -> Gpus | None:
    parts = [part.strip() for part in line.rsplit(",", 2)]
    if len(parts) != 3 or not re.fullmatch(r"\d+", parts[1]):
        return None
    capability = re.fullmatch(r"(\d+)\.(\d+)", parts[2])
    if capability is None:
        return None
    return Gpus(parts[0], (int(capability[1]), int(capability[2])), int(parts[1]) * 1024**2, 1)
