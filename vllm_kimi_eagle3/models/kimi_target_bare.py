# SPDX-License-Identifier: Apache-2.0
"""Kimi-K2.5 for 0.15, where the language model is a decoder alone and the head is beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models import kimi_k25

from .aux_hidden_states import DeepseekV2Model, Eagle3Target
from .kimi_targets import replaced


class LanguageModelView:
    """The decoder and the head, named as every other release names them.

    Attributes:
        model: the decoder.
        lm_head: the head.
    """

    # Not a module: as one it would register both a second time, under other names.
    def __init__(self, decoder: nn.Module, lm_head: nn.Module) -> None:
        self.model = decoder
        self.lm_head = lm_head

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed token ids ``[num_tokens]`` to ``[num_tokens, hidden_size]``."""
        return self.model.embed_input_ids(input_ids)


class KimiK25ForConditionalGeneration(kimi_k25.KimiK25ForConditionalGeneration, Eagle3Target):
    """Kimi-K2.5 with a decoder that hands out hidden states."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        with replaced(kimi_k25, "DeepseekV2Model", DeepseekV2Model):
            super().__init__(vllm_config=vllm_config, prefix=prefix)

    def _decoder(self) -> DeepseekV2Model:
        return self.language_model

    def get_language_model(self) -> Any:
        """The language model as the proposer expects it: with ``.model`` and ``.lm_head``."""
        return LanguageModelView(self.language_model, self.lm_head)
