# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33.0's own MLA decode op, to be compared with, loaded from a copy of its one file.

The file is `vllm/v1/attention/ops/triton_decode_attention.py` of the 0.33.0 wheel. It takes two
names from the rest of vLLM, `current_platform.is_rocm` and the Triton modules; stand-ins give it
those (and nothing else), so that no vLLM has to be installed where the kernel is measured. None of
it is kept in this repository.

`StockMla` calls it as 0.33.0's `TritonMLAImpl.forward_mqa` does: each query token is a row of its
own with its own length, each row has a copy of its request's block table, and the number of KV
splits follows from the longest length and the number of SMs. What `forward_mqa` prepares on the way
(the copies, the lengths, zeroed outputs) is done once, in the constructor, and so is never timed.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# `_compute_num_kv_splits` of 0.33.0's triton_mla.py.
TOKENS_PER_SPLIT = 512
SPLITS_PER_SM = 2


def load_stock(file: Path) -> Any:
    """The op's module."""
    import triton
    import triton.language

    platform = types.SimpleNamespace(is_rocm=lambda: False)
    stand_ins: dict[str, Any] = {
        "vllm": {},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
    }
    before = {name: sys.modules.get(name) for name in stand_ins}
    for name, content in stand_ins.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module
    try:
        spec = importlib.util.spec_from_file_location("stock_triton_decode_attention", file)
        if spec is None or spec.loader is None:
            raise FileNotFoundError(f"{file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name, was in before.items():
            if was is None:
                del sys.modules[name]
            else:
                sys.modules[name] = was
    return module


def num_kv_splits(longest: int, sms: int) -> int:
    """KV splits of a batch whose longest request has `longest` tokens, on a GPU with `sms` SMs."""
    blocks = max(1, longest // TOKENS_PER_SPLIT)
    return int(min(1 << (blocks - 1).bit_length(), sms * SPLITS_PER_SM))


class StockMla:
    """One call of the stock op, with everything prepared: `stock()` runs it again.

    Attributes:
        out: `[B * T, N, R]` in q's dtype. lse: `[B * T, N]`. As in vLLM, lse is in q's dtype.
    """

    def __init__(
        self,
        module: Any,
        q: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        query_len: int,
        kv_scale: Tensor | None = None,
        kv_lora_rank: int = 512,
        longest: int | None = None,
        sms: int | None = None,
        workspace: Tensor | None = None,
    ) -> None:
        """Arguments as of `mla_decode`.

        Args:
            longest: tokens of the longest request; read from `seq_lens` if not given.
            sms: the GPU's SMs; asked of the device if not given.
            workspace: float32, `workspace_numel` elements or more.
        """
        rows, heads, _ = q.shape
        if longest is None:
            longest = int(seq_lens.max())
        if sms is None:
            sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        splits = num_kv_splits(longest, sms)
        numel = self.workspace_numel(rows, heads, longest, sms, kv_lora_rank)
        if workspace is None:
            workspace = torch.empty(numel, device=q.device)
        logits = workspace[:numel].view(rows, heads, splits, kv_lora_rank + 1)
        self.out = torch.zeros(rows, heads, kv_lora_rank, dtype=q.dtype, device=q.device)
        self.lse = torch.zeros(rows, heads, dtype=q.dtype, device=q.device)
        offsets = torch.arange(1 - query_len, 1, dtype=torch.int32, device=q.device)
        row_lens = (seq_lens[:, None] + offsets).flatten().clamp(min=0)
        cache = kv_cache.unsqueeze(2)
        one = torch.ones(1, device=q.device)
        arguments = (
            q, cache, cache[..., :kv_lora_rank], self.out, self.lse,
            block_table.repeat_interleave(query_len, dim=0), row_lens,
            logits, splits, scale, kv_cache.shape[1],
        )  # fmt: skip
        scales = {"k_scale": one if kv_scale is None else kv_scale}
        scales["v_scale"] = scales["k_scale"]
        self.run = lambda: module.decode_attention_fwd(*arguments, **scales, is_mla=True)

    @staticmethod
    def workspace_numel(
        rows: int, heads: int, longest: int, sms: int, kv_lora_rank: int = 512
    ) -> int:
        """float32 elements of the split results."""
        return rows * heads * num_kv_splits(longest, sms) * (kv_lora_rank + 1)

    def __call__(self) -> tuple[Tensor, Tensor]:
        self.run()
        return self.out, self.lse
