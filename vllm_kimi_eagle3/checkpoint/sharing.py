# SPDX-License-Identifier: Apache-2.0
"""Whose embedding and LM head a drafter uses: its own, or the target's.

The target's where the drafter's checkpoint has none of its own, or has the target's over again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from .errors import CheckpointError
from .tensors import TensorInfo, find_tensors, same_bytes

Owner = Literal["own", "target"]

TENSORS = {"embedding": "embed_tokens.weight", "head": "lm_head.weight"}
"""The two parts, and the drafter's tensor of each."""
_OF_TARGET = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}
_WRAPPED = "language_model."  # Before the names in a multimodal target.

_SAMPLE_BYTES = 64 * 1024


def owners(
    tensors: Mapping[str, TensorInfo],
    target_folder: Path | None,
    same: Callable[[TensorInfo, TensorInfo], bool] = same_bytes,
) -> dict[str, Owner]:
    """Whose ``embedding`` and ``head``.

    Args:
        tensors: the drafter's.
        target_folder: the target's checkpoint; None if it is not on this machine, where what the
            drafter has counts as its own.
        same: tells whether two tensors hold the same.
    """
    target = _target_tensors(target_folder) if any(n in tensors for n in TENSORS.values()) else {}
    decided: dict[str, Owner] = {}
    for part, name in TENSORS.items():
        own, other = tensors.get(name), target.get(_OF_TARGET[part])
        # A quantised head has no such tensor, and is the drafter's all the same.
        if own is None:
            has = part == "head" and any(n.startswith("lm_head.") for n in tensors)
            decided[part] = "own" if has else "target"
        else:
            decided[part] = "target" if other is not None and _same(own, other, same) else "own"
    return decided


def seems_same(a: TensorInfo, b: TensorInfo) -> bool:
    """True if two tensors have the same dtype, shape, and bytes at their beginning, middle and
    end. Reads 384 KiB at most.

    Raises:
        CheckpointError: a file cannot be read, or has become shorter.
    """
    if (a.dtype, a.shape, a.nbytes) != (b.dtype, b.shape, b.nbytes):
        return False

    def part(info: TensorInfo, begin: int) -> TensorInfo:
        start = info.begin + begin
        return replace(info, begin=start, end=min(start + _SAMPLE_BYTES, info.end))

    last = max(a.nbytes - _SAMPLE_BYTES, 0)
    return all(same_bytes(part(a, at), part(b, at)) for at in (0, last // 2, last))


def _target_tensors(folder: Path | None) -> dict[str, TensorInfo]:
    """The target's two tensors by their names in the language model; empty if they are not here."""
    if folder is None:
        return {}
    names = [prefix + name for name in _OF_TARGET.values() for prefix in ("", _WRAPPED)]
    try:
        found = find_tensors(folder, *names)
    except CheckpointError:
        return {}  # The target's own trouble; it is said where the target is looked at.
    return {name.removeprefix(_WRAPPED): info for name, info in found.items()}


def _same(
    own: TensorInfo, other: TensorInfo, same: Callable[[TensorInfo, TensorInfo], bool]
) -> bool:
    try:
        return same(own, other)
    except CheckpointError:
        return False  # One of the files changed under us; it is said where it is loaded.
