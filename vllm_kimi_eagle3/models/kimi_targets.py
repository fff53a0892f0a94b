# SPDX-License-Identifier: Apache-2.0
"""Kimi targets for 0.16 and 0.17 (the text-only one for 0.15 too) that support EAGLE-3.

The classes carry the names of those they extend: vLLM branches on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models import deepseek_v2, kimi_k25

from .aux_hidden_states import DeepseekV2Model, Eagle3Target


class DeepseekV3ForCausalLM(deepseek_v2.DeepseekV3ForCausalLM, Eagle3Target):
    """A text-only Kimi-K2, and the language model of a Kimi-K2.5."""

    model_cls = DeepseekV2Model

    def _decoder(self) -> DeepseekV2Model:
        return self.model


class KimiK25ForConditionalGeneration(kimi_k25.KimiK25ForConditionalGeneration, Eagle3Target):
    """Kimi-K2.5 with a language model that hands out hidden states."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        with replaced(kimi_k25, "init_vllm_registered_model", _init_language_model):
            super().__init__(vllm_config=vllm_config, prefix=prefix)

    def _decoder(self) -> DeepseekV2Model:
        return self.language_model.model


@contextmanager
def replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Within the block ``module.name`` is ``value``: how the parent's ``__init__`` is made to
    build a part of ours instead of building its own first and throwing it away."""
    original = vars(module)[name]
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def _init_language_model(
    vllm_config: VllmConfig, *, prefix: str, hf_config: Any, architectures: list[str]
) -> nn.Module:
    from vllm.model_executor.model_loader.utils import initialize_model

    return initialize_model(
        vllm_config=vllm_config.with_hf_config(hf_config, architectures=architectures),
        prefix=prefix,
        model_class=DeepseekV3ForCausalLM,
    )
