# SPDX-License-Identifier: Apache-2.0
"""The decoder of a Kimi target that also returns hidden states of inner layers.

An EAGLE-3 drafter reads the target's hidden states at a few layers. Layer ids are vLLM's: id *i*
is the input of decoder layer *i*, which is the output of layer *i - 1*. So 0 is the embedding and
``num_hidden_layers`` the last layer's output before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.model_executor.models import deepseek_v2
from vllm.model_executor.models.interfaces import SupportsEagle3
from vllm.sequence import IntermediateTensors

from vllm_kimi_eagle3.checkpoint.aux_layers import default_layers
from vllm_kimi_eagle3.log import get_logger

logger = get_logger(__name__)

# The key under which the captured layers enter VllmConfig.additional_config, whose content is part
# of the compile-cache key. They are constants in the compiled graph, and up to 0.16 nothing else
# in the key tells two choices apart.
COMPILE_KEY = "kimi_eagle3_aux_hidden_state_layers"


class DeepseekV2Model(deepseek_v2.DeepseekV2Model):
    """vLLM's decoder; returns auxiliary hidden states once layers have been chosen."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.aux_hidden_state_layers: tuple[int, ...] = ()
        # One of the two, and on 0.15 not the one passed in, is what the compiler's cache reads.
        self._keyed_configs = (vllm_config, get_current_vllm_config())

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors | tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the decoder.

        Args:
            input_ids: token ids, ``[num_tokens]``.
            positions: positions, ``[num_tokens]``.
            intermediate_tensors: the previous pipeline stage's output.
            inputs_embeds: embeddings to use instead of ``input_ids``,
                ``[num_tokens, hidden_size]``.

        Returns:
            The normed hidden states, ``[num_tokens, hidden_size]``; with layers chosen, a pair of
            those and the hidden states at each chosen layer, in the order of the choice, each
            ``[num_tokens, hidden_size]``.
        """
        if get_pp_group().is_first_rank:
            hidden_states = (
                inputs_embeds if inputs_embeds is not None else self.embed_input_ids(input_ids)
            )
            residual = None
        else:
            assert intermediate_tensors is not None
            hidden_states = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"]

        wanted = self.aux_hidden_state_layers
        captured: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(
            islice(self.layers, self.start_layer, self.end_layer), start=self.start_layer
        ):
            if index in wanted:
                captured[index] = _residual_stream(hidden_states, residual)
            hidden_states, residual = layer(positions, hidden_states, residual)
        if self.end_layer in wanted:
            captured[self.end_layer] = _residual_stream(hidden_states, residual)

        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})

        hidden_states, _ = self.norm(hidden_states, residual)
        if wanted:
            return hidden_states, [captured[index] for index in wanted]
        return hidden_states

    def choose_aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Return the hidden states at ``layers`` from now on, in that order.

        To be called after loading and before the first forward pass, which compiles the choice in.

        Raises:
            ValueError: an id that is no integer from 0 to ``num_hidden_layers``, or pipeline
                parallelism.
        """
        count = self.config.num_hidden_layers
        for layer in layers:
            if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer <= count:
                raise ValueError(
                    f"the drafter's config.json asks for the hidden states at layer {layer!r} "
                    f"(eagle_aux_hidden_state_layer_ids: {list(layers)}); this target has "
                    f"{count} layers, so ids go from 0 (the embedding) to {count} (the last "
                    "layer's output)"
                )
        if layers and get_pp_group().world_size > 1:
            raise ValueError(
                "EAGLE-3 needs hidden states of layers on several pipeline stages, which this "
                "vLLM does not pass on: use --pipeline-parallel-size 1 (and more "
                "--tensor-parallel-size)"
            )
        self.aux_hidden_state_layers = tuple(layers)
        for config in self._keyed_configs:
            add_to_compile_key(config, self.aux_hidden_state_layers)
        logger.info(
            "EAGLE-3: the drafter is fed the target's hidden states at layers %s (the inputs of "
            "these decoder layers)",
            self.aux_hidden_state_layers,
        )


def _residual_stream(hidden_states: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    # A new tensor in either case: the layers add into both of their inputs in place.
    return hidden_states.clone() if residual is None else hidden_states + residual


class _KeyedConfig:
    """An ``additional_config`` of a platform's own type, with the layers added to its hash."""

    def __init__(self, original: Any, layers: tuple[int, ...]) -> None:
        self._original = original
        self._layers = layers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Also while this is copied or unpickled, without attributes.
            raise AttributeError(name)
        return getattr(self._original, name)

    def compute_hash(self) -> str:
        return f"{self._original.compute_hash()}-{self._layers}"


def add_to_compile_key(config: VllmConfig, layers: tuple[int, ...]) -> None:
    """Make ``config.compute_hash()`` depend on ``layers``; the last call counts."""
    current = config.additional_config
    if isinstance(current, _KeyedConfig):
        current = current._original
    if current is None or isinstance(current, dict):
        config.additional_config = {**(current or {}), COMPILE_KEY: list(layers)}
    else:
        config.additional_config = _KeyedConfig(current, layers)


class Eagle3Target(SupportsEagle3):
    """``SupportsEagle3`` for a target class whose decoder is :class:`DeepseekV2Model`."""

    def _decoder(self) -> DeepseekV2Model:
        raise NotImplementedError

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """See :meth:`DeepseekV2Model.choose_aux_hidden_state_layers`."""
        self._decoder().choose_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """vLLM's default layers, used where the drafter's config names none at its top level."""
        return default_layers(self._decoder().config.num_hidden_layers)

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The same, under the name that vLLM asks for from 0.18 on."""
        return self.get_eagle3_aux_hidden_state_layers()
