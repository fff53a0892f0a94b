# SPDX-License-Identifier: Apache-2.0
"""``extract_hidden_states`` turns a multimodal target's text config into a plain dict."""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.checkpoint.target import MULTIMODAL_MODEL_TYPE, is_kimi_target
from vllm_kimi_eagle3.contract import Sources, Symbol

from .base import Patch, Undo, wrap_method, wrapped_by

_MODULE = "vllm.transformers_utils.configs.extract_hidden_states"
_TARGET = f"{_MODULE}:ExtractHiddenStatesConfig.__init__"


def _open_in(sources: Sources) -> bool:
    module = sources.module(_MODULE)
    return module is not None and "get_text_config" not in module[0]


def _install() -> Undo:
    from vllm.transformers_utils.configs.extract_hidden_states import ExtractHiddenStatesConfig

    stock = ExtractHiddenStatesConfig.__init__

    def init(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        stock(self, model, *args, **kwargs)
        if getattr(model, "model_type", None) == MULTIMODAL_MODEL_TYPE and is_kimi_target(model):
            self.text_config = model.text_config

    return wrap_method(ExtractHiddenStatesConfig, "__init__", init, "extract-text-config")


def _verify() -> bool:
    from vllm.transformers_utils.configs.extract_hidden_states import ExtractHiddenStatesConfig

    return wrapped_by("extract-text-config", ExtractHiddenStatesConfig.__init__)


PATCH = Patch(
    id="extract-text-config",
    gap="the method extract_hidden_states fails for a multimodal target: 'The text_config "
    "extracted from the model config does not have `num_attention_heads` attribute'.",
    target=_TARGET,
    since="0.17.1",
    before="0.20",
    does="gives a Kimi-K2.5's text config back as the object that it was, as later releases do.",
    upstream=(
        "https://github.com/vllm-project/vllm/issues/39017",
        "https://github.com/vllm-project/vllm/pull/38987",
    ),
    goes="with support for vLLM 0.19",
    symbols=(Symbol(_TARGET),),
    open_in=_open_in,
    install=_install,
    verify=_verify,
)
