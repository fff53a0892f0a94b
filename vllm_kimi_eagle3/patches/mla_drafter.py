# SPDX-License-Identifier: Apache-2.0
"""There is no class for a drafter with MLA attention (``Eagle3DeepseekV2ForCausalLM``)."""

from __future__ import annotations

import ast

from vllm_kimi_eagle3.contract import Sources, Symbol

from .base import Patch, Undo

_TARGET = "vllm.model_executor.models.registry:_SPECULATIVE_DECODING_MODELS"
_DEEPSEEK = "vllm.model_executor.models.deepseek_v2"
_LLAMA = "vllm.model_executor.models.llama_eagle3"
ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
_ROUTE = "vllm_kimi_eagle3.models.kimi_mla_drafter:Eagle3DeepseekV2ForCausalLM"


def _open_in(sources: Sources) -> bool:
    value = getattr(sources.node(_TARGET), "value", None)
    return isinstance(value, ast.Dict) and not any(
        isinstance(key, ast.Constant) and key.value == ARCHITECTURES[0] for key in value.keys
    )


def _install() -> Undo:
    from vllm.model_executor.models.registry import ModelRegistry

    added = [name for name in ARCHITECTURES if name not in ModelRegistry.models]
    for name in added:
        ModelRegistry.register_model(name, _ROUTE)

    def undo() -> None:
        for name in added:
            ModelRegistry.models.pop(name, None)

    return undo


def _verify() -> bool:
    from vllm.model_executor.models.registry import ModelRegistry

    module, _, name = _ROUTE.partition(":")
    entries = [ModelRegistry.models.get(architecture) for architecture in ARCHITECTURES]
    return all(
        (getattr(e, "module_name", None), getattr(e, "class_name", None)) == (module, name)
        for e in entries
    )


PATCH = Patch(
    id="mla-drafter",
    gap="'Model architectures [Eagle3DeepseekV2ForCausalLM] are not supported': the releases have "
    "drafters with MHA attention only.",
    target=_TARGET,
    since="0.15.1",
    before="0.18",
    does="registers the class under the two names that vLLM uses from 0.18 on.",
    upstream=("https://github.com/vllm-project/vllm/pull/36361",),
    goes="with support for vLLM 0.17",
    symbols=(
        Symbol(_TARGET, "present"),
        Symbol("vllm.model_executor.models.registry:_ModelRegistry.register_model"),
        Symbol(f"{_DEEPSEEK}:DeepseekV2MLAAttention.__init__", "body"),
        Symbol(f"{_DEEPSEEK}:DeepseekV2MLAAttention.forward", "body"),
        Symbol(f"{_DEEPSEEK}:DeepseekV2MLP.__init__"),
        Symbol("vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper.__init__"),
        Symbol("vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper.forward", "body"),
        Symbol(f"{_LLAMA}:Eagle3LlamaForCausalLM.__init__", "body"),
        Symbol(f"{_LLAMA}:Eagle3LlamaForCausalLM.load_weights", "body"),
        Symbol(f"{_LLAMA}:Eagle3LlamaForCausalLM.combine_hidden_states", "body"),
        Symbol(f"{_LLAMA}:Eagle3LlamaForCausalLM.compute_logits", "body"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
    needs=("kimi-k2-config",),
)
