# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 drafters, float32: one layer, with Llama attention or with MLA.

The layer reads two vectors per position `t`: the embedding of token `t + 1`, and a hidden state.
On target-conditioned positions the hidden state is `fc(aux hidden states of token t)`, or the
target's final hidden state where `use_aux_hidden_state` is false; on the drafter's own positions it
is what the drafter put out one step before. The options of EAGLE-3.1 (`fc_norm`, `norm_output`) and
of earlier variants (`norm_before_residual`, `norm_before_fc`) may stand at top level or inside
`eagle_config`; `plain_config` also reads the speculators library's layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference.checkpoint import read_config, read_tensors
from tests.reference.layers import (
    GatedMlp,
    GroupedQueryAttention,
    KvCache,
    LatentAttention,
    RmsNorm,
    linear,
)
from tests.reference.target import Target


class DrafterLayer(nn.Module):
    """Decoder layer whose attention reads `[embedding, hidden state]`, each normed on its own."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden_size, eps = config["hidden_size"], config["rms_norm_eps"]
        attention = LatentAttention if "kv_lora_rank" in config else GroupedQueryAttention
        self.input_layernorm = RmsNorm(hidden_size, eps)
        self.hidden_norm = RmsNorm(hidden_size, eps)
        self.self_attn = attention(config, input_size=2 * hidden_size)
        self.post_attention_layernorm = RmsNorm(hidden_size, eps)
        self.mlp = GatedMlp(hidden_size, config["intermediate_size"])
        self.norm_before_residual = bool(read_option(config, "norm_before_residual", False))

    def forward(
        self,
        embeddings: Tensor,
        hidden_states: Tensor,
        positions: Tensor,
        cache: KvCache,
        visibility: Tensor,
    ) -> Tensor:
        normed = self.hidden_norm(hidden_states)
        residual = normed if self.norm_before_residual else hidden_states
        attention_input = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        residual = residual + self.self_attn(attention_input, positions, cache, visibility)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Drafter(nn.Module):
    """An EAGLE-3 drafter built from its config.

    Attributes:
        draft_to_target: int64 `[draft_vocab_size]`, the target token of each row of `lm_head`.
            (The checkpoint stores the offset `d2t[i] = draft_to_target[i] - i`.)
    """

    def __init__(self, config: Mapping[str, Any], target_hidden_size: int) -> None:
        super().__init__()
        if config["num_hidden_layers"] != 1:
            raise NotImplementedError("only drafters with one layer")
        self.config = dict(config)
        hidden_size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.num_aux_hidden_states = num_aux_hidden_states(config)
        fc_input_size = target_hidden_size * self.num_aux_hidden_states

        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden_size)
        self.input_norm = self.fc_norm = self.fc = None
        if self.num_aux_hidden_states > 0:
            if read_option(config, "norm_before_fc", False):
                self.input_norm = RmsNorm(fc_input_size, eps)
            if read_option(config, "fc_norm", False):
                self.fc_norm = nn.ModuleList(
                    RmsNorm(target_hidden_size, eps) for _ in range(self.num_aux_hidden_states)
                )
            self.fc = linear(fc_input_size, hidden_size)
        self.layers = nn.ModuleList([DrafterLayer(config)])
        self.norm = RmsNorm(hidden_size, eps)
        self.norm_output = bool(read_option(config, "norm_output", False))
        draft_vocab_size = config.get("draft_vocab_size") or config["vocab_size"]
        self.lm_head = linear(hidden_size, draft_vocab_size)
        self.register_buffer("draft_to_target", torch.arange(draft_vocab_size), persistent=False)

    def combine(self, aux_hidden_states: Tensor) -> Tensor:
        """`[..., T, number of aux layers * target H]` to the layer's hidden state `[..., T, H]`.

        Without aux layers that is the target's final hidden state as it is.
        """
        if self.fc is None:
            return aux_hidden_states
        if self.input_norm is not None:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        if self.fc_norm is not None:
            chunks = aux_hidden_states.chunk(self.num_aux_hidden_states, dim=-1)
            normed = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
            aux_hidden_states = torch.cat(normed, dim=-1)
        return self.fc(aux_hidden_states)

    def forward(
        self,
        token_ids: Tensor,
        hidden_states: Tensor,
        positions: Tensor,
        cache: KvCache,
        visibility: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """One pass over T positions.

        Args:
            token_ids: int64 `[..., T]`, the token *after* each position.
            hidden_states: `[..., T, H]`, from `combine` or from the step before.
            positions: int64 `[T]`.
            cache: extended in place.
            visibility: bool `[T, cached + T]`.

        Returns:
            Logits over the draft vocabulary `[..., T, draft_vocab_size]`, and the hidden states
            `[..., T, H]` for the next draft step (before the final norm, or after it with
            `norm_output`).
        """
        embeddings = self.embed_tokens(token_ids)
        stream = self.layers[0](embeddings, hidden_states, positions, cache, visibility)
        normed = self.norm(stream)
        return self.lm_head(normed), (normed if self.norm_output else stream)


AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's config, with the speculators library's layout turned into the plain one.

    There the layer's sizes are in `transformer_layer_config`, and the rest stands beside it. vLLM
    takes an absent `norm_before_residual` as true there.
    """
    if "transformer_layer_config" not in config:
        return dict(config)
    options = ("draft_vocab_size", AUX_LAYERS_KEY, "norm_before_fc", "fc_norm", "norm_output")
    return {
        **config["transformer_layer_config"],
        **{key: config[key] for key in options if config.get(key) is not None},
        "norm_before_residual": config.get("norm_before_residual", True),
    }


def read_option(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """An option's value: inside `eagle_config` before top level, as vLLM reads `norm_before_fc`."""
    return (config.get("eagle_config") or {}).get(key, config.get(key, default))


def aux_layer_ids(config: Mapping[str, Any]) -> list[int] | None:
    """The config's aux layer ids, top level before `eagle_config`; None where it names none."""
    return config.get(AUX_LAYERS_KEY) or (config.get("eagle_config") or {}).get(AUX_LAYERS_KEY)


def num_aux_hidden_states(config: Mapping[str, Any]) -> int:
    """How many aux hidden states `fc` joins: as stated, as many as there are ids, or three.

    None are joined, and there is no `fc`, where `use_aux_hidden_state` is false.
    """
    if not read_option(config, "use_aux_hidden_state", True):
        return 0
    return config.get("num_aux_hidden_states") or len(aux_layer_ids(config) or (0, 0, 0))


def captured_layer_ids(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...] | None:
    """Which hidden states of a target the drafter reads, as ids of layer inputs (`target.py`).

    A list that begins with 1 names outputs of layers, one lower than the inputs; a config without
    a list means vLLM's default. None: no aux hidden states, but the target's final one.
    """
    if num_aux_hidden_states(config) == 0:
        return None
    ids = aux_layer_ids(config) or (2, num_layers // 2, num_layers - 3)
    return tuple(layer_id + (ids[0] == 1) for layer_id in ids)


def load_drafter(folder: Path | str, target: Target) -> Drafter:
    """Loads a drafter folder; embeddings or LM head that it lacks are the target's."""
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in read_tensors(folder).items()
    }
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)  # follows from d2t; used in training only
    tensors.setdefault("embed_tokens.weight", target.model.embed_tokens.weight)
    tensors.setdefault("lm_head.weight", target.lm_head.weight)

    drafter = Drafter(plain_config(read_config(folder)), target.config["hidden_size"])
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    if offsets is not None:
        drafter.draft_to_target = torch.arange(len(offsets)) + offsets
    return drafter.eval().requires_grad_(False)
