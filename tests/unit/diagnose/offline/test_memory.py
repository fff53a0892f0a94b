# SPDX-License-Identifier: Apache-2.0
"""What it takes is a sum that is known beforehand, and too much of it is said."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.assets import variants
from vllm_kimi_eagle3.diagnose.offline import memory
from vllm_kimi_eagle3.diagnose.offline.memory import GIB, Memory, drafter_memory, fit_memory
from vllm_kimi_eagle3.diagnose.offline.score import Drafter
from vllm_kimi_eagle3.diagnose.offline.subject import Subject

KIMI = Memory(
    states=12,
    tokens=16_384,
    longest=2500,
    hidden_size=7168,
    element_bytes=2,
    drafter_bytes=6 * GIB,
    wide=36_864,
)


def test_the_sum() -> None:
    assert KIMI.token_bytes == 12 * 7168 * 2
    assert KIMI.files == 16_384 * 12 * 7168 * 2
    assert KIMI.worker == 2500 * 12 * 7168 * 2
    assert KIMI.scoring == 6 * GIB + 4 * 2500 * 36_864 * 4
    said = KIMI.statement(Path("/x"))
    assert "12 hidden states x 16,384 tokens x 7,168 x 2 bytes = 2.62 GiB at most" in said
    assert "(/x)" in said


def test_too_much_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=GIB))
    finding = KIMI.too_much(tmp_path, "--budget")
    assert finding is not None
    assert finding.id == "diagnose-offline-memory"
    tokens = int(finding.fix.split()[2].rstrip(","))
    assert 0 < tokens * KIMI.token_bytes < GIB


def test_too_much_for_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=100 * GIB))
    available: list[Any] = [GIB // 4, None, 2 * GIB]
    monkeypatch.setattr(memory, "available_memory", lambda: available[0])
    finding = KIMI.too_much(tmp_path, "--budget")
    assert finding is not None
    assert "--context" in finding.fix
    for _ in range(2):
        available.pop(0)
        assert KIMI.too_much(tmp_path, "--budget") is None


def test_the_system_says_what_is_free() -> None:
    found = memory.available_memory()
    assert found is None or found > 0


@pytest.mark.parametrize("folder", [variants.LLAMA_DRAFTER, variants.MLA_DRAFTER])
def test_the_drafters_weights_are_within_it(
    folder: Path, subject_of: Callable[[str], Subject]
) -> None:
    subject = subject_of(folder.name)
    expected, wide = drafter_memory(subject.expected, subject.tensors, subject.largest_head)
    drafter = Drafter(subject.expected, subject.tensors, subject.target_tensors, eps=subject.eps)
    held = [*drafter._weights.values(), drafter.head("own")]
    took = sum(tensor.numel() * tensor.element_size() for tensor in held)
    width = subject.expected.hidden_size
    # Beside them rows of a head in float32, and the fit of a matrix.
    assert took <= expected <= took + width * 4 * (2 * subject.expected.vocab_size + 12 * width)
    assert wide >= 3 * subject.shape.hidden_size
    assert all(t.dtype == torch.float32 for t in drafter._weights.values())


def test_looking_at_the_head_is_within_it(subject_of: Callable[[str], Subject]) -> None:
    """What the fit holds at its most, against what is said of it beforehand."""
    subject = subject_of(variants.LLAMA_DRAFTER.name)
    width, places, rows = subject.expected.hidden_size, 4000, 30_000
    code = f"""
import resource, torch
torch.manual_seed(0)
from vllm_kimi_eagle3.diagnose.offline import refit
head = torch.randn({rows}, {width}).bfloat16()
given = [(torch.randn({places}, {width}), torch.randint(0, {rows}, ({places},)))]
known = {{token: token for token in range({rows})}}
refit._fitted(head[:64], [(given[0][0][:8], given[0][1][:8] % 64)], known)
refit._STEPS = 2
torch.set_num_threads(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
refit._fitted(head, given, known)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    took = 1024 * int(found.stdout)
    assert subject.largest_head is not None
    head = replace(subject.largest_head, shape=(rows, width))
    said = fit_memory(subject.expected, head, places)
    assert took < said < places * rows * 4
