# SPDX-License-Identifier: Apache-2.0
"""The tiny Llama drafter with heads of 128 channels, computing what the tiny one computes.

As `tests/assets/widen.py` does for MLA. Kernels for fp8 caches take no heads as small as the tiny
drafter's. Rope turns channel i of a half with the frequency theta^(-2i/n): in n' channels that is
channel i * n'/n of a half, so queries and keys are spread out to these, with zeros between. The
softmax scale is of the head size; queries are multiplied by the root of the quotient, 2 here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HEAD_DIM = 128


def widen_llama(source: Path, destination: Path) -> Path:
    """A copy of a Llama drafter's folder with wider heads; returns `destination`."""
    shutil.copytree(source, destination, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    dim = config["head_dim"]
    step = HEAD_DIM // dim
    assert step * dim == HEAD_DIM
    assert config["rope_scaling"] is None
    config["head_dim"] = HEAD_DIM
    (destination / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    half = torch.arange(dim // 2) * step
    rotated = torch.cat([half, HEAD_DIM // 2 + half])
    for file in sorted(source.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            which = name.rpartition("self_attn.")[2].removesuffix("_proj.weight")
            if which in ("q", "k", "v"):
                rows = tensor.view(-1, dim, tensor.shape[1])
                wide = rows.new_zeros(rows.shape[0], HEAD_DIM, rows.shape[2])
                if which == "v":
                    wide[:, :dim] = rows
                else:
                    wide[:, rotated] = rows * (step**0.5 if which == "q" else 1)
                tensors[name] = wide.flatten(0, 1)
            elif which == "o":
                columns = tensor.view(tensor.shape[0], -1, dim)
                wide = columns.new_zeros(*columns.shape[:2], HEAD_DIM)
                wide[:, :, :dim] = columns
                tensors[name] = wide.flatten(1)
        save_file(tensors, destination / file.name, metadata={"format": "pt"})
    return destination
