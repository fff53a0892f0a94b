# SPDX-License-Identifier: Apache-2.0
"""YaRN's ``mscale`` and ``mscale_all_dim`` are not read for a Llama drafter: its scores double."""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo

_ID = "yarn-magnitude"
_YARN = "vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope"
_TARGET = f"{_YARN}:YaRNScalingRotaryEmbedding.__init__"


def _open_in(sources: Sources) -> bool:
    shape = sources.shape(_TARGET)
    return shape is not None and "mscale_all_dim" not in shape.signature


def _decide(vllm_config: Any, pair: Any) -> None:
    rope = pair.drafter.rope
    if pair.drafter.attention != "llama" or rope.kind != "yarn":
        return
    # The class multiplies cos and sin by its own correction times attn_factor.
    factor = rope.magnitude / rope.stock_magnitude
    pair.draft_config.rope_parameters = {
        **pair.draft_config.rope_parameters,
        "attn_factor": factor,
    }
    if factor != 1.0:
        pair.notes.append(
            f"YaRN with mscale and mscale_all_dim: cos and sin times {rope.magnitude:g} (stock: "
            f"{rope.stock_magnitude:g})"
        )


def _install() -> Undo:
    return hooks.on_pair(_ID, _decide)


def _verify() -> bool:
    return hooks.pair_step_in_place(_ID)


PATCH = Patch(
    id=_ID,
    gap="a Llama drafter with YaRN was trained with cos and sin times the ratio of the corrections "
    "for mscale and mscale_all_dim (1.0 for Kimi's drafters); vLLM up to 0.29 reads neither and "
    "multiplies by the correction for the factor, 1.416 at x64, so attention scores double.",
    target=_TARGET,
    since="0.15.1",
    before="0.30",
    does="gives vLLM the attn_factor with which the product is what the drafter was trained with.",
    upstream=("https://github.com/sgl-project/SpecForge",),
    goes="with support for vLLM 0.29",
    symbols=(
        hooks.PAIR_SYMBOL,
        Symbol(_TARGET, "body"),
        Symbol(f"{_YARN}:YaRNScalingRotaryEmbedding._compute_cos_sin_cache", "body"),
        Symbol("vllm.model_executor.layers.rotary_embedding:get_rope"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
    needs=("drafter-rope",),
)
