# SPDX-License-Identifier: Apache-2.0
"""Verifying k drafts reads the KV cache k + 1 times, or is done as prefill.

The back-end is offered as plugins offer one, by the name of vLLM's own; which model gets it is
decided when vLLM resolves the name, so that another model's server has vLLM's class.
"""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.checkpoint.errors import plain
from vllm_kimi_eagle3.contract import Sources, Symbol

from .base import NotNeededError, Patch, Undo

_REGISTRY = "vllm.v1.attention.backends.registry"
_TARGET = f"{_REGISTRY}:AttentionBackendEnum"
_BACKEND = "vllm.v1.attention.backend"
_STOCK = "vllm.v1.attention.backends.mla.triton_mla"
_MLA = "vllm.model_executor.layers.attention.mla_attention"
NAME = "TRITON_MLA"
PATH = "vllm_kimi_eagle3.attention.triton_mla.TritonMLABackend"


def _open_in(sources: Sources) -> bool:
    # No release up to 0.33 reads the cache once for all tokens of a verify step.
    return sources.module(_STOCK) is not None


def _install() -> Undo:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend = AttentionBackendEnum[NAME]
    _leave_anothers(backend)
    register_backend(backend, PATH)

    def undo() -> None:
        if backend.get_path() == PATH:
            backend.clear_override()

    return undo


def _verify() -> bool:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum[NAME]
    _leave_anothers(backend)
    return bool(backend.get_path() == PATH)


def _leave_anothers(backend: Any) -> None:
    # Plugins are loaded in no fixed order: another's may come before ours or after.
    if backend.is_overridden() and (path := backend.get_path()) != PATH:
        # As the user wants it, by having installed that plugin.
        raise NotNeededError(f"another plugin has overridden {NAME}: {plain(str(path))}")


PATCH = Patch(
    id="mla-attention",
    gap="with TRITON_MLA, the only back-end for Kimi on many GPUs, a step that verifies k drafts "
    "is done as prefill, outside any CUDA graph (to 0.30; 0.22 to 0.25 stop while graphs are "
    "captured), or reads the KV cache k + 1 times (from 0.31 on); fp8 KV is refused (to 0.17) or "
    "needs more shared memory than an SM120 has (from 0.20 on).",
    target=_TARGET,
    since="0.15.1",
    before=None,
    does="overrides the back-end by its name with a subclass whose kernel reads the cache once for "
    "all tokens of a decode or verify step, inside full CUDA graphs; any other model gets vLLM's "
    'class, and --additional-config \'{"kimi_eagle3": {"attention": false}}\' a Kimi, too; '
    "another plugin's override of the name stays.",
    upstream=(
        "https://github.com/vllm-project/vllm/issues/53748",
        "https://github.com/vllm-project/vllm/pull/40750",
        "https://github.com/vllm-project/vllm/pull/52218",
    ),
    goes="when vLLM's own TRITON_MLA reads the cache once for a verify step",
    symbols=(
        Symbol(_TARGET, "present"),
        Symbol(f"{_TARGET}.get_path", "body"),
        Symbol(f"{_TARGET}.is_overridden", "body"),
        Symbol(f"{_TARGET}.clear_override", "body"),
        Symbol(f"{_REGISTRY}:register_backend"),
        Symbol("vllm.utils.import_utils:resolve_obj_by_qualname", "body"),
        Symbol(f"{_STOCK}:TritonMLABackend"),
        Symbol(f"{_STOCK}:TritonMLABackend.get_impl_cls", "body"),
        Symbol(f"{_STOCK}:TritonMLABackend.get_builder_cls", "body", since="0.22"),
        # What our builder does in its place, from 0.33 on; before, what it leaves out.
        Symbol(f"{_STOCK}:TritonMLAMetadataBuilder.__init__", "body", since="0.25"),
        Symbol(f"{_STOCK}:TritonMLAImpl.__init__"),
        Symbol(f"{_STOCK}:TritonMLAImpl.forward_mqa", since="0.16"),
        Symbol(f"{_STOCK}:TritonMLAImpl._forward_decode", before="0.16"),
        Symbol(f"{_MLA}:QueryLenSupport", "body"),
        Symbol(f"{_MLA}:MLACommonDecodeMetadata", "body"),
        Symbol(f"{_MLA}:MLACommonMetadataBuilder.__init__"),
        Symbol(f"{_MLA}:MLACommonMetadataBuilder.build"),
        Symbol(f"{_MLA}:MLACommonMetadataBuilder.build_for_cudagraph_capture"),
        Symbol(f"{_BACKEND}:AttentionBackend.get_preferred_block_size", since="0.18"),
        Symbol(f"{_BACKEND}:AttentionCGSupport"),
        Symbol(f"{_BACKEND}:AttentionMetadataBuilder.get_cudagraph_support"),
        Symbol(f"{_BACKEND}:AttentionMetadataBuilder._init_reorder_batch_threshold", "body"),
        # A K2.5's model sets another config of the model while it builds its language model.
        Symbol("vllm.config.model:ModelConfig.architecture", "present"),
        Symbol("vllm.config.parallel:ParallelConfig.use_ubatching", "present"),
        Symbol("vllm.v1.worker.workspace:WorkspaceManager.get_simultaneous", "body"),
        Symbol("vllm.v1.worker.workspace:is_workspace_manager_initialized"),
        Symbol("vllm.v1.worker.workspace:current_workspace_manager"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
)
