# SPDX-License-Identifier: Apache-2.0
"""What the offline mode takes, known before anything is loaded.

Beside the target, which takes what its server takes: the hidden states of the texts, in files, and
those of one text at a time in the memory of the worker that writes them. Scoring comes after the
target is gone.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_kimi_eagle3.checkpoint.drafter_tensors import Expected
from vllm_kimi_eagle3.checkpoint.tensors import TensorInfo
from vllm_kimi_eagle3.findings import Evidence, Finding

GIB = 1024**3
_FLOAT32 = 4
# Copies of one text's hidden states, keys, values and MLP that are alive at once, at most.
_COPIES = 4
# Rows of the head that are converted to float32 at a time (score.py).
_HEAD_ROWS = 16_384
# Looking at the head (refit.py): square matrices of the hidden size (the correction, its gradient,
# and what L-BFGS remembers), copies of what the head reads at each place, rows of the head that a
# place brings in and copies of them, and places of which there are logits at a time, with their
# copies on the way back and what an allocator has not given back yet (up to 9.2 of them were seen).
_MATRICES, _INPUTS, _ROWS, _ROW_COPIES = 12, 5, 5, 2
_FIT_PLACES, _LOGITS = 256, 10


@dataclass(frozen=True)
class Memory:
    """What a run takes.

    Attributes:
        states: how many hidden states of each token are kept.
        tokens: how many tokens of all texts together, at most.
        longest: tokens of the longest text.
        hidden_size: of the target.
        element_bytes: of a number of a hidden state.
        drafter_bytes: of the drafter's weights, as they are computed with.
        wide: the widest that a token becomes in the drafter, in float32 numbers.
        fit_bytes: of looking at the head, beside the weights.
    """

    states: int
    tokens: int
    longest: int
    hidden_size: int
    element_bytes: int
    drafter_bytes: int
    wide: int
    fit_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Of one token's hidden states."""
        return self.states * self.hidden_size * self.element_bytes

    @property
    def files(self) -> int:
        """Bytes of files with hidden states."""
        return self.tokens * self.token_bytes

    @property
    def worker(self) -> int:
        """Bytes of host memory in the worker that writes them, beside the target."""
        return self.longest * self.token_bytes

    @property
    def scoring(self) -> int:
        """Bytes on the device that scores, once the target is gone."""
        text = _COPIES * self.longest * self.wide * _FLOAT32
        return self.drafter_bytes + text + self.fit_bytes

    def statement(self, folder: Path) -> str:
        """In words, with the sum that it follows from."""
        return (
            f"{self.states} hidden states x {self.tokens:,} tokens x {self.hidden_size:,} x "
            f"{self.element_bytes} bytes = {_size(self.files)} at most in files ({folder}), of "
            f"which {_size(self.worker)} at a time in the worker's host memory; "
            f"{_size(self.scoring)} to score the drafter in float32, after the target is gone"
        )

    def too_much(self, folder: Path, option: str) -> Finding | None:
        """Why there is not the room for it; None if there is, or that is not known.

        Args:
            folder: where the files go.
            option: that makes it less, as the user writes it.
        """
        free = shutil.disk_usage(folder).free
        if self.files > free:
            fits = max(0, int(0.9 * free) // self.token_bytes)
            return Finding(
                "diagnose-offline-memory",
                f"the hidden states take up to {_size(self.files)}, and {folder} has "
                f"{_size(free)} left",
                f"write {option} {fits}, or give another folder with --keep"
                if fits
                else "give another folder with --keep",
                Evidence(file=str(folder), key="free", value=_size(free)),
            )
        memory = available_memory()
        if memory is not None and self.worker > memory:
            return Finding(
                "diagnose-offline-memory",
                f"the hidden states of the longest text take {_size(self.worker)} of host memory, "
                f"and {_size(memory)} are free",
                "write --context with fewer tokens",
                Evidence(file="/proc/meminfo", key="MemAvailable", value=_size(memory)),
            )
        return None


def drafter_memory(
    expected: Expected, tensors: Mapping[str, TensorInfo], head: TensorInfo | None
) -> tuple[int, int]:
    """Bytes of the weights that scoring keeps, and how wide a token becomes there.

    Args:
        head: the larger one of the heads that are tried; None if there is none.
    """
    layers = sum(
        info.nbytes // max(1, _width(info)) * _FLOAT32
        for name, info in tensors.items()
        if not name.startswith(("embed_tokens.", "lm_head.", "d2t", "t2d"))
    )
    rows = 0
    if head is not None:
        rows = head.nbytes + min(_HEAD_ROWS, head.shape[0]) * head.shape[-1] * _FLOAT32
    e = expected
    heads = e.num_heads * (e.qk_nope_head_dim + e.qk_rope_head_dim + e.v_head_dim or 3 * e.head_dim)
    joined = max(e.aux_count, 1) * e.target_hidden_size
    fit = _MATRICES * e.hidden_size**2 * _FLOAT32
    return layers + rows + fit, max(joined, heads, 2 * e.intermediate_size)


def fit_memory(expected: Expected, head: TensorInfo | None, places: int) -> int:
    """Bytes of looking at the head, beside the weights (refit.py).

    Args:
        head: the larger one of the heads that are tried; None if there is none.
        places: at which a draft begins, at most.
    """
    if head is None:
        return 0
    rows = min(head.shape[0], _ROWS * places)
    numbers = (_INPUTS * places + _ROW_COPIES * rows) * expected.hidden_size
    return (numbers + _LOGITS * _FIT_PLACES * rows) * _FLOAT32


def _width(info: TensorInfo) -> int:
    count = 1
    for size in info.shape:
        count *= size
    return info.nbytes // count if count else 1


def available_memory() -> int | None:
    """Bytes of host memory that can be had; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _size(count: int) -> str:
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    if count >= 1024**2:
        return f"{count / 1024**2:.1f} MiB"
    return f"{count / 1024:.0f} KiB"
