# SPDX-License-Identifier: Apache-2.0
"""TEST ONLY: attention on the CPU over a paged cache as a GPU's FLASH_ATTN has it.

The CPU's own back-end packs its cache for its kernels, so the plugin's kernels cannot read it. With
`CPU_PAGED_ATTENTION=1` in the environment this one serves every layer in its place, in plain torch,
so that a whole engine runs stock's drafting loop, and the plugin's, over one and the same cache
`[2, blocks, page, kv_heads, head_dim]`. It has FLASH_ATTN's name: that is what the layout is of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)


@dataclass
class PagedMetadata:
    """A batch: `query_start_loc` [B + 1], `seq_lens` [B], `block_table` [B, pages], `slots` [T]."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor


class PagedBackend(AttentionBackend):
    """The back-end."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[PagedImpl]:
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[PagedBuilder]:
        return PagedBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        return False


class PagedBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Stock's metadata as they are: copied, since a drafting loop changes the lengths in place."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PagedMetadata:
        common = common_attn_metadata
        return PagedMetadata(
            common.num_actual_tokens,
            common.query_start_loc.clone(),
            common.seq_lens.clone(),
            common.block_table_tensor,
            common.slot_mapping.clone(),
        )


class PagedImpl(AttentionImpl):
    """Writes the keys and values, then attends, a request at a time."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        assert alibi_slopes is None
        assert sliding_window is None
        assert not logits_soft_cap
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.decoder = str(getattr(attn_type, "value", attn_type)) == "decoder"

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`query` [T, heads, head_dim], `key` and `value` [T, kv_heads, head_dim]."""
        if attn_metadata is None:
            return output.fill_(0)
        assert self.decoder
        tokens = attn_metadata.num_actual_tokens
        keys, values = kv_cache.unbind(0)
        page = keys.shape[1]
        slots = attn_metadata.slots[:tokens]
        kept = slots >= 0
        keys[slots[kept] // page, slots[kept] % page] = key[:tokens][kept]
        values[slots[kept] // page, slots[kept] % page] = value[:tokens][kept]
        result = output.view(-1, self.num_heads, self.head_size)
        starts = attn_metadata.query_start_loc.tolist()
        lengths = attn_metadata.seq_lens.tolist()
        for row, length in enumerate(lengths):
            start, end = starts[row], min(starts[row + 1], tokens)
            if end <= start:
                continue
            if length <= 0:
                result[start:end] = 0
                continue
            pages = attn_metadata.block_table[row, : -(-length // page)].long()
            seen = (c[pages].flatten(0, 1)[:length].transpose(0, 1) for c in (keys, values))
            result[start:end] = self._attend(query[start:end].transpose(0, 1), *seen)
        return output

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = self.num_heads // self.num_kv_heads
        k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
        scores = torch.matmul(q, k.transpose(1, 2)).float() * self.scale
        rows, columns = q.shape[1], k.shape[1]
        # The last query sees all, each one before it a token less.
        mask = torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return torch.matmul(weights.to(v.dtype), v).transpose(0, 1)
