# SPDX-License-Identifier: Apache-2.0
"""Reads a Hugging Face checkpoint folder: `config.json` and one or more safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def read_config(folder: Path | str) -> dict[str, Any]:
    """Returns the folder's `config.json` as it is written."""
    return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))


def read_text_config(folder: Path | str) -> dict[str, Any]:
    """Returns the text tower's part of `config.json`: `text_config` where there is one."""
    config = read_config(folder)
    return config.get("text_config", config)


def read_tensors(folder: Path | str) -> dict[str, torch.Tensor]:
    """Returns every tensor of the folder by name, in the dtype it is stored in.

    Raises:
        FileNotFoundError: the folder holds no safetensors file.
    """
    shards = sorted(Path(folder).glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"no *.safetensors file in {folder}")
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        tensors.update(load_file(shard))
    return tensors
