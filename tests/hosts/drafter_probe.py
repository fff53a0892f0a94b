# SPDX-License-Identifier: Apache-2.0
"""Builds and runs drafters as a real vLLM does, without an engine around them.

    python drafter_probe.py JOBS.json OUTPUTS.pt

Everything is the release's own (and the plugin's): the engine configuration, the registry, the
loader, the projections, norms and rope. Only attention is replaced, by `PlainAttention` and
`PlainMlaAttention` below: causal attention of one sequence in plain torch, without a KV cache.
So this shows for any number of drafters in one process, MLA ones on CPU builds without MLA
included, what vLLM makes of the folder: not the engine around it.

A job is `{"target": folder, "drafter": folder, "inputs": file}`; its outcome, under the drafter's
folder name, is a dict of tensors and facts, or the error as a string.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.engine.arg_utils import EngineArgs


class PlainMlaAttention(nn.Module):
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
        **rest: object,
    ) -> torch.Tensor:
        """`[T, heads, nope + rope]`, `[T, kv_lora_rank]`, `[T, 1, rope]` to `[T, heads * v]`."""
        up = self.kv_b_proj(latent)[0].view(-1, self.num_heads, self.nope + self.value)
        key, value = up.split([self.nope, self.value], dim=-1)
        key = torch.cat([key, rope_key.expand(-1, self.num_heads, -1)], dim=-1)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.transpose(0, 1).reshape(output_shape)


class PlainAttention(nn.Module):
    """Stands in for `Attention`: one causal sequence."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, **rest: object
    ):
        super().__init__()
        self.heads, self.size, self.scale, self.kv_heads = num_heads, head_size, scale, num_kv_heads

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`[T, heads * size]` and twice `[T, kv_heads * size]` to `[T, heads * size]`."""
        q = query.view(-1, self.heads, self.size).transpose(0, 1)
        k, v = (x.view(-1, self.kv_heads, self.size).transpose(0, 1) for x in (key, value))
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=0) for x in (k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.transpose(0, 1).reshape(query.shape)


def run_jobs(run: Callable[[dict[str, str]], dict[str, Any]]) -> None:
    """Runs the jobs of the command line's first file and writes their outcomes to its second."""
    jobs = json.loads(Path(sys.argv[1]).read_text())
    outcomes: dict[str, Any] = {}
    for job in jobs:
        try:
            outcome: Any = run(job)
        except Exception as error:
            traceback.print_exc()
            outcome = f"{type(error).__name__}: {error}"
        outcomes[Path(job["drafter"]).name] = outcome
        torch.save(outcomes, sys.argv[2])


@contextmanager
def loaded(job: dict[str, str]) -> Iterator[tuple[Any, Any]]:
    """The engine's configuration, which is the current one, and the drafter with its embedding."""
    speculative = {"method": "eagle3", "model": job["drafter"], "num_speculative_tokens": 3}
    config = EngineArgs(
        model=job["target"],
        dtype="float32",
        max_model_len=512,
        trust_remote_code=True,
        enforce_eager=True,
        # The CPU build's rope kernel takes the heads of an MLA layer for positions; eager only.
        compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
        speculative_config=speculative,
    ).create_engine_config()

    import vllm.model_executor.layers.mla as mla
    import vllm.model_executor.models.llama as llama
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None  # As vLLM's CPU worker does.
    mla.MLAAttention = PlainMlaAttention
    llama.Attention = PlainAttention
    draft_config = config.speculative_config.draft_model_config
    with set_current_vllm_config(config):
        start_distributed()
        model = get_model(vllm_config=config, model_config=draft_config)
        if not getattr(model, "has_own_embed_tokens", False):
            take_embedding(model, job["target"])
        yield config, model


def run(job: dict[str, str]) -> dict[str, Any]:
    """What vLLM makes of one drafter."""
    with loaded(job) as (config, model):
        has_own = {
            "embed_tokens": getattr(model, "has_own_embed_tokens", False),
            "lm_head": getattr(model, "has_own_lm_head", False),
        }
        inputs = torch.load(job["inputs"])
        positions = torch.arange(len(inputs["token_ids"]))
        with torch.inference_mode():
            hidden = model.combine_hidden_states(inputs["hidden_states"])
            normed, for_next_step = model(inputs["token_ids"], positions, hidden)
            # The target's head cannot be put in place of one that was packed at the load.
            logits = model.compute_logits(normed) if has_own["lm_head"] else None
    return {
        "class": [base.__name__ for base in type(model).__mro__],
        "module": type(model).__module__,
        "parameters": sorted(name for name, _ in model.named_parameters()),
        "linear_methods": sorted(
            {type(m.quant_method).__name__ for m in model.modules() if hasattr(m, "quant_method")}
        ),
        "has_own": has_own,
        "captured": captured(config),
        "max_model_len": config.speculative_config.draft_model_config.max_model_len,
        "hidden_states": for_next_step,
        "logits": logits,
    }


def take_embedding(model: Any, target: str) -> None:
    """Gives the drafter the target's embedding, as the runner does once the target is there."""
    from safetensors import safe_open

    name = "language_model.model.embed_tokens.weight"
    for file in Path(target).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118
                model.model.embed_tokens.weight.data.copy_(tensors.get_tensor(name))


def start_distributed() -> None:
    """A world of one, once per process."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    if not torch.distributed.is_initialized():
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        initialize_model_parallel()


def captured(config: Any) -> dict[str, Any]:
    """The layers that each runner would capture by the config; None: the target's default."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = SimpleNamespace(speculative_config=config.speculative_config)
    found = {"V1": GPUModelRunner._get_eagle3_aux_layers_from_config(runner)}
    try:
        from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
            get_eagle3_aux_layers_from_config,
        )
    except ImportError:
        return found
    return {**found, "V2": get_eagle3_aux_layers_from_config(config.speculative_config)}


if __name__ == "__main__":
    run_jobs(run)
