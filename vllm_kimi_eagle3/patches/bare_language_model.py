# SPDX-License-Identifier: Apache-2.0
"""On 0.15 Kimi-K2.5's language model is a bare ``DeepseekV2Model``: no ``.model``, no head."""

from __future__ import annotations

import ast

from vllm_kimi_eagle3.checkpoint.target import MULTIMODAL_ARCHITECTURE
from vllm_kimi_eagle3.contract import Sources, Symbol

from .base import Patch, Undo
from .target_interface import ROUTES, Route

_TARGET = f"vllm.model_executor.models.kimi_k25:{MULTIMODAL_ARCHITECTURE}.get_language_model"
_INIT = f"vllm.model_executor.models.kimi_k25:{MULTIMODAL_ARCHITECTURE}.__init__"
_ROUTE = Route(f"vllm_kimi_eagle3.models.kimi_target_bare:{MULTIMODAL_ARCHITECTURE}")


def _open_in(sources: Sources) -> bool:
    node = sources.node(_INIT)
    return node is not None and any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "DeepseekV2Model"
        for call in ast.walk(node)
    )


def _install() -> Undo:
    later = ROUTES[MULTIMODAL_ARCHITECTURE]
    ROUTES[MULTIMODAL_ARCHITECTURE] = _ROUTE

    def undo() -> None:
        ROUTES[MULTIMODAL_ARCHITECTURE] = later

    return undo


def _verify() -> bool:
    return ROUTES[MULTIMODAL_ARCHITECTURE] == _ROUTE


PATCH = Patch(
    id="bare-language-model",
    gap="the proposer looks for language_model.model.embed_tokens and language_model.lm_head, "
    "which 0.15's Kimi-K2.5 does not have there: AttributeError, or a drafter without a head of "
    "its own decodes with random weights.",
    target=_TARGET,
    since="0.15.1",
    before="0.16",
    does="routes Kimi-K2.5 to a subclass whose get_language_model() shows the decoder as .model "
    "and the head as .lm_head.",
    upstream=("https://github.com/vllm-project/vllm/pull/36361",),
    goes="with support for vLLM 0.15",
    symbols=(
        Symbol(_TARGET, "body"),
        Symbol(_INIT, "body"),
        Symbol("vllm.model_executor.models.interfaces:SupportsMultiModal.get_language_model"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
    needs=("target-interface",),
)
