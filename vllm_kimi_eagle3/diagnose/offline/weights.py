# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint as torch tensors, read from where their header says they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vllm_kimi_eagle3.checkpoint.drafter_tensors import Expected, canonical
from vllm_kimi_eagle3.checkpoint.errors import CheckpointError
from vllm_kimi_eagle3.checkpoint.tensors import TensorInfo, opened, reading

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
_FLOATS = ("BF16", "F16", "F32", "F64")

# As vLLM fuses them, and as a checkpoint may hold them; sizes are rows of the parts.
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.fused_qkv_a_proj": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def read_tensor(info: TensorInfo) -> Tensor:
    """A tensor's values, in the dtype that it is stored in.

    Raises:
        CheckpointError: the file cannot be read or has become shorter, or the dtype is that of
            quantised weights.
    """
    dtype = _DTYPES.get(info.dtype)
    if dtype is None or info.file is None:
        raise CheckpointError(
            "diagnose-offline-no-score",
            f"a tensor is {info.dtype}, which is not computed with here",
            file=info.file,
            value=info.dtype,
        )
    buffer = bytearray(info.nbytes)
    view = memoryview(buffer)
    with opened(info.file) as file, reading(info.file):
        file.seek(info.begin)
        read = 0
        while read < len(buffer):
            got = file.readinto(view[read:])
            if not got:
                raise EOFError("it ends within a tensor")
            read += got
    if not buffer:
        return torch.empty(info.shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(info.shape)


def read_rows(info: TensorInfo, rows: Sequence[int]) -> Tensor:
    """Some rows of a matrix, ``[len(rows), columns]``: nothing else of it is read.

    Raises:
        CheckpointError: as :func:`read_tensor`.
    """
    width = info.nbytes // info.shape[0]
    single = [
        read_tensor(
            replace(
                info,
                shape=(1, *info.shape[1:]),
                begin=info.begin + row * width,
                end=info.begin + (row + 1) * width,
            )
        )
        for row in rows
    ]
    return (
        torch.cat(single)
        if single
        else read_tensor(replace(info, shape=(0, *info.shape[1:]), end=info.begin))
    )


def drafter_layers(tensors: Mapping[str, TensorInfo], expected: Expected) -> dict[str, Tensor]:
    """A drafter's tensors by canonical name in float32, without its vocabulary (embedding, head,
    maps), with fused linear layers taken apart.

    Raises:
        CheckpointError: as :func:`read_tensor`.
    """
    found: dict[str, Tensor] = {}
    for raw, info in tensors.items():
        name = canonical(raw)
        if name.startswith(("embed_tokens.", "lm_head.")) or info.dtype not in _FLOATS:
            continue
        found[name] = read_tensor(info).float()
    for name in list(found):
        prefix, dot, rest = name.partition(".self_attn.")
        if not dot:
            prefix, dot, rest = name.partition(".mlp.")
        module, _, leaf = f"{dot[1:]}{rest}".rpartition(".")
        if module in _FUSED:
            parts = _FUSED[module]
            whole = found.pop(name)
            sizes = _rows(parts, expected, whole.shape[0])
            for part, piece in zip(parts, whole.split(sizes), strict=True):
                found[f"{prefix}.{part}.{leaf}"] = piece
    return found


def _rows(parts: Sequence[str], expected: Expected, total: int) -> list[int]:
    """How many rows of a fused linear layer belong to each part."""
    if parts[0].startswith("mlp."):
        return [total // 2] * 2
    if len(parts) == 2:
        return [expected.q_lora_rank or 0, expected.kv_lora_rank + expected.qk_rope_head_dim]
    kv = expected.num_kv_heads * expected.head_dim
    return [expected.num_heads * expected.head_dim, kv, kv]


def device_for(bytes_needed: int, wanted: str | None = None) -> Any:
    """The device to score on: the one that is wanted, a GPU that has the memory, or the CPU."""
    if wanted:
        return torch.device(wanted)
    if torch.cuda.is_available():
        free = [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]
        best = max(range(len(free)), key=free.__getitem__)
        if free[best] > bytes_needed:
            return torch.device("cuda", best)
    return torch.device("cpu")
