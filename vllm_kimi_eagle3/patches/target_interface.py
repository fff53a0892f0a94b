# SPDX-License-Identifier: Apache-2.0
"""The Kimi target classes do not implement ``SupportsEagle3``."""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple

from vllm_kimi_eagle3.checkpoint.target import (
    MULTIMODAL_ARCHITECTURE,
    TEXT_ARCHITECTURE,
    is_kimi_target,
)
from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo

_ID = "target-interface"
_TARGET = hooks.RESOLVE_SYMBOL.target
_DEEPSEEK = "vllm.model_executor.models.deepseek_v2"
_KIMI = f"vllm.model_executor.models.kimi_k25:{MULTIMODAL_ARCHITECTURE}"


class Route(NamedTuple):
    """Which class of ours serves a Kimi target of an architecture.

    Attributes:
        target: ``"module:Class"``, by name so that nothing is imported before a Kimi is served.
        builds_on: what the stock class's module must have for it; "" if nothing in particular.
    """

    target: str
    builds_on: str = ""


# On 0.15 the entry of the multimodal architecture is another one: see bare_language_model.
ROUTES = {
    MULTIMODAL_ARCHITECTURE: Route(
        f"vllm_kimi_eagle3.models.kimi_targets:{MULTIMODAL_ARCHITECTURE}",
        builds_on="init_vllm_registered_model",
    ),
    TEXT_ARCHITECTURE: Route(f"vllm_kimi_eagle3.models.kimi_targets:{TEXT_ARCHITECTURE}"),
}


def kimi_class(stock: type, architecture: str, config: Any) -> type:
    """The class that serves a target: ours for a Kimi, else ``stock`` itself.

    Args:
        stock: the class that vLLM resolved.
        architecture: the architecture name that it was resolved for.
        config: the target's Transformers config.
    """
    route = ROUTES.get(architecture)
    if route is None or not is_kimi_target(config):
        return stock
    if not stock.__module__.startswith("vllm.model_executor.models."):
        return stock  # The user's own class, registered under the same name.
    if route.builds_on and not hasattr(sys.modules[stock.__module__], route.builds_on):
        return stock
    from vllm_kimi_eagle3.plugin import announce

    announce()
    module, _, name = route.target.partition(":")
    ours = getattr(importlib.import_module(module), name)
    assert isinstance(ours, type)
    return ours


def _open_in(sources: Sources) -> bool:
    kimi, text = sources.shape(_KIMI), sources.shape(f"{_DEEPSEEK}:DeepseekV2ForCausalLM")
    if kimi is None or text is None:
        return False
    return any("SupportsEagle3" not in shape.signature for shape in (kimi, text))


def _route(stock: type, architecture: str, model_config: Any) -> type:
    return kimi_class(stock, architecture, model_config.hf_config)


def _install() -> Undo:
    return hooks.on_resolve(_ID, _route)


def _verify() -> bool:
    return hooks.resolve_step_in_place(_ID)


PATCH = Patch(
    id=_ID,
    gap="KimiK25ForConditionalGeneration and DeepseekV3ForCausalLM do not hand out hidden states "
    "of inner layers: 'Model does not support EAGLE3 interface', after the load.",
    target=_TARGET,
    since="0.15.1",
    before="0.18",
    does="serves a Kimi target with a subclass that does, for any layer from 0 (the embedding) to "
    "num_hidden_layers (the last layer's output), under torch.compile and CUDA graphs; the chosen "
    "layers become part of the compile-cache key. Other models resolve to their stock class.",
    upstream=(
        "https://github.com/vllm-project/vllm/issues/36777",
        "https://github.com/vllm-project/vllm/pull/36361",
    ),
    goes="with support for vLLM 0.17",
    symbols=(
        hooks.RESOLVE_SYMBOL,
        Symbol(f"{_DEEPSEEK}:DeepseekV2Model.forward", "body"),
        Symbol(f"{_DEEPSEEK}:DeepseekV2DecoderLayer.forward"),
        Symbol(f"{_DEEPSEEK}:DeepseekV2ForCausalLM", "signature"),
        Symbol(f"{_DEEPSEEK}:DeepseekV2ForCausalLM.model_cls", "present"),
        Symbol(f"{_DEEPSEEK}:DeepseekV2ForCausalLM.forward", "body"),
        Symbol(f"{_DEEPSEEK}:{TEXT_ARCHITECTURE}"),
        Symbol(_KIMI),
        Symbol(f"{_KIMI}.__init__", "body"),
        Symbol(f"{_KIMI}.forward", "body"),
        Symbol("vllm.model_executor.models.interfaces:SupportsEagle3", "body"),
        Symbol("vllm.config.vllm:VllmConfig.compute_hash"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
)
