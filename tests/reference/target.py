# SPDX-License-Identifier: Apache-2.0
"""The target: Kimi-K2.5's text tower (DeepSeek-V3), float32, with aux hidden states.

Aux layer ids follow vLLM: id `i` is the residual stream that enters layer `i`, which is what layer
`i - 1` put out. So 0 is the embedding and `num_hidden_layers` is the last layer's output before
the final norm. (Trainers that hook a layer's output count one lower: their `[1, 29, 57]` is
`[2, 30, 58]` here.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference.checkpoint import read_tensors, read_text_config
from tests.reference.layers import (
    GatedMlp,
    KvCache,
    LatentAttention,
    RmsNorm,
    causal_visibility,
    linear,
)


@dataclass(frozen=True)
class TargetOutput:
    """What one forward pass gives for its T tokens.

    Attributes:
        logits: `[..., T, vocab_size]`.
        aux_hidden_states: `[..., T, number of aux layers * H]`, in the order of the ids; or what
            the final norm puts out, `[..., T, H]`, where no aux layers were wanted.
    """

    logits: Tensor
    aux_hidden_states: Tensor


class Router(nn.Module):
    """DeepSeek-V3's `noaux_tc` routing with one expert group.

    Experts are chosen by sigmoid score plus a bias, and weighted by the score alone.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        if (config["topk_method"], config["scoring_func"], config["n_group"]) != (
            "noaux_tc",
            "sigmoid",
            1,
        ):
            raise NotImplementedError("only noaux_tc routing with sigmoid scores and one group")
        num_experts = config["n_routed_experts"]
        self.experts_per_token: int = config["num_experts_per_tok"]
        self.normalize: bool = config["norm_topk_prob"]
        self.scaling_factor: float = config["routed_scaling_factor"]
        self.weight = nn.Parameter(torch.empty(num_experts, config["hidden_size"]))
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Weight of every expert for every token, `[..., T, num_experts]`; zero if not chosen."""
        scores = torch.sigmoid(hidden_states @ self.weight.t())
        biased = scores + self.e_score_correction_bias
        chosen = biased.topk(self.experts_per_token, dim=-1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        if self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.scaling_factor


class MixtureOfExperts(nn.Module):
    """Routed experts plus one always-on MLP as wide as the shared experts together."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden_size, width = config["hidden_size"], config["moe_intermediate_size"]
        self.gate = Router(config)
        self.experts = nn.ModuleList(
            GatedMlp(hidden_size, width) for _ in range(config["n_routed_experts"])
        )
        self.shared_experts = GatedMlp(hidden_size, width * config["n_shared_experts"])

    def forward(self, hidden_states: Tensor) -> Tensor:
        weights = self.gate(hidden_states)
        output = self.shared_experts(hidden_states)
        for index, expert in enumerate(self.experts):
            output = output + expert(hidden_states) * weights[..., index : index + 1]
        return output


class TargetLayer(nn.Module):
    """Pre-norm decoder layer: MLA, then a dense MLP or a mixture of experts."""

    def __init__(self, config: Mapping[str, Any], layer_id: int) -> None:
        super().__init__()
        hidden_size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = RmsNorm(hidden_size, eps)
        self.self_attn = LatentAttention(config, input_size=hidden_size)
        self.post_attention_layernorm = RmsNorm(hidden_size, eps)
        is_dense = (
            layer_id < config["first_k_dense_replace"]
            or layer_id % config.get("moe_layer_freq", 1) != 0
        )
        self.mlp = (
            GatedMlp(hidden_size, config["intermediate_size"])
            if is_dense
            else MixtureOfExperts(config)
        )

    def forward(
        self, hidden_states: Tensor, positions: Tensor, cache: KvCache, visibility: Tensor
    ) -> Tensor:
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), positions, cache, visibility
        )
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class TargetBody(nn.Module):
    """Embedding, layers and final norm, grouped as the checkpoint's `model.` prefix groups them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(
            TargetLayer(config, layer_id) for layer_id in range(config["num_hidden_layers"])
        )
        self.norm = RmsNorm(config["hidden_size"], config["rms_norm_eps"])


class Target(nn.Module):
    """DeepSeek-V3 causal language model built from a text config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = dict(config)
        self.model = TargetBody(config)
        self.lm_head = linear(config["hidden_size"], config["vocab_size"])

    @property
    def num_layers(self) -> int:
        return len(self.model.layers)

    def new_caches(self) -> list[KvCache]:
        """One empty KV cache per layer."""
        return [KvCache() for _ in range(self.num_layers)]

    def forward(
        self,
        token_ids: Tensor,
        caches: Sequence[KvCache] | None = None,
        aux_layer_ids: Sequence[int] | None = (),
    ) -> TargetOutput:
        """Runs the tokens that follow the cached ones.

        Args:
            token_ids: int64 `[..., T]`.
            caches: from `new_caches`, extended in place; None starts from nothing.
            aux_layer_ids: strictly increasing, each in 0..num_layers (vLLM collects them in layer
                order whatever order they are given in). None: the final norm's output instead,
                which a drafter with `use_aux_hidden_state: false` reads.

        Raises:
            ValueError: ids out of range or not increasing.
        """
        wanted = list(aux_layer_ids or ())
        if wanted != sorted(set(wanted)) or not all(0 <= i <= self.num_layers for i in wanted):
            raise ValueError(f"aux layer ids {wanted} must increase within 0..{self.num_layers}")
        caches = self.new_caches() if caches is None else caches
        num_cached, num_new = len(caches[0]), token_ids.shape[-1]
        positions = torch.arange(num_cached, num_cached + num_new)
        visibility = causal_visibility(num_new, num_cached)

        stream = self.model.embed_tokens(token_ids)
        streams = [stream]  # streams[i] enters layer i
        for layer, cache in zip(self.model.layers, caches, strict=True):
            stream = layer(stream, positions, cache, visibility)
            streams.append(stream)
        normed = self.model.norm(stream)
        if aux_layer_ids is None:
            aux_hidden_states = normed
        else:
            aux = [streams[layer_id] for layer_id in wanted]
            aux_hidden_states = torch.cat(aux, dim=-1) if aux else stream[..., :0]
        return TargetOutput(self.lm_head(normed), aux_hidden_states)


def load_target(folder: Path | str) -> Target:
    """Loads a Kimi-K2.5 folder (`language_model.` prefix) or a Kimi-K2 / DeepSeek-V3 folder."""
    tensors = read_tensors(folder)
    prefix = "language_model."
    if any(name.startswith(prefix) for name in tensors):
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
    target = Target(read_text_config(folder))
    target.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return target.eval().requires_grad_(False)
