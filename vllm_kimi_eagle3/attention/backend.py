# SPDX-License-Identifier: Apache-2.0
"""TRITON_MLA of the release that is installed, with decode and verify steps by our kernel.

Subclasses only: prefill, metadata, KV cache and DCP are the release's own code, and so is
everything where :func:`~vllm_kimi_eagle3.attention.plan.plan_of` says that stock serves. Attention
is where vLLM splits the compiled graph, so which class serves is in no compiled code.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from vllm.config.vllm import get_current_vllm_config
from vllm.distributed.parallel_state import is_global_first_rank
from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla import triton_mla as stock
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from vllm_kimi_eagle3.kernels.arch import arch_of
from vllm_kimi_eagle3.kernels.mla_decode import combine_shape, mla_decode, workspace_numel
from vllm_kimi_eagle3.log import get_logger

from .plan import KV_LORA_RANK, NO_KIMI, ROPE_DIM, Plan, plan_of

_StockBackend: Any = stock.TritonMLABackend
_StockImpl: Any = stock.TritonMLAImpl
_StockBuilder: Any = _StockBackend.get_builder_cls()  # Of its own from 0.22 on.

# The method was renamed in 0.16.
_DECODE = "forward_mqa" if hasattr(_StockImpl, "forward_mqa") else "_forward_decode"
# Up to 0.17 the class refuses an fp8 cache, though all of MLA around it can use one.
_REFUSES_FP8 = "fp8" not in _StockBackend.supported_kv_cache_dtypes
# From 0.33 on the builder's __init__ calls a function that reserves what stock's kernel needs.
_RESERVES_IN_INIT = hasattr(stock, "_reserve_attn_logits_workspace")

# A tile of the kernel is 32 or 64 tokens: in one page, it takes one look-up.
_PAGE = 64

_logged = False


class MlaDecodeMetadataBuilder(_StockBuilder):
    """The release's builder, in which a verify step is a decode.

    Requests of up to ``Plan.query_len`` tokens take the decode path. Where all have the same
    number it is declared fit for a full CUDA graph: the kernel's grid does not depend on the
    lengths. Others are filled up for the kernel (:func:`_ragged`), because a single request
    without drafts would send all verify steps of its batch to prefill.
    """

    query_len_support: QueryLenSupport = QueryLenSupport.VARLEN
    reorder_batch_threshold: int

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        self._plan = plan_of(vllm_config)
        self._captures = False
        if self._plan.stock:
            self.query_len_support = _StockBuilder.query_len_support
        if self._plan.stock or not _RESERVES_IN_INIT:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        else:
            super(_StockBuilder, self).__init__(kv_cache_spec, layer_names, vllm_config, device)
            self.supports_draft_decode_metadata_update = self.dcp_world_size == 1
        if not self._plan.stock:
            _workspace(_workspace_numel(self._plan, device), device)
            if device.type == "cuda":
                compile_kernels(
                    self._plan,
                    query_dtype=vllm_config.model_config.dtype,
                    cache_dtype=kv_cache_spec.dtype,
                    page_size=kv_cache_spec.block_size,
                    device=device,
                )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """The metadata of a step that is captured; see vLLM's own."""
        self._captures = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._captures = False

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """The metadata of a step; see vLLM's own."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not self._plan.stock and metadata.decode is not None:
            metadata.decode.mla_decode_rows = _ragged(
                metadata, common_attn_metadata, () if self._captures else self._plan.query_lens
            )
        return metadata

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """What full CUDA graphs may hold; see vLLM's own."""
        plan = plan_of(vllm_config)
        if plan.stock:
            return _StockBuilder.get_cudagraph_support(vllm_config, kv_cache_spec)
        if plan.verifies:
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def _init_reorder_batch_threshold(self, *args: Any, **kwargs: Any) -> None:
        super()._init_reorder_batch_threshold(*args, **kwargs)
        if not self._plan.stock:
            self.reorder_batch_threshold = min(self.reorder_batch_threshold, self._plan.query_len)

    def _reserve_attn_logits_workspace(self) -> None:
        # From 0.25 to 0.32, called by __init__: gigabytes for a kernel that does not run here.
        if self._plan.stock:
            super()._reserve_attn_logits_workspace()


class MlaDecodeImpl(_StockImpl):
    """The release's layer, whose decode step is one call of the kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._plan = plan_of(get_current_vllm_config())
        dtype = kwargs["kv_cache_dtype"]
        fp8 = dtype.startswith("fp8")
        if fp8 and _REFUSES_FP8 and not self._plan.stock:
            super().__init__(*args, **{**kwargs, "kv_cache_dtype": "auto"})
            self.kv_cache_dtype = dtype
            # The kernel wants the query in its own type; 0.15 always asks this, later releases
            # if the layer says so.
            self._decode_concat_quant_fp8_op = _concatenated
            self.supports_quant_query_input = False
        else:
            super().__init__(*args, **kwargs)
        if not self._plan.stock:
            # Here and not only in the builder: what is taken before vLLM measures its memory is
            # not given to the KV cache a second time.
            device = torch.device(current_platform.device_type)
            self._workspace_numel = _workspace_numel(self._plan, device)
            _workspace(self._workspace_numel, device)
        _log_once(self._plan)

    def reserve_workspace(self) -> None:
        """From 0.33 on: take, while memory is measured, what decode steps need."""
        if self._plan.stock:
            super().reserve_workspace()

    def _decode(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the requests that decode or verify.

        Args:
            q: ``[num_decode_tokens, heads, 576]``, or its first 512 and last 64 channels.
            kv_c_and_k_pe_cache: ``[num_blocks, page, 576]``.
            attn_metadata: the builder's.
            layer: the layer, for the scale of its fp8 cache.

        Returns:
            ``[num_decode_tokens, heads, 512]`` and the natural log-sum-exp
            ``[num_decode_tokens, heads]`` in float32, by which DCP merges.
        """
        if self._plan.stock:
            result: tuple[torch.Tensor, torch.Tensor | None]
            result = getattr(super(), _DECODE)(q, kv_c_and_k_pe_cache, attn_metadata, layer)
            return result
        parts = q if isinstance(q, tuple) else (q,)
        tokens, requests = parts[0].shape[0], attn_metadata.decode.seq_lens.shape[0]
        rows = getattr(attn_metadata.decode, "mla_decode_rows", None)
        if rows is None:
            query_len = tokens // requests
            return self._attend(parts, query_len, kv_c_and_k_pe_cache, attn_metadata, layer)
        query_len, places = rows
        used = places.shape[0]
        filled = [part.new_zeros(requests * query_len, *part.shape[1:]) for part in parts]
        for whole, part in zip(filled, parts, strict=True):
            whole[places] = part[:used]
        out, lse = self._attend(tuple(filled), query_len, kv_c_and_k_pe_cache, attn_metadata, layer)
        if used == tokens:
            return out[places], lse[places]
        # What pads the step is of no request.
        every_out = out.new_zeros(tokens, *out.shape[1:])
        every_lse = lse.new_full((tokens, lse.shape[1]), -torch.inf)
        every_out[:used], every_lse[:used] = out[places], lse[places]
        return every_out, every_lse

    def _attend(
        self,
        parts: tuple[torch.Tensor, ...],
        query_len: int,
        cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fp8 = self.kv_cache_dtype.startswith("fp8")
        if fp8 and cache.dtype == torch.uint8:
            cache = cache.view(torch.float8_e4m3fn)
        block_table, seq_lens = attn_metadata.decode.block_table, attn_metadata.decode.seq_lens
        most = self._plan.max_batch
        call = functools.partial(
            mla_decode,
            kv_cache=cache,
            scale=self.scale,
            query_len=query_len,
            workspace=_workspace(self._workspace_numel, cache.device),
            kv_scale=layer._k_scale if fp8 else None,
            max_batch=most,
        )
        if seq_lens.shape[0] <= most:
            return call(_query(parts), block_table=block_table, seq_lens=seq_lens)
        tokens, heads = parts[0].shape[:2]
        out = parts[0].new_empty(tokens, heads, KV_LORA_RANK)
        lse = parts[0].new_empty(tokens, heads, dtype=torch.float32)
        for first in range(0, seq_lens.shape[0], most):
            some = slice(first, first + most)
            theirs = slice(first * query_len, (first + most) * query_len)
            call(
                _query(tuple(part[theirs] for part in parts)),
                block_table=block_table[some],
                seq_lens=seq_lens[some],
                out=out[theirs],
                lse=lse[theirs],
            )
        return out, lse


def _query(
    parts: tuple[torch.Tensor, ...],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return (parts[0], parts[1]) if len(parts) == 2 else parts[0]


setattr(MlaDecodeImpl, _DECODE, MlaDecodeImpl._decode)


class MlaDecodeBackend(_StockBackend):
    """TRITON_MLA for a Kimi. Its name stays: vLLM asks for it in places."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        *_StockBackend.supported_kv_cache_dtypes,
        *(("fp8", "fp8_e4m3") if _REFUSES_FP8 else ()),
    ]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """From 0.18 on: the page size if the user gave none; see vLLM's own."""
        preferred: int = super().get_preferred_block_size(default_block_size)
        config = get_current_vllm_config()
        if config.cache_config.user_specified_block_size or plan_of(config).stock:
            return preferred
        return preferred if preferred % _PAGE == 0 else _PAGE

    @staticmethod
    def get_impl_cls() -> type[MlaDecodeImpl]:
        """The layer's class."""
        return MlaDecodeImpl

    @staticmethod
    def get_builder_cls() -> type[MlaDecodeMetadataBuilder]:
        """The metadata builder's class."""
        return MlaDecodeMetadataBuilder


def compile_kernels(
    plan: Plan,
    *,
    query_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    page_size: int,
    device: torch.device,
) -> None:
    """Run every kernel once that serving may need, so that none is compiled then.

    Triton compiles for each query length and for up to 16 requests or more; and for the second
    kernel, few rows or many. The lengths are 0, so nothing is read. Of strides and pointers it
    looks at whether 16 divides them; here it does as in a layer, whose queries are a product of
    [heads, tokens] and a slice of the projection's channels.

    Args:
        plan: that of the server.
        query_dtype: of the queries.
        cache_dtype: of the KV cache, as vLLM allocates it: one byte is fp8.
        page_size: tokens of a page.
        device: on which to compile.
    """
    fp8 = cache_dtype.itemsize == 1
    width = KV_LORA_RANK + ROPE_DIM
    cache = torch.zeros(
        1, page_size, width, dtype=torch.float8_e4m3fn if fp8 else cache_dtype, device=device
    )
    workspace = _workspace(_workspace_numel(plan, device), device)
    for query_len, batch in _launches(plan, device):
        tokens = batch * query_len
        latent = torch.empty(plan.heads, tokens, KV_LORA_RANK, dtype=query_dtype, device=device)
        whole = torch.empty(tokens, plan.heads, width, dtype=query_dtype, device=device)
        mla_decode(
            (latent.transpose(0, 1), whole[..., KV_LORA_RANK:]),
            cache,
            torch.zeros(batch, 1, dtype=torch.int32, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
            scale=1.0,
            query_len=query_len,
            workspace=workspace,
            kv_scale=torch.ones((), device=device) if fp8 else None,
            max_batch=plan.max_batch,
        )


def _launches(plan: Plan, device: torch.device) -> list[tuple[int, int]]:
    """Query lengths and batches, as few and small as may be, that use all compiled kernels."""
    arch = arch_of(device)
    launches: dict[Any, tuple[int, int]] = {}
    for query_len in plan.query_lens:
        for batch in range(1, plan.max_batch + 1):
            combined = combine_shape(arch, batch * query_len * plan.heads, KV_LORA_RANK)
            launches.setdefault((query_len, batch > 16, combined), (query_len, batch))
    return list(launches.values())


def _ragged(
    metadata: Any, common: Any, query_lens: tuple[int, ...]
) -> tuple[int, torch.Tensor] | None:
    """How decodes with different numbers of tokens are filled up to the same number.

    A request's tokens are the last of its places, so that the kernel's causal rule, which counts
    from the last query back, holds for each; what comes before them is thrown away.

    Args:
        metadata: the step's, as vLLM built it.
        common: what it was built from.
        query_lens: the lengths that the kernel is compiled for. While a graph is captured, none:
            then any will do, and a graph with places in it would keep those of its capture.

    Returns:
        The tokens of a request after filling, and the place of each token that a request has:
        those after them pad the step. None where the kernel can take the step as it is: all
        requests have the same number, and behind them there may be requests without any that
        stand for the padding of a full CUDA graph.
    """
    requests, tokens = metadata.num_decodes, metadata.num_decode_tokens
    starts = common.query_start_loc_cpu[: requests + 1]
    lens = starts.diff()
    most, used = int(lens.max()), int(starts[-1])
    if not query_lens and tokens % requests == 0:
        return None
    if (
        tokens == requests * most
        and (most in query_lens or not query_lens)
        and used % most == 0
        and bool((lens[: used // most] == most).all())
    ):
        return None
    query_len = next((n for n in query_lens if n >= most), max(most, 1))
    ends = common.query_start_loc[1 : requests + 1].long()
    token = torch.arange(used, device=ends.device)
    request = torch.searchsorted(ends, token, right=True)
    return query_len, token + (request + 1) * query_len - ends[request]


def _workspace_numel(plan: Plan, device: torch.device) -> int:
    """The size of the kernel's scratch, in float32."""
    return workspace_numel(
        max_batch=plan.max_batch,
        query_len=plan.query_len,
        heads=plan.heads,
        kv_lora_rank=KV_LORA_RANK,
        arch=arch_of(device),
    )


def _workspace(numel: int, device: torch.device) -> torch.Tensor:
    """``numel`` float32 that all layers share, from vLLM's manager.

    Always as many, so that it never grows once vLLM has captured its graphs. Where there is no
    manager, as in a test, they are new.
    """
    if is_workspace_manager_initialized():
        (workspace,) = current_workspace_manager().get_simultaneous(((numel,), torch.float32))
        return workspace
    return torch.empty(numel, dtype=torch.float32, device=device)


def _concatenated(nope: torch.Tensor, rope: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.cat((nope, rope), dim=-1)


def _log_once(plan: Plan) -> None:
    global _logged
    if _logged or plan.stock == NO_KIMI or not is_global_first_rank():
        return
    _logged = True
    get_logger(__name__).info("vllm-kimi-eagle3: %s", _summary(plan))


def _summary(plan: Plan) -> str:
    if plan.stock:
        return f"vLLM's own kernel serves TRITON_MLA: {plan.stock}"
    device = torch.device(current_platform.device_type)
    scratch = 4 * _workspace_numel(plan, device) / 1024**2
    serves = (
        f"mla_decode ({arch_of(device).name}, {scratch:.0f} MiB of scratch) serves TRITON_MLA: "
        "decode steps"
    )
    if plan.verify_len == 1:
        return f"{serves}, in full CUDA graphs"
    if plan.verifies:
        return f"{serves} and verify steps of {plan.verify_len} tokens, in full CUDA graphs"
    return (
        f"{serves}; verify steps of {plan.verify_len} tokens are prefill, outside full CUDA "
        "graphs, with decode context parallelism"
    )
