# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 drafter with DeepSeek's multi-head latent attention, for 0.15 to 0.17.

Its one decoder layer is a dense DeepSeek-V3 layer whose attention reads the token's embedding and
the combined hidden state side by side, twice the hidden size. Everything around that layer
(combining the auxiliary hidden states, the draft vocabulary, loading) is the same as in the
releases' own Llama drafter, which the class extends; the proposer also insists on that class.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import (
    default_weight_loader,
    maybe_remap_kv_scale_name,
)
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLAAttention, DeepseekV2MLP
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.utils import get_draft_quant_config, maybe_prefix

from vllm_kimi_eagle3.checkpoint.aux_layers import DEFAULT_COUNT


class _TwiceWideAttention(DeepseekV2MLAAttention):
    """MLA whose down-projections read ``[num_tokens, 2 * hidden_size]``.

    These releases size the down-projections by ``hidden_size``, which is also the output's size,
    so they are built a second time here.
    """

    def __init__(self, *, hidden_size: int, quant_config: Any, prefix: str, **kwargs: Any) -> None:
        super().__init__(
            hidden_size=hidden_size, quant_config=quant_config, prefix=prefix, **kwargs
        )
        width = 2 * hidden_size
        latent = self.kv_lora_rank + self.qk_rope_head_dim
        common = {"bias": False, "quant_config": quant_config}
        if self.q_lora_rank is not None:
            self._replace(
                "fused_qkv_a_proj",
                MergedColumnParallelLinear(
                    width,
                    [self.q_lora_rank, latent],
                    prefix=f"{prefix}.fused_qkv_a_proj",
                    disable_tp=True,
                    **common,
                ),
            )
        else:
            self._replace(
                "kv_a_proj_with_mqa",
                ReplicatedLinear(width, latent, prefix=f"{prefix}.kv_a_proj_with_mqa", **common),
            )
            self._replace(
                "q_proj",
                ColumnParallelLinear(
                    width, self.num_heads * self.qk_head_dim, prefix=f"{prefix}.q_proj", **common
                ),
            )

    def _replace(self, name: str, projection: nn.Module) -> None:
        setattr(self, name, projection)
        setattr(self.mla_attn, name, projection)  # The wrapper that runs them holds them too.


def _with_own_rope(config: Any) -> Any:
    """A shallow copy of ``config`` whose rope parameters may be written to; attention does."""
    own = copy.copy(config)
    own.rope_parameters = dict(config.rope_parameters)
    return own


class DeepseekV2Eagle3DecoderLayer(nn.Module):
    """The drafter's decoder layer: MLA and a dense MLP."""

    def __init__(self, vllm_config: VllmConfig, config: Any, prefix: str) -> None:
        super().__init__()
        quant_config = get_draft_quant_config(vllm_config)
        self.self_attn = _TwiceWideAttention(
            vllm_config=vllm_config,
            config=_with_own_rope(config),
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            max_position_embeddings=config.max_position_embeddings,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.self_attn",
        )
        self.mlp = DeepseekV2MLP(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            quant_config=quant_config,
            prefix=f"{prefix}.mlp",
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = bool(getattr(config, "norm_before_residual", False))

    def forward(
        self, positions: torch.Tensor, embeds: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on ``[num_tokens, hidden_size]`` embeddings and hidden states.

        Returns:
            The MLP's output and the residual that it has still to be added to.
        """
        normed = self.hidden_norm(hidden_states)
        residual = normed if self.norm_before_residual else hidden_states
        attention_input = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        hidden_states = self.self_attn(positions, attention_input, None)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


# Stated, because annotations are strings in this module and cannot be read back by the decorator.
@support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": -1, "hidden_states": 0, "input_embeds": 0}
)
class DeepseekV2Eagle3Model(nn.Module):
    """Embedding, combination of the auxiliary hidden states, the decoder layer, final norm."""

    def __init__(
        self, *, vllm_config: VllmConfig, start_layer_id: int = 0, prefix: str = ""
    ) -> None:
        super().__init__()
        self.config = config = vllm_config.speculative_config.draft_model_config.hf_config
        if config.num_hidden_layers != 1:
            raise ValueError(
                f"the drafter's config.json has num_hidden_layers {config.num_hidden_layers}; an "
                "EAGLE-3 drafter with MLA attention has 1"
            )
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "embed_tokens")
        )
        self.layers = nn.ModuleList(
            [
                DeepseekV2Eagle3DecoderLayer(
                    get_current_vllm_config(),
                    config,
                    # Numbered after the target's layers: the KV caches are told apart by it.
                    prefix=maybe_prefix(prefix, f"layers.{start_layer_id}"),
                )
            ]
        )
        # Read by the Llama drafter's methods. Without, the target's final hidden state is taken.
        self.use_aux_hidden_state = (getattr(config, "eagle_config", None) or {}).get(
            "use_aux_hidden_state", True
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if not self.use_aux_hidden_state:
            return
        self.fc = ReplicatedLinear(
            input_size=getattr(config, "target_hidden_size", config.hidden_size)
            * (getattr(config, "num_aux_hidden_states", None) or DEFAULT_COUNT),
            output_size=config.hidden_size,
            bias=False,
            params_dtype=vllm_config.model_config.dtype,
            quant_config=get_draft_quant_config(vllm_config),
            prefix=maybe_prefix(prefix, "fc"),
            return_bias=False,
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed token ids ``[num_tokens]`` to ``[num_tokens, hidden_size]``."""
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        input_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step.

        Args:
            input_ids: token ids, ``[num_tokens]``.
            positions: positions, ``[num_tokens]``.
            hidden_states: combined auxiliary hidden states, or the previous draft step's second
                result, ``[num_tokens, hidden_size]``.
            input_embeds: embeddings to use instead of ``input_ids``,
                ``[num_tokens, hidden_size]``.

        Returns:
            The normed hidden states for the head and those before the norm for the next draft
            step, both ``[num_tokens, hidden_size]``.
        """
        if input_embeds is None:
            input_embeds = self.embed_input_ids(input_ids)
        hidden_states, residual = self.layers[0](positions, input_embeds, hidden_states)
        return self.norm(hidden_states, residual)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors by their checkpoint names, ``midlayer.`` or ``layers.0.``.

        Returns:
            The names of the parameters that were set.

        Raises:
            ValueError: a tensor that this drafter has no place for.
        """
        fused = [
            (".gate_up_proj", ".gate_proj", 0),
            (".gate_up_proj", ".up_proj", 1),
            (".fused_qkv_a_proj", ".q_a_proj", 0),
            (".fused_qkv_a_proj", ".kv_a_proj_with_mqa", 1),
        ]
        parameters = dict(self.named_parameters())
        loaded: set[str] = set()
        for checkpoint_name, tensor in weights:
            if "rotary_emb.inv_freq" in checkpoint_name:
                continue  # Old Transformers saved it; it follows from the config.
            name, shard = checkpoint_name.replace("midlayer.", "layers.0."), None
            if "scale" in name:
                # Scales of an fp8 KV cache have several spellings; it says which it does not use.
                name = maybe_remap_kv_scale_name(name, parameters)
                if name is None:
                    continue
            for into, part, index in fused:
                if part in name and name.replace(part, into) in parameters:
                    name, shard = name.replace(part, into), index
            if name not in parameters:
                raise ValueError(
                    f"the drafter's checkpoint holds {checkpoint_name!r}, which this class has no "
                    "place for"
                )
            parameter = parameters[name]
            load = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, tensor) if shard is None else load(parameter, tensor, shard)
            loaded.add(name)
        return loaded


class Eagle3DeepseekV2ForCausalLM(Eagle3LlamaForCausalLM):
    """EAGLE-3 drafter with MLA attention, under the name that vLLM gives it from 0.18 on."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "gate_up_proj": ["gate_proj", "up_proj"],
        "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        speculative_config = vllm_config.speculative_config
        self.config = config = speculative_config.draft_model_config.hf_config
        self.use_parallel_drafting = bool(getattr(speculative_config, "parallel_drafting", False))
        if self.use_parallel_drafting:
            raise ValueError(
                '--speculative-config, "parallel_drafting": an EAGLE-3 drafter with MLA attention '
                "drafts one token after the other; leave the key out"
            )
        if getattr(config, "draft_vocab_size", None) is None:
            config.draft_vocab_size = config.vocab_size
        target_layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        config.target_layer_count = target_layers
        self.model = DeepseekV2Eagle3Model(
            vllm_config=vllm_config, prefix="model", start_layer_id=target_layers
        )
        self.lm_head = ParallelLMHead(
            config.draft_vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        self.logits_processor = LogitsProcessor(
            config.draft_vocab_size, scale=getattr(config, "logit_scale", 1.0)
        )
        # Target token id minus draft token id, per draft token; zero where the checkpoint has no
        # d2t, that is, where both vocabularies are the same.
        self.draft_id_to_target_id = nn.Parameter(
            torch.zeros(config.draft_vocab_size, dtype=torch.long), requires_grad=False
        )
