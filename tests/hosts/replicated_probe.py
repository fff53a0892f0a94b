# SPDX-License-Identifier: Apache-2.0
"""Engines whose drafter is or is not replicated: `python replicated_probe.py JOBS.json OUT.json`.

Each job has the `engine`'s arguments, `prompts`, `max_tokens`, and `disable`, the patches to leave
out. The answer has, by the job's name, the tokens, the counters, and what each worker saw: the
shapes of the drafter's weights, its KV heads and its metadata builder's heads, and how often its
methods asked the target's tensor-parallel group for a collective. Standard library only at the
top, because `spawn` imports this file again in each of the engine's processes.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import offline


def main(jobs_path: str, out_path: str) -> None:
    answers = {}
    for name, job in json.loads(Path(jobs_path).read_text()).items():
        os.environ["VLLM_KIMI_EAGLE3_DISABLE"] = job.get("disable", "")
        answers[name] = run(job)
        Path(out_path).write_text(json.dumps(answers))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One job's answer."""
    from vllm import LLM, SamplingParams

    try:
        llm = LLM(**job["engine"])
    except Exception:
        return {"error": traceback.format_exc()}
    llm.collective_rpc(count_collectives)
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    answer = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "counts": offline.spec_decode_counters(llm),
        "workers": llm.collective_rpc(look),
    }
    del llm
    offline.clean_up()
    return answer


def drafter_of(worker: Any) -> Any:
    """The drafter's model, of either runner."""
    runner = worker.model_runner
    proposer = getattr(runner, "drafter", None) or runner.speculator
    return proposer.model


def count_collectives(worker: Any) -> None:
    """Runs in the worker: from now on, collectives of the target's group are counted while one of
    the drafter's methods runs."""
    from vllm.distributed import parallel_state

    group, drafter = parallel_state.get_tp_group(), drafter_of(worker)
    worker.collectives = counted = {"drafter": 0, "calls": 0}
    inside = [0]

    def counting(stock: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted["drafter"] += bool(inside[0])
            return stock(*args, **kwargs)

        return call

    def marked(stock: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            inside[0] += 1
            counted["calls"] += 1
            try:
                return stock(*args, **kwargs)
            finally:
                inside[0] -= 1

        return call

    for name in ("all_reduce", "all_gather", "gather", "reduce_scatter"):
        setattr(group, name, counting(getattr(group, name)))
    for name in ("forward", "compute_logits", "combine_hidden_states"):
        setattr(drafter, name, marked(getattr(drafter, name)))


def look(worker: Any) -> dict[str, Any]:
    """Runs in the worker: what the drafter has there."""
    from vllm_kimi_eagle3.drafting.replicated import attention_layers, drafter_group

    drafter = drafter_of(worker)
    runner = worker.model_runner
    (layer,) = attention_layers(drafter)
    groups = [g for kv_group in runner.attn_groups for g in kv_group]
    (group,) = [g for g in groups if layer.layer_name in g.layer_names]
    return {
        "shapes": {name: list(p.shape) for name, p in drafter.named_parameters()},
        "tp": drafter_group(drafter).world_size,
        "heads": layer.num_heads,
        "kv_heads": layer.get_kv_cache_spec(runner.vllm_config).num_kv_heads,
        "layers": group.layer_names,
        "builder": getattr(group.metadata_builders[0], "num_heads", None),
        "collectives": worker.collectives,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
