# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_kimi_eagle3.checkpoint.sharing import owners, seems_same
from vllm_kimi_eagle3.checkpoint.tensors import read_tensors

BIG = (300, 1000)  # 600 kB: more than is sampled.


def folder(path: Path, **tensors: torch.Tensor) -> Path:
    path.mkdir()
    save_file(
        {name.replace("__", "."): t for name, t in tensors.items()}, path / "model.safetensors"
    )
    return path


def numbers(seed: int = 0) -> torch.Tensor:
    return torch.randn(BIG, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("prefix", ["", "language_model__"])
def test_whose(prefix: str, tmp_path: Path) -> None:
    target = folder(
        tmp_path / "target",
        **{
            f"{prefix}model__embed_tokens__weight": numbers(),
            f"{prefix}lm_head__weight": numbers(1),
        },
    )
    none = read_tensors(folder(tmp_path / "none", fc__weight=numbers()))
    assert none is not None
    assert owners(none, target) == {"embedding": "target", "head": "target"}
    copy = read_tensors(
        folder(tmp_path / "copy", embed_tokens__weight=numbers(), lm_head__weight=numbers(2))
    )
    assert copy is not None
    assert owners(copy, target) == {"embedding": "target", "head": "own"}
    # What cannot be compared is its own.
    assert owners(copy, None) == {"embedding": "own", "head": "own"}
    assert owners(copy, tmp_path / "nowhere") == {"embedding": "own", "head": "own"}
    (tmp_path / "copy" / "model.safetensors").unlink()
    assert owners(copy, target) == {"embedding": "own", "head": "own"}
    packed = read_tensors(folder(tmp_path / "packed", lm_head__weight_packed=numbers()))
    assert packed is not None
    assert owners(packed, target) == {"embedding": "target", "head": "own"}


@pytest.mark.parametrize("at", [0, 150, 299])
def test_samples_show_a_difference_at_either_end_and_in_the_middle(at: int, tmp_path: Path) -> None:
    a, b = numbers(), numbers()
    b[at] += 1
    first = read_tensors(folder(tmp_path / "a", x=a, y=b, z=a.clone(), small=a[0].clone()))
    assert first is not None
    assert seems_same(first["x"], first["z"])
    assert not seems_same(first["x"], first["y"])
    assert not seems_same(first["x"], first["small"])
    assert seems_same(first["small"], first["small"])
