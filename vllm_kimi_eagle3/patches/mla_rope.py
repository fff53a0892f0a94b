# SPDX-License-Identifier: Apache-2.0
"""An MLA drafter without YaRN stops at ``KeyError: 'factor'``, or drafts with theta 10000."""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo

_ID = "mla-rope"
_MLA = "vllm.model_executor.models.deepseek_eagle3"
_TARGET = f"{_MLA}:DeepseekV2Eagle3DecoderLayer.__init__"


def _open_in(sources: Sources) -> bool:
    module = sources.module(_MLA)
    return module is not None and "rope_scaling" in module[0]


def _decide(vllm_config: Any, pair: Any) -> None:
    """State the rope in the one form that this class computes without loss.

    It takes ``rope_scaling`` for everything, theta included, and calls whatever is there
    DeepSeek's YaRN. Plain rope is YaRN with factor 1: both of its frequency bands and both of its
    magnitude corrections are then the plain ones.
    """
    drafter, config = pair.drafter, pair.draft_config
    if drafter.attention != "mla":
        return
    rope = drafter.rope
    parameters = {"rope_type": "deepseek_yarn", "rope_theta": rope.theta}
    if rope.yarn:
        parameters.update(rope.scaling)
    else:
        longest = max(config.max_position_embeddings, vllm_config.model_config.max_model_len)
        parameters.update(factor=1.0, original_max_position_embeddings=longest)
    config.rope_scaling = dict(parameters)
    config.rope_parameters = dict(parameters)


def _install() -> Undo:
    return hooks.on_pair(_ID, _decide)


def _verify() -> bool:
    return hooks.pair_step_in_place(_ID)


PATCH = Patch(
    id=_ID,
    gap="an MLA drafter without YaRN: KeyError 'factor' under Transformers 5, theta 10000 whatever "
    "its config says under Transformers 4; one with YaRN in Transformers 5's layout is given plain "
    "rope under Transformers 4.",
    target=_TARGET,
    since="0.18.1",
    before="0.28",
    does="states the drafter's rope in the form that the class computes as it was trained.",
    upstream=("https://github.com/vllm-project/vllm/pull/51092",),
    goes="with support for vLLM 0.27",
    symbols=(
        hooks.PAIR_SYMBOL,
        Symbol(_TARGET, "body"),
        Symbol(
            "vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope:"
            "DeepseekScalingRotaryEmbedding._compute_inv_freq",
            "body",
        ),
        Symbol(
            "vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope:"
            "DeepseekScalingRotaryEmbedding._compute_cos_sin_cache",
            "body",
        ),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
    needs=("drafter-rope",),
)
