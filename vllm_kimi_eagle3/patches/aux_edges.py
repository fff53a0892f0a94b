# SPDX-License-Identifier: Apache-2.0
"""A drafter that reads the target's embedding or its last layer's output cannot be fed."""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.checkpoint.target import MULTIMODAL_ARCHITECTURE, TEXT_ARCHITECTURE
from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo, all_of

_ID = "aux-edges"
_DEEPSEEK = "vllm.model_executor.models.deepseek_v2"
_TARGET = f"{_DEEPSEEK}:DeepseekV2Model.forward"
_KIMI = f"vllm.model_executor.models.kimi_k25:{MULTIMODAL_ARCHITECTURE}"


def _open_in(sources: Sources) -> bool:
    module = sources.module(_DEEPSEEK)
    return module is not None and "aux_hidden_state_layers" in module[0]


def _decide(vllm_config: Any, pair: Any) -> None:
    """Tell the target, whose class is resolved from its own config, which ends are wanted."""
    from vllm_kimi_eagle3.pair import KEY

    aux = pair.drafter.aux
    captured = () if aux is None else aux.captured
    ends = {"embedding": 0 in captured, "last_layer": pair.target.num_layers in captured}
    if any(ends.values()):
        setattr(vllm_config.model_config.hf_config, KEY, ends)


def _route(stock: type, architecture: str, model_config: Any) -> type:
    from vllm_kimi_eagle3.pair import decisions_of

    if architecture not in (MULTIMODAL_ARCHITECTURE, TEXT_ARCHITECTURE):
        return stock
    ends = decisions_of(getattr(model_config, "hf_config", None))
    if ends is None or not stock.__module__.startswith("vllm.model_executor.models."):
        return stock
    if ends.get("last_layer") and not _captures_last_layer():
        from vllm_kimi_eagle3.models import kimi_targets

        captures_both: type = getattr(kimi_targets, architecture)
        return captures_both
    if ends.get("embedding"):
        from vllm_kimi_eagle3.models.edge_targets import with_embedding

        return with_embedding(stock)
    return stock


def _captures_last_layer() -> bool:
    # Mentioned once for the range of layers, once more where the last one's output is captured.
    import inspect

    from vllm.model_executor.models.deepseek_v2 import DeepseekV2Model

    return inspect.getsource(DeepseekV2Model.forward).count("self.end_layer") > 1


def _install() -> Undo:
    return all_of([hooks.on_pair(_ID, _decide), hooks.on_resolve(_ID, _route)])


def _verify() -> bool:
    return hooks.pair_step_in_place(_ID) and hooks.resolve_step_in_place(_ID)


PATCH = Patch(
    id=_ID,
    gap="aux layer 0, the embedding, stops the target's first forward pass (there is no residual "
    "to add), and up to 0.24 the last layer's output is never captured.",
    target=_TARGET,
    since="0.18.1",
    before=None,
    does="serves a Kimi target whose drafter reads one of the two with a subclass that captures "
    "it; every other target keeps the stock class.",
    upstream=("https://github.com/vllm-project/vllm/pull/46788",),
    goes="when DeepseekV2Model captures layer 0",
    symbols=(
        hooks.PAIR_SYMBOL,
        hooks.RESOLVE_SYMBOL,
        Symbol(_TARGET, "body"),
        Symbol(f"{_DEEPSEEK}:DeepseekV2DecoderLayer.forward"),
        Symbol(f"{_DEEPSEEK}:DeepseekV2ForCausalLM.model_cls", "present"),
        Symbol(f"{_DEEPSEEK}:DeepseekV2ForCausalLM.forward", "body"),
        Symbol(f"{_KIMI}.__init__"),
        Symbol(f"{_KIMI}.forward", "body"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
    needs=("aux-layers",),
)
