# SPDX-License-Identifier: Apache-2.0
"""Building blocks that the target and the drafters share.

Shapes: `T` tokens, `H` hidden size, `N` attention heads; leading `...` axes are batch axes. Modules
are named as in Hugging Face checkpoints, so that a checkpoint loads with `load_state_dict`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class RmsNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        return functional.rms_norm(hidden_states, (hidden_states.shape[-1],), self.weight, self.eps)


class GatedMlp(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(
            functional.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        )


def linear(input_size: int, output_size: int) -> nn.Linear:
    """A projection without bias, as all of them are here."""
    return nn.Linear(input_size, output_size, bias=False)


# ------------------------------------------------------------------------------ rotary embedding


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of `2 * len(inverse_frequencies)` channels.

    Attributes:
        inverse_frequencies: `[rotary_dim / 2]`, radians per position.
        magnitude: factor on cos and sin (YaRN's `mscale` ratio; 1.0 without YaRN and for Kimi).
    """

    inverse_frequencies: Tensor
    magnitude: float = 1.0

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """For positions `[T]`, returns cos and sin, each `[T, rotary_dim / 2]`."""
        angles = torch.outer(positions.float(), self.inverse_frequencies)
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's magnitude correction, `0.1 * mscale * ln(factor) + 1` (arXiv:2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_inverse_frequencies(
    rotary_dim: int, theta: float, rope_scaling: Mapping[str, Any]
) -> Tensor:
    """YaRN's "NTK by parts" inverse frequencies, `[rotary_dim / 2]`.

    Channels that turn more than `beta_fast` times over the original context keep their frequency,
    those that turn less than `beta_slow` times are divided by `factor`, and a linear ramp over the
    channel index joins the two. The bounds are rounded outward as in DeepSeek's own modelling code.
    """
    factor = float(rope_scaling["factor"])
    original_context = rope_scaling["original_max_position_embeddings"]

    def channel_of(rotations: float) -> float:
        return (
            rotary_dim
            * math.log(original_context / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low = max(math.floor(channel_of(rope_scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(channel_of(rope_scaling.get("beta_slow", 1))), rotary_dim - 1)
    span = (high - low) or 0.001

    extrapolated = theta ** -(torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    interpolated = extrapolated / factor
    interpolated_share = ((torch.arange(rotary_dim // 2).float() - low) / span).clamp(0, 1)
    return interpolated * interpolated_share + extrapolated * (1 - interpolated_share)


def read_rope(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """Theta, and the scaling's parameters or None for plain rope, from either layout.

    Transformers 4 writes `rope_theta` beside `rope_scaling`, Transformers 5 writes both into
    `rope_parameters`. The kind is `rope_type`, or `type` in older files; `default` is plain rope.

    Raises:
        NotImplementedError: a scaling other than YaRN.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"])
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise NotImplementedError(f"rope scaling {dict(rope)} in a {config['model_type']}")
    return theta, rope


def rotary_from_config(config: Mapping[str, Any], rotary_dim: int) -> Rotary:
    """The rotary embedding of a config: plain, or YaRN as DeepSeek and TorchSpec define it."""
    theta, scaling = read_rope(config)
    if scaling is None:
        return Rotary(theta ** -(torch.arange(0, rotary_dim, 2).float() / rotary_dim))
    factor = float(scaling["factor"])
    magnitude = yarn_mscale(factor, scaling.get("mscale", 1.0)) / yarn_mscale(
        factor, scaling.get("mscale_all_dim", 0.0)
    )
    return Rotary(yarn_inverse_frequencies(rotary_dim, theta, scaling), magnitude)


def rotate_interleaved(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates channel pairs (0, 1), (2, 3), ... of `[..., T, D]` (DeepSeek's layout)."""
    even, odd = vectors[..., 0::2], vectors[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def rotate_halves(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates channel pairs (0, D/2), (1, D/2 + 1), ... of `[..., T, D]` (Llama's layout)."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


# ------------------------------------------------------------------------------------- attention


class KvCache:
    """Keys and values of one attention layer, `[..., N, T, D]`, grown along the token axis."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self._keys is None else self._keys.shape[-2]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the new tokens' keys and values; returns those of all tokens."""
        if self._keys is None or self._values is None:
            self._keys, self._values = keys, values
        else:
            self._keys = torch.cat((self._keys, keys), dim=-2)
            self._values = torch.cat((self._values, values), dim=-2)
        return self._keys, self._values

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        if self._keys is not None and self._values is not None:
            self._keys = self._keys[..., :length, :]
            self._values = self._values[..., :length, :]


def causal_visibility(num_new_tokens: int, num_cached_tokens: int) -> Tensor:
    """Which keys a query may read: bool `[num_new_tokens, num_cached_tokens + num_new_tokens]`."""
    total = num_cached_tokens + num_new_tokens
    return torch.ones(num_new_tokens, total, dtype=torch.bool).tril(num_cached_tokens)


class LatentAttention(nn.Module):
    """DeepSeek's multi-head latent attention (MLA), with keys and values spelled out per head.

    `input_size` is `2 * hidden_size` in an EAGLE-3 drafter (embedding beside hidden state).
    """

    def __init__(self, config: Mapping[str, Any], input_size: int) -> None:
        super().__init__()
        eps = config["rms_norm_eps"]
        self.num_heads: int = config["num_attention_heads"]
        self.kv_lora_rank: int = config["kv_lora_rank"]
        self.nope_dim: int = config["qk_nope_head_dim"]
        self.rope_dim: int = config["qk_rope_head_dim"]
        self.value_dim: int = config["v_head_dim"]
        query_dim = self.nope_dim + self.rope_dim

        self.q_a_proj = linear(input_size, config["q_lora_rank"])
        self.q_a_layernorm = RmsNorm(config["q_lora_rank"], eps)
        self.q_b_proj = linear(config["q_lora_rank"], self.num_heads * query_dim)
        self.kv_a_proj_with_mqa = linear(input_size, self.kv_lora_rank + self.rope_dim)
        self.kv_a_layernorm = RmsNorm(self.kv_lora_rank, eps)
        self.kv_b_proj = linear(
            self.kv_lora_rank, self.num_heads * (self.nope_dim + self.value_dim)
        )
        self.o_proj = linear(self.num_heads * self.value_dim, config["hidden_size"])

        self.rotary = rotary_from_config(config, self.rope_dim)
        self.softmax_scale = query_dim**-0.5
        _, scaling = read_rope(config)
        if scaling is not None:
            mscale = yarn_mscale(float(scaling["factor"]), scaling.get("mscale_all_dim", 0.0))
            self.softmax_scale *= mscale * mscale

    def forward(
        self, hidden_states: Tensor, positions: Tensor, cache: KvCache, visibility: Tensor
    ) -> Tensor:
        """`[..., T, input_size]` to `[..., T, H]`; see `causal_visibility` for the mask."""
        cos, sin = self.rotary.cos_sin(positions)

        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = split_heads(query, self.num_heads)
        query_nope, query_rope = query.split([self.nope_dim, self.rope_dim], dim=-1)
        query_rope = rotate_interleaved(query_rope, cos, sin)

        latent, key_rope = self.kv_a_proj_with_mqa(hidden_states).split(
            [self.kv_lora_rank, self.rope_dim], dim=-1
        )
        key_rope = rotate_interleaved(key_rope, cos, sin)
        key_value = split_heads(self.kv_b_proj(self.kv_a_layernorm(latent)), self.num_heads)
        key_nope, value = key_value.split([self.nope_dim, self.value_dim], dim=-1)
        key_rope = key_rope.unsqueeze(-3).expand_as(query_rope)

        keys, values = cache.append(torch.cat((key_nope, key_rope), dim=-1), value)
        output = functional.scaled_dot_product_attention(
            torch.cat((query_nope, query_rope), dim=-1),
            keys,
            values,
            attn_mask=visibility,
            scale=self.softmax_scale,
        )
        return self.o_proj(merge_heads(output))


class GroupedQueryAttention(nn.Module):
    """Llama's attention: each key and value head serves a group of query heads."""

    def __init__(self, config: Mapping[str, Any], input_size: int) -> None:
        super().__init__()
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // self.num_heads
        self.q_proj = linear(input_size, self.num_heads * self.head_dim)
        self.k_proj = linear(input_size, self.num_kv_heads * self.head_dim)
        self.v_proj = linear(input_size, self.num_kv_heads * self.head_dim)
        self.o_proj = linear(self.num_heads * self.head_dim, config["hidden_size"])
        self.rotary = rotary_from_config(config, self.head_dim)

    def forward(
        self, hidden_states: Tensor, positions: Tensor, cache: KvCache, visibility: Tensor
    ) -> Tensor:
        """`[..., T, input_size]` to `[..., T, H]`; see `causal_visibility` for the mask."""
        cos, sin = self.rotary.cos_sin(positions)
        query = rotate_halves(split_heads(self.q_proj(hidden_states), self.num_heads), cos, sin)
        key = rotate_halves(split_heads(self.k_proj(hidden_states), self.num_kv_heads), cos, sin)
        value = split_heads(self.v_proj(hidden_states), self.num_kv_heads)
        keys, values = cache.append(key, value)
        group_size = self.num_heads // self.num_kv_heads
        output = functional.scaled_dot_product_attention(
            query,
            keys.repeat_interleave(group_size, dim=-3),
            values.repeat_interleave(group_size, dim=-3),
            attn_mask=visibility,
        )
        return self.o_proj(merge_heads(output))


def split_heads(vectors: Tensor, num_heads: int) -> Tensor:
    """`[..., T, N * D]` to `[..., N, T, D]`."""
    return vectors.unflatten(-1, (num_heads, -1)).transpose(-2, -3)


def merge_heads(vectors: Tensor) -> Tensor:
    """`[..., N, T, D]` to `[..., T, N * D]`."""
    return vectors.transpose(-2, -3).flatten(-2)
