# SPDX-License-Identifier: Apache-2.0
"""A Kimi target of vLLM 0.18 and later that also hands out the embedding as an aux hidden state.

Aux layer 0 is the input of the first decoder layer. Upstream's decoder adds a residual to every aux
hidden state, and there is none yet at the first layer. It is taken here, outside the compiled
decoder, which is left as it is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def with_embedding(stock: type) -> type:
    """``stock``, a release's target class, with aux layer 0, under its own name."""
    return type(stock.__name__, (_WithEmbedding, stock), {"__module__": __name__})


class _WithEmbedding:
    """Mixed in before a release's target class."""

    _wants_embedding = False

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Choose the layers; 0 is the embedding, the rest the decoder captures."""
        self._wants_embedding = 0 in layers
        super().set_aux_hidden_state_layers(  # type: ignore[misc]
            tuple(layer for layer in layers if layer)
        )

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The release's own forward pass, with the embedding first among the aux hidden states."""
        stock = super().forward  # type: ignore[misc]
        if not self._wants_embedding:
            return stock(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        # Before the forward pass, whose layers add into it in place. Without embeddings given, the
        # decoder makes its own: CUDA graphs replay the addresses that it was captured with.
        embedding = (
            self.embed_input_ids(input_ids)  # type: ignore[attr-defined]
            if inputs_embeds is None
            else inputs_embeds.clone()
        )
        out = stock(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        hidden_states, aux = out if isinstance(out, tuple) else (out, [])
        return hidden_states, [embedding, *aux]
