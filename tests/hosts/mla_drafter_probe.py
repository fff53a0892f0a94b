# SPDX-License-Identifier: Apache-2.0
"""Runs the plugin's MLA drafter class in a vLLM that cannot attend with MLA on the CPU.

    python mla_drafter_probe.py TARGET DRAFTER INPUTS.pt OUTPUTS.pt

Everything is the release's own and the plugin's: the engine configuration, the registry, the
loader, the projections, norms and rope. Only `MLAAttention`, behind which the back-ends are that
a CPU build lacks, is replaced, by `PlainAttention` below: causal attention of one sequence in plain
torch, without a KV cache. So this shows the class and its weights, not the engine around it.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from vllm.engine.arg_utils import EngineArgs


class PlainAttention(nn.Module):
    """Stands in for `MLAAttention` where there is no MLA back-end: one causal sequence."""

    def __init__(self, *, num_heads: int, scale: float, kv_b_proj: nn.Module, **rest: object):
        super().__init__()
        self.num_heads, self.scale = num_heads, scale
        self.kv_b_proj = kv_b_proj
        self.nope, self.value = rest["qk_nope_head_dim"], rest["v_head_dim"]

    def forward(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope_key: torch.Tensor,
        output_shape: torch.Size,
    ) -> torch.Tensor:
        """`[T, heads, nope + rope]`, `[T, kv_lora_rank]`, `[T, 1, rope]` to `[T, heads * v]`."""
        up = self.kv_b_proj(latent)[0].view(-1, self.num_heads, self.nope + self.value)
        key, value = up.split([self.nope, self.value], dim=-1)
        key = torch.cat([key, rope_key.expand(-1, self.num_heads, -1)], dim=-1)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.transpose(0, 1).reshape(output_shape)


def main() -> None:
    target, drafter, inputs_path, outputs_path = sys.argv[1:]
    speculative = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 3}
    config = EngineArgs(
        model=target,
        dtype="float32",
        max_model_len=512,
        trust_remote_code=True,
        enforce_eager=True,
        speculative_config=speculative,
    ).create_engine_config()

    import vllm.model_executor.layers.mla as mla
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model

    mla.MLAAttention = PlainAttention
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        initialize_model_parallel()
        draft_config = config.speculative_config.draft_model_config
        model = get_model(vllm_config=config, model_config=draft_config)

        inputs = torch.load(inputs_path)
        positions = torch.arange(len(inputs["token_ids"]))
        with torch.inference_mode():
            hidden = model.combine_hidden_states(inputs["aux_hidden_states"])
            normed, for_next_step = model(inputs["token_ids"], positions, hidden)
            logits = model.compute_logits(normed)
    outputs = {
        "class": [base.__name__ for base in type(model).__mro__],
        "parameters": sorted(name for name, _ in model.named_parameters()),
        "has_own": [model.has_own_lm_head, model.has_own_embed_tokens],
        "hidden_states": for_next_step,
        "logits": logits,
    }
    torch.save(outputs, outputs_path)


if __name__ == "__main__":
    main()
