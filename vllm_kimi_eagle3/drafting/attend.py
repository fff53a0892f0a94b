# SPDX-License-Identifier: Apache-2.0
"""A drafter's attention: by the release's own layer, or by the kernels over its paged KV cache.

Both take the product that :class:`~.forward.DraftForward` has made and return the heads' results.
The release's layer needs a forward context with metadata for the step, which the runner makes.
The kernels need a block table, lengths and slots, all on the device, so that a loop of draft steps
can advance them inside one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .weights import AttentionFacts, Unsupported

LAYOUTS = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"})
"""Attention back-ends, by vLLM's names, whose cache holds keys and values as they are."""
_FP8 = frozenset({"fp8", "fp8_e4m3"})
_SAME = {"bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16}
_MANY = 12_345  # A number of blocks that is no other dimension of a cache.


@dataclass(frozen=True)
class PagedCaches:
    """A layer's paged KV cache.

    Attributes:
        page_size: tokens of a page.
        k: Llama: ``[blocks, page, kv_heads, head_dim]``, any strides; MLA: ``[blocks, page, R+P]``.
        v: Llama: as ``k``; MLA: None.
        k_scale: float32 scalar tensor of an fp8 cache, else None.
        v_scale: the same for the values.
    """

    page_size: int
    k: torch.Tensor
    v: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


def has_cache(layer: Any) -> bool:
    """True if vLLM has bound a KV cache to the attention layer."""
    return _bound(layer) is not None


def cache_address(layer: Any) -> int:
    """Where the attention layer's KV cache is in memory; 0 without one."""
    cache = _bound(layer)
    return 0 if cache is None else cache.data_ptr()


def paged_caches(layer: Any) -> PagedCaches:
    """The cache of an attention layer (``facts.layer``), once vLLM has bound it.

    Raises:
        Unsupported: no cache yet, or a layout that the kernels do not read.
    """
    cache = _bound(layer)
    if cache is None:
        raise Unsupported("the drafter's KV cache is not there yet")
    if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
        raise Unsupported("the drafter's KV cache is another layer's")
    if getattr(layer, "calculate_kv_scales", False):
        raise Unsupported("--calculate-kv-scales: the scales of the drafter's KV cache are not set")
    cache, fp8 = _typed(layer, cache)
    k_scale = _scale(layer, "_k_scale") if fp8 else None
    if hasattr(layer, "kv_lora_rank"):
        if cache.dim() == 4 and cache.shape[1] == 1:
            cache = cache.squeeze(1)
        width = layer.kv_lora_rank + layer.qk_rope_head_dim
        if cache.dim() != 3 or cache.shape[2] != width or cache.stride(2) != 1:
            raise Unsupported(f"the drafter's MLA cache is {tuple(cache.shape)}")
        return PagedCaches(cache.shape[1], cache, None, k_scale, None)
    k, v = _keys_and_values(layer, cache)
    heads, dim = layer.num_kv_heads, layer.head_size
    if k.shape != v.shape or k.dim() != 4 or k.shape[2:] != (heads, dim) or k.stride(3) != 1:
        raise Unsupported(f"the drafter's KV cache is {tuple(cache.shape)}")
    return PagedCaches(k.shape[1], k, v, k_scale, _scale(layer, "_v_scale") if fp8 else None)


class StockAttend:
    """Attention by the release's own layer, under the current forward context.

    Args:
        facts: the drafter's.
    """

    def __init__(self, facts: AttentionFacts) -> None:
        self.facts = facts

    def __call__(self, positions: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """Rotate, write into the cache, and attend.

        Args:
            positions: ``[T]``.
            projected: ``[T, width]``, queries, keys and values, or MLA's latents; overwritten.

        Returns:
            ``[T, heads * value_dim]``.
        """
        facts = self.facts
        tokens = projected.shape[0]
        if facts.latent is None:
            from vllm_kimi_eagle3.kernels.rope_kv_write import rope_kv_write

            rope_kv_write(
                projected,
                positions,
                facts.cos_sin,
                None,
                None,
                None,
                heads=facts.heads,
                kv_heads=facts.kv_heads,
                head_dim=facts.head_dim,
                neox=facts.neox,
                position_limit=facts.position_limit,
            )
            keys = facts.kv_heads * facts.head_dim
            q, k, v = projected.split([facts.heads * facts.head_dim, keys, keys], dim=-1)
            out: torch.Tensor = facts.layer(q, k, v)
            return out
        from vllm_kimi_eagle3.kernels.mla_rope_kv_write import mla_latents, mla_rope_q

        latent = facts.latent
        q_a = mla_latents(
            projected,
            positions,
            facts.cos_sin,
            None,
            None,
            q_lora_rank=latent.q_lora_rank,
            kv_lora_rank=latent.kv_lora_rank,
            rope_dim=facts.rope_dim,
            q_norm=latent.q_norm,
            kv_norm=latent.kv_norm,
            eps=latent.eps,
            position_limit=facts.position_limit,
            neox=facts.neox,
        )
        q = latent.q_b(q_a).view(tokens, facts.heads, latent.nope_dim + facts.rope_dim)
        mla_rope_q(
            q,
            positions,
            facts.cos_sin,
            nope_dim=latent.nope_dim,
            rope_dim=facts.rope_dim,
            position_limit=facts.position_limit,
            neox=facts.neox,
        )
        cached = projected[:, latent.q_lora_rank :]
        kv_c, k_pe = cached.split([latent.kv_lora_rank, facts.rope_dim], dim=-1)
        k_pe = k_pe.unsqueeze(1)
        out = facts.layer(q, kv_c, k_pe, output_shape=(tokens, facts.heads * facts.value_dim))
        return out


class PagedAttend:
    """Attention by the kernels.

    All tensors are kept, not copied, and attributes may be replaced between calls. The
    ``query_len`` tokens of a request are consecutive rows.

    Args:
        facts: the drafter's.
        caches: of ``facts.layer``.
        block_table: int32 ``[B, pages]``, any row stride.
        seq_lens: int32 ``[B]``, the query's tokens included; 0 is padding.
        slots: int64 ``[B * query_len]``: ``block * page + offset``; -1 writes nothing.
        query_len: tokens of each request.
        workspace: float32, of at least :meth:`workspace_numel`; filled with zeros here, as the
            kernels leave what they count with.
        max_batch: the requests that the workspace serves at once, B if None; of more, some are
            computed after others.

    Raises:
        Unsupported: MLA whose ``kv_b_proj`` cannot be absorbed.
    """

    def __init__(
        self,
        facts: AttentionFacts,
        caches: PagedCaches,
        *,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
        query_len: int,
        workspace: torch.Tensor,
        max_batch: int | None = None,
    ) -> None:
        self.facts, self.caches = facts, caches
        self.block_table, self.seq_lens, self.slots = block_table, seq_lens, slots
        self.query_len, self.workspace, self.max_batch = query_len, workspace, max_batch
        self._absorbed = None if facts.latent is None else facts.latent.absorbed()
        workspace.zero_()

    @staticmethod
    def workspace_numel(
        facts: AttentionFacts, *, max_batch: int, query_len: int, device: torch.device
    ) -> int:
        """The float32 elements of scratch for batches of up to ``max_batch``."""
        from vllm_kimi_eagle3.kernels.arch import arch_of

        if facts.latent is not None:
            from vllm_kimi_eagle3.kernels import mla_decode

            return mla_decode.workspace_numel(
                max_batch=max_batch,
                query_len=query_len,
                heads=facts.heads,
                kv_lora_rank=facts.latent.kv_lora_rank,
                arch=arch_of(device),
            )
        from vllm_kimi_eagle3.kernels import mha_decode

        return mha_decode.workspace_numel(
            max_batch=max_batch,
            query_len=query_len,
            heads=facts.heads,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            arch=arch_of(device),
        )

    @staticmethod
    def unsupported(facts: AttentionFacts, caches: PagedCaches, *, query_len: int) -> str:
        """Why the kernels cannot serve this; empty where they can."""
        if facts.sliding_window is not None:
            return "the drafter's attention has a sliding window"
        impl = getattr(facts.layer, "impl", None)
        if getattr(facts.layer, "has_sink", False) or getattr(impl, "sinks", None) is not None:
            return "the drafter's attention has sinks"
        if getattr(impl, "alibi_slopes", None) is not None:
            return "the drafter's attention has ALiBi"
        if getattr(impl, "logits_soft_cap", None):
            return "the drafter's attention caps its scores"
        if getattr(impl, "dcp_world_size", 1) > 1:
            return "a rank holds a part of the drafter's KV cache"
        fp8 = caches.k.dtype == torch.float8_e4m3fn
        if (
            fp8
            and caches.k.device.type == "cuda"
            and torch.cuda.get_device_capability(caches.k.device) < (8, 9)
        ):
            return "the GPU has no fp8, which the drafter's KV cache is"
        if facts.latent is not None:
            from vllm_kimi_eagle3.kernels import mla_decode

            try:
                facts.latent.absorbed()
            except Unsupported as error:
                return str(error)
            why = mla_decode.unsupported(
                heads=facts.heads,
                query_len=query_len,
                kv_lora_rank=facts.latent.kv_lora_rank,
                rope_dim=facts.rope_dim,
                q_dtype=facts.dtype,
                kv_dtype=caches.k.dtype,
                page_size=caches.page_size,
            )
            return why or ""
        from vllm_kimi_eagle3.kernels import mha_decode

        return (
            mha_decode.unsupported(
                heads=facts.heads,
                kv_heads=facts.kv_heads,
                head_dim=facts.head_dim,
                query_len=query_len,
                q_dtype=facts.dtype,
                kv_dtype=caches.k.dtype,
                page_size=caches.page_size,
            )
            or ""
        )

    def __call__(self, positions: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """As :class:`StockAttend`'s; ``positions`` ``[B * query_len]``."""
        if self.facts.latent is not None:
            return self._latent(positions, projected)
        from vllm_kimi_eagle3.kernels.mha_decode import mha_decode
        from vllm_kimi_eagle3.kernels.rope_kv_write import rope_kv_write

        facts, caches = self.facts, self.caches
        q = rope_kv_write(
            projected,
            positions,
            facts.cos_sin,
            self.slots,
            caches.k,
            caches.v,
            heads=facts.heads,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            neox=facts.neox,
            position_limit=facts.position_limit,
            k_scale=caches.k_scale,
            v_scale=caches.v_scale,
            page_size=caches.page_size,
        )
        out = q.new_empty(q.shape)
        for some, rows in self._in_turn():
            mha_decode(
                q[rows],
                caches.k,
                caches.v,
                self.block_table[some],
                self.seq_lens[some],
                scale=facts.scale,
                query_len=self.query_len,
                workspace=self.workspace,
                out=out[rows],
                k_scale=caches.k_scale,
                v_scale=caches.v_scale,
                max_batch=self.max_batch,
            )
        return out.flatten(1)

    def _in_turn(self) -> Iterator[tuple[slice, slice]]:
        """The requests of each call of attention, and their rows."""
        batch = self.seq_lens.shape[0]
        step = self.max_batch or max(batch, 1)
        for first in range(0, batch, step):
            stop = min(first + step, batch)
            yield slice(first, stop), slice(first * self.query_len, stop * self.query_len)

    def _latent(self, positions: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        from vllm_kimi_eagle3.kernels.head_products import head_products
        from vllm_kimi_eagle3.kernels.mla_decode import mla_decode
        from vllm_kimi_eagle3.kernels.mla_rope_kv_write import mla_latents, mla_rope_q

        facts, caches, latent = self.facts, self.caches, self.facts.latent
        assert latent is not None
        assert self._absorbed is not None
        w_uk, w_uv = self._absorbed
        q_a = mla_latents(
            projected,
            positions,
            facts.cos_sin,
            self.slots,
            caches.k,
            q_lora_rank=latent.q_lora_rank,
            kv_lora_rank=latent.kv_lora_rank,
            rope_dim=facts.rope_dim,
            q_norm=latent.q_norm,
            kv_norm=latent.kv_norm,
            eps=latent.eps,
            page_size=caches.page_size,
            position_limit=facts.position_limit,
            kv_scale=caches.k_scale,
            neox=facts.neox,
        )
        tokens = q_a.shape[0]
        q = latent.q_b(q_a).view(tokens, facts.heads, latent.nope_dim + facts.rope_dim)
        q_nope, q_pe = mla_rope_q(
            q,
            positions,
            facts.cos_sin,
            nope_dim=latent.nope_dim,
            rope_dim=facts.rope_dim,
            position_limit=facts.position_limit,
            neox=facts.neox,
        )
        q_latent = head_products(q_nope, w_uk)
        out = q_latent.new_empty(q_latent.shape)
        for some, rows in self._in_turn():
            mla_decode(
                (q_latent[rows], q_pe[rows]),
                caches.k,
                self.block_table[some],
                self.seq_lens[some],
                scale=facts.scale,
                query_len=self.query_len,
                workspace=self.workspace,
                out=out[rows],
                kv_scale=caches.k_scale,
                max_batch=self.max_batch,
            )
        return head_products(out, w_uv).flatten(1)


def _bound(layer: Any) -> torch.Tensor | None:
    cache = getattr(layer, "kv_cache", None)
    if isinstance(cache, (list, tuple)):  # One for each virtual engine, up to 0.18.
        cache = cache[0] if cache else None
    return cache if isinstance(cache, torch.Tensor) and cache.numel() else None


def _typed(layer: Any, cache: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The cache in the dtype of what it holds, and whether that is fp8."""
    named = str(getattr(layer, "kv_cache_dtype", "auto"))
    if named in _FP8:
        if cache.dtype == torch.uint8:
            cache = cache.view(torch.float8_e4m3fn)
        if cache.dtype != torch.float8_e4m3fn:
            raise Unsupported(f"the drafter's fp8 KV cache is {cache.dtype}")
        return cache, True
    same = named == "auto" or _SAME.get(named) == cache.dtype
    if not same or not cache.dtype.is_floating_point or cache.element_size() == 1:
        raise Unsupported(f"the drafter's KV cache is {named}")
    return cache, False


def _scale(layer: Any, name: str) -> torch.Tensor:
    scale = getattr(layer, name, None)
    if not isinstance(scale, torch.Tensor) or scale.numel() != 1 or scale.dtype != torch.float32:
        raise Unsupported("the drafter's fp8 KV cache has more than one scale")
    return scale.detach().reshape(())


def _keys_and_values(layer: Any, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views ``[blocks, page, kv_heads, head_dim]`` of the keys and of the values."""
    backend: Any = layer.get_attn_backend()
    name = backend.get_name()
    if name not in LAYOUTS:
        raise Unsupported(f"the drafter's attention is {name}")
    heads, dim = layer.num_kv_heads, layer.head_size
    if cache.dim() == 4:
        # From 0.26 on: [blocks, heads, page, keys | values].
        if cache.shape[1] != heads or cache.shape[3] != 2 * dim:
            raise Unsupported(f"the drafter's KV cache is {tuple(cache.shape)}")
        k, v = cache.transpose(1, 2).split(dim, dim=-1)
        return k, v
    if cache.dim() == 5:
        # FLASH_ATTN has had keys and values apart, up to 0.22, and then block by block.
        shape = tuple(backend.get_kv_cache_shape(_MANY, cache.shape[2], heads, dim))
        for pair, blocks in ((0, 1), (1, 0)):
            if shape[pair] == 2 and shape[blocks] == _MANY and cache.shape[pair] == 2:
                k, v = cache.unbind(pair)
                return k, v
    raise Unsupported(f"the drafter's KV cache is {tuple(cache.shape)}")
