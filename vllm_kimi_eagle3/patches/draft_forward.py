# SPDX-License-Identifier: Apache-2.0
"""The V2 runner's graphs of draft steps hold a dozen small kernels around each product."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo, all_of, wrap_method, wrapped_by

_ID = "draft-forward"
_CONFIG = "vllm.config.vllm"
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator"
_TARGET = f"{_SPECULATOR}:DraftModelSpeculator.sample_draft"
_MODELS = "vllm.model_executor.models"
_LLAMA = f"{_MODELS}.llama_eagle3"
_MLA = f"{_MODELS}.deepseek_eagle3"
_LAYERS = "vllm.model_executor.layers"
_OURS = ("vllm.model_executor.models.", "vllm_kimi_eagle3.")


def _open_in(sources: Sources) -> bool:
    config = sources.module(_CONFIG)
    # Up to 0.28 a list says which architectures run on V2, and no Kimi is in it.
    by_list = config is not None and "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES" in config[0]
    return sources.node(_TARGET) is not None and not by_list


def _route(cls: type, architecture: str, model_config: Any) -> type:
    from vllm_kimi_eagle3.pair import decisions_of

    if decisions_of(getattr(model_config, "hf_config", None)) is None:
        return cls
    if not cls.__module__.startswith(_OURS):
        return cls  # The user's own class, registered under the same name.
    from vllm.config import get_current_vllm_config_or_none

    from vllm_kimi_eagle3.drafting.plan import is_for, is_v2, plan_or_stock

    # vLLM keeps a resolved class, so where nothing is known yet the class decides when it is made.
    config = get_current_vllm_config_or_none()
    if config is not None and is_for(config) and not (plan := plan_or_stock(config)).forward:
        if is_v2(config):  # On V1 the loop says it.
            _say(plan.stock)
        return cls
    from vllm_kimi_eagle3.models.fused_drafter import fused

    return fused(cls)


@cache
def _say(why: str) -> None:
    from vllm_kimi_eagle3.drafting.ranks import first_rank
    from vllm_kimi_eagle3.log import get_logger

    try:
        speaks = first_rank()
    except AssertionError:  # A process without ranks.
        return
    if speaks:
        get_logger(__name__).info("vllm-kimi-eagle3: drafting: vLLM's own drafter serves: %s", why)


def _install_late() -> Undo:
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    stock = vars(DraftModelSpeculator)["sample_draft"]
    signature = inspect.signature(stock)

    def sample_draft(self: Any, *args: Any, **kwargs: Any) -> Any:
        greedy = getattr(self.model, "greedy_tokens", None)
        if greedy is not None and getattr(self, "acceptance_estimator", None) is None:
            given = signature.bind(self, *args, **kwargs).arguments
            if given["draft_logits"] is None:
                tokens = greedy(given["hidden_states"])
                if tokens is not None:
                    return tokens
        return stock(self, *args, **kwargs)

    return wrap_method(DraftModelSpeculator, "sample_draft", sample_draft, _ID)


def _in_place() -> bool:
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    return wrapped_by(_ID, DraftModelSpeculator.sample_draft)


def _install() -> Undo:
    return all_of([hooks.on_resolve(_ID, _route), hooks.when_met(_ID, _install_late)])


def _verify() -> bool:
    return hooks.resolve_step_in_place(_ID) and hooks.late_in_place(_ID, _in_place)


PATCH = Patch(
    id=_ID,
    gap="inside the V2 runner's graphs a draft step is a dozen small kernels around its products: "
    "embedding, norms, a concat, rope, and for a greedy token the draft logits, their gather over "
    "the ranks, a scatter into the target's vocabulary and an argmax over that.",
    target=_TARGET,
    since="0.29.0",
    before=None,
    does="inside those graphs the drafter's passes run on the plugin's kernels, and a greedy token "
    "is found without its logits; prompts, piecewise graphs and sampled drafts are vLLM's own, and "
    'so is all of it with --additional-config \'{"kimi_eagle3": {"drafting": false}}\'.',
    upstream=(
        "https://github.com/vllm-project/vllm/issues/40610",
        "https://github.com/vllm-project/vllm/issues/53748",
    ),
    goes="when vLLM's own draft step has as few kernels",
    symbols=(
        hooks.RESOLVE_SYMBOL,
        Symbol(_TARGET),
        # What it does where no logits are needed.
        Symbol(f"{_SPECULATOR}:DraftModelSpeculator._greedy_sample_draft", "body", before="0.30"),
        Symbol(f"{_CONFIG}:get_current_vllm_config_or_none", "body"),
        Symbol("vllm.distributed.parallel_state:get_tp_group"),
        Symbol("vllm.forward_context:ForwardContext", "present"),
        Symbol("vllm.forward_context:is_forward_context_available", "body"),
        # What the forward pass does in their place.
        Symbol(f"{_LLAMA}:LlamaDecoderLayer.forward", "body"),
        Symbol(f"{_LLAMA}:LlamaModel.forward", "body"),
        Symbol(f"{_LLAMA}:Eagle3LlamaForCausalLM.forward", "body"),
        Symbol(f"{_LLAMA}:Eagle3LlamaForCausalLM.compute_logits", "body"),
        Symbol(f"{_LLAMA}:Eagle3LlamaForCausalLM.combine_hidden_states", "body"),
        Symbol(f"{_MODELS}.llama:LlamaAttention.forward", "body"),
        Symbol(f"{_MODELS}.llama:LlamaMLP.forward"),
        Symbol(f"{_MLA}:DeepseekV2Eagle3DecoderLayer.forward", "body"),
        Symbol(f"{_MLA}:DeepseekV2Eagle3Model.forward", "body"),
        Symbol(f"{_MLA}:Eagle3DeepseekV2ForCausalLM.forward", "body"),
        Symbol(f"{_MLA}:Eagle3DeepseekV2ForCausalLM.compute_logits", "body"),
        Symbol(f"{_MLA}:Eagle3DeepseekV2ForCausalLM.combine_hidden_states", "body"),
        Symbol(f"{_MODELS}.deepseek_v2:DeepseekV2MLP.forward", "body"),
        Symbol(f"{_LAYERS}.mla:MultiHeadLatentAttentionWrapper.forward"),
        Symbol(f"{_LAYERS}.attention.mla_attention:MLAAttention.forward"),
        Symbol(f"{_LAYERS}.attention.attention:Attention.forward"),
        Symbol(f"{_LAYERS}.linear:RowParallelLinear.forward", "body"),
        Symbol(f"{_LAYERS}.linear:ColumnParallelLinear.forward", "body"),
        Symbol(f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbeddingShardIndices", "present"),
        Symbol(f"{_LAYERS}.logits_processor:LogitsProcessor.__init__"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
    convenience=True,
)
