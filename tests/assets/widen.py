# SPDX-License-Identifier: Apache-2.0
"""The tiny pair with the real Kimi's attention head sizes, computing what the tiny pair computes.

    python tests/assets/widen.py FOLDER    ->  FOLDER/kimi-k2.5-tiny, FOLDER/eagle3-mla-tiny

GPU back-ends take only the real head sizes (128 channels without rope, 64 with, values of 128). The
tiny models have 32, 64 and 32: zeros make up the difference, which change no score and no value.
The softmax scale is of the head size, so that queries are multiplied by the square root of the
quotient; that the product is rounded to bfloat16 is the only difference.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ASSETS = Path(__file__).resolve().parent
NAMES = ("kimi-k2.5-tiny", "eagle3-mla-tiny")
NOPE, VALUE = 128, 128


def widen(source: Path, destination: Path) -> Path:
    """A copy of a target's or an MLA drafter's folder with wider heads; returns `destination`."""
    shutil.copytree(source, destination, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = config.get("text_config", config)
    heads, rope = text["num_attention_heads"], text["qk_rope_head_dim"]
    nope, value = text["qk_nope_head_dim"], text["v_head_dim"]
    text.update(qk_nope_head_dim=NOPE, v_head_dim=VALUE)
    (destination / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    # The scale is the head size to the power of -1/2, YaRN's factor apart.
    factor = ((NOPE + rope) / (nope + rope)) ** 0.5

    def split(tensor: Tensor, *sizes: int) -> tuple[Tensor, ...]:
        """The parts of each head's rows: `[heads, size, columns]`."""
        return tensor.view(heads, sum(sizes), -1).split(sizes, dim=1)

    def padded(tensor: Tensor, size: int) -> Tensor:
        rows = tensor.new_zeros(heads, size - tensor.shape[1], tensor.shape[2])
        return torch.cat([tensor, rows], dim=1)

    def joined(*parts: Tensor) -> Tensor:
        return torch.cat(parts, dim=1).flatten(0, 1).contiguous()

    for file in sorted(source.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("q_b_proj.weight"):
                plain, rotated = split((tensor.float() * factor).to(tensor.dtype), nope, rope)
                tensors[name] = joined(padded(plain, NOPE), rotated)
            elif name.endswith("kv_b_proj.weight"):
                plain, values = split(tensor, nope, value)
                tensors[name] = joined(padded(plain, NOPE), padded(values, VALUE))
            elif name.endswith("self_attn.o_proj.weight"):
                (values,) = split(tensor.T, value)
                tensors[name] = joined(padded(values, VALUE)).T.contiguous()
        save_file(tensors, destination / file.name, metadata={"format": "pt"})
    return destination


def write_wide_pair(folder: Path) -> tuple[Path, Path]:
    """The target and its MLA drafter. The Llama drafter has no such sizes and serves as it is."""
    target, drafter = (widen(ASSETS / name, folder / name) for name in NAMES)
    return target, drafter


if __name__ == "__main__":
    print(*write_wide_pair(Path(sys.argv[1])))
