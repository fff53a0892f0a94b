# SPDX-License-Identifier: Apache-2.0
"""What serves a model's MLA decode steps, decided from vLLM's configuration alone.

The layers, the metadata builders and the CUDA graphs must agree on it, and are made in different
places, so each asks :func:`plan_of`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from vllm_kimi_eagle3.checkpoint.target import (
    MULTIMODAL_ARCHITECTURE,
    TEXT_MODEL_TYPES,
    is_kimi_target,
)
from vllm_kimi_eagle3.pair import ATTENTION_SETTING, settings_or_refuse

KV_LORA_RANK = 512
ROPE_DIM = 64
# The kernel's own, which cannot be imported where there is no Triton.
MAX_QUERY_LEN = 9

# Bytes for the partial results of a call. A step of more requests than they hold is several
# calls, each with enough to do for a whole GPU.
_SCRATCH = 256 * 1024**2
# Requests of a call are a multiple of this, so that what the second call is given lies as well
# aligned as what the first is: Triton compiles once more for pointers that do not.
_BATCH_STEP = 16

# Stock's builder has rules of its own for such drafters' groups of layers.
_NON_CAUSAL = ("dflash", "dspark")

NO_KIMI = "the model is no Kimi"
"""Why stock serves another model that a process builds after a Kimi: vLLM keeps the class."""


@dataclass(frozen=True)
class Plan:
    """What serves decode and verify steps.

    Attributes:
        stock: why vLLM's own kernel serves; "" if ours does.
        query_len: the most tokens with which a request still counts as a decode.
        verify_len: the tokens of a verify step, ``1 + num_speculative_tokens``.
        heads: query heads that the kernel is given, those gathered for DCP included.
        max_batch: the most requests of one call of the kernel, a multiple of 16.
    """

    stock: str
    query_len: int
    verify_len: int
    heads: int
    max_batch: int

    @property
    def verifies(self) -> bool:
        """True if a verify step is a decode, and with that can be in a full CUDA graph."""
        return self.verify_len <= self.query_len

    @property
    def query_lens(self) -> tuple[int, ...]:
        """The query lengths for which the kernel is compiled; others are filled up to one."""
        return tuple(sorted({1, min(self.verify_len, self.query_len), self.query_len}))


def is_for(vllm_config: Any) -> bool:
    """True if the back-end is for the model of ``vllm_config``: a Kimi, and not switched off.

    Raises:
        ValueError: the plugin's settings in ``--additional-config`` are wrong.
    """
    model_config = _target_config(vllm_config)
    if not _is_kimi(model_config):
        return False
    return _has_dims(model_config.hf_text_config) and settings_or_refuse(
        vllm_config.additional_config
    ).get(ATTENTION_SETTING, True)


def plan_of(vllm_config: Any) -> Plan:
    """The plan for a server.

    Args:
        vllm_config: vLLM's ``VllmConfig``; while a drafter is built, it may be one of its own.
    """
    parallel = vllm_config.parallel_config
    dcp = parallel.decode_context_parallel_size
    speculative = vllm_config.speculative_config
    drafts = getattr(speculative, "num_speculative_tokens", None) or 0
    verify_len = query_len = 1 + drafts
    if dcp > 1:
        # A rank holds every dcp-th token, so how many it has of what a query sees depends on the
        # query; as in the releases' own TRITON_MLA, a decode is one token there.
        query_len = 1
    elif getattr(speculative, "parallel_drafting", False):
        # Such a drafter's own pass has a slot more for each draft.
        query_len = max(query_len, min(1 + 2 * drafts, MAX_QUERY_LEN))
    heads = _target_config(vllm_config).get_num_attention_heads(parallel) * dcp
    return Plan(
        stock=_why_stock(vllm_config, heads, query_len),
        query_len=query_len,
        verify_len=verify_len,
        heads=heads,
        max_batch=max_batch(
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.scheduler_config.max_num_batched_tokens,
            heads=heads,
            query_len=query_len,
        ),
    )


def max_batch(seqs: int, tokens: int, *, heads: int, query_len: int) -> int:
    """The most requests of one call of the kernel: of a step, or of what its scratch may hold.

    Args:
        seqs: ``--max-num-seqs``.
        tokens: ``--max-num-batched-tokens``.
        heads: as in :class:`Plan`.
        query_len: as in :class:`Plan`.
    """
    step = min(seqs, max(tokens // query_len, 1))
    step += -step % _BATCH_STEP
    # A partial result is a row's values and its log-sum-exp, in float32.
    held = _SCRATCH // (4 * heads * query_len * (KV_LORA_RANK + 1))
    return min(step, max(held - held % _BATCH_STEP, _BATCH_STEP))


def kv_dtype_of(name: str, model_dtype: Any) -> Any:
    """The KV cache's torch dtype by ``--kv-cache-dtype``; None for one that has none of its own."""
    import torch

    return {
        "auto": model_dtype,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "fp8": torch.float8_e4m3fn,
        "fp8_e4m3": torch.float8_e4m3fn,
    }.get(name)


def _why_stock(vllm_config: Any, heads: int, query_len: int) -> str:
    from vllm.platforms import current_platform

    if not is_for(vllm_config):
        return NO_KIMI
    if os.environ.get("VLLM_BATCH_INVARIANT", "0").strip() not in ("", "0"):
        return "VLLM_BATCH_INVARIANT is set"
    method = getattr(vllm_config.speculative_config, "method", None)
    if method in _NON_CAUSAL:
        return f'method "{method}" drafts a block of tokens that see each other'
    if vllm_config.parallel_config.use_ubatching:
        return "microbatches (--enable-dbo, --ubatch-size) run at the same time and share scratch"
    if current_platform.is_rocm() or current_platform.is_xpu():
        return "the kernel is for NVIDIA GPUs"
    try:
        from vllm_kimi_eagle3.kernels.arch import mla_decode_config
        from vllm_kimi_eagle3.kernels.mla_decode import unsupported
    except ImportError as error:
        return f"the kernel cannot be imported ({error})"
    cache = vllm_config.cache_config
    dtype = vllm_config.model_config.dtype
    kv_dtype = kv_dtype_of(cache.cache_dtype, dtype)
    if kv_dtype is None:
        return f"--kv-cache-dtype {cache.cache_dtype} is not one that the kernel reads"
    why = unsupported(
        heads=heads,
        query_len=query_len,
        kv_lora_rank=KV_LORA_RANK,
        rope_dim=ROPE_DIM,
        q_dtype=dtype,
        kv_dtype=kv_dtype,
        # Where the user gave none, the release takes one that its back-end supports.
        page_size=cache.block_size or 16,
    )
    if why is None:
        try:
            mla_decode_config(_arch(), rows=heads * query_len, fp8=kv_dtype.itemsize == 1)
        except ValueError as error:
            why = str(error)
    return why or _why_not_drafter(vllm_config)


def _why_not_drafter(vllm_config: Any) -> str:
    """Why an MLA drafter cannot use what serves the target: they may share a metadata builder."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    config = getattr(draft, "hf_text_config", None)
    if config is None or getattr(config, "kv_lora_rank", None) is None:
        return ""  # None, or one with MHA.
    own = config.num_attention_heads
    target = _target_config(vllm_config).hf_text_config.num_attention_heads
    if own != target:
        return f"the MLA drafter has {own} heads and the target {target}"
    return "" if _has_dims(config) else "the MLA drafter has other dimensions than the target"


def _is_kimi(model_config: Any) -> bool:
    """True for a Kimi, also where a K2.5's model has put its text tower's config at the top.

    It does so while it builds its language model. The architecture that vLLM found at the start
    stays, and the text tower's config cannot be told from DeepSeek-V3's without it.
    """
    if is_kimi_target(getattr(model_config, "hf_config", None)):
        return True
    text = getattr(model_config, "hf_text_config", None)
    return (
        getattr(model_config, "architecture", None) == MULTIMODAL_ARCHITECTURE
        and getattr(text, "model_type", None) in TEXT_MODEL_TYPES
    )


def _target_config(vllm_config: Any) -> Any:
    # While a drafter is built, the current configuration may be one of the drafter's own.
    speculative = getattr(vllm_config, "speculative_config", None)
    target = getattr(speculative, "target_model_config", None)
    return target or getattr(vllm_config, "model_config", None)


def _has_dims(config: Any) -> bool:
    dims = (getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None))
    return dims == (KV_LORA_RANK, ROPE_DIM)


def _arch() -> Any:
    import torch
    from vllm.platforms import current_platform

    from vllm_kimi_eagle3.kernels.arch import arch, arch_of

    # By vLLM's way, which initialises no CUDA: the plan is also made where none may be.
    capability = current_platform.get_device_capability()
    if capability is None:
        return arch_of(torch.device("cpu"))
    return arch((capability.major, capability.minor))
