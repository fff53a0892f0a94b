# SPDX-License-Identifier: Apache-2.0
"""One engine whose every proposal of drafts is also made by vLLM's own loop, from the same inputs.

    python -m tests.gpu.drafting_probe JOB.json OUT.json

JOB is as `lossless_probe.py` has it, without `recorded`; a request may have a `temperature`. In the
worker, stock's `propose` runs first, over copies of what it changes, and its logits are kept; then
the drafter's KV cache is put back, and the plugin's runs, with any wait for the GPU an error where
the whole proposal is one graph. Its drafts go on to the target. OUT gets the output tokens and
counters per wave, a record of each proposal by the first rank, and `parted`, how many of them are
not the same on the other ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.hosts.offline import spec_decode_counters


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**job["engine"])
    llm.collective_rpc(start, args=(str(Path(__file__).parents[2]),))
    waves = []
    for wave in job["waves"]:
        outputs = llm.generate(
            [{"prompt_token_ids": request["tokens"]} for request in wave],
            [
                SamplingParams(
                    temperature=request.get("temperature", 0), seed=number,
                    max_tokens=request["max_tokens"], ignore_eos=True,
                )
                for number, request in enumerate(wave)
            ],
            use_tqdm=False,
        )  # fmt: skip
        of_ranks = [json.loads(records) for records in llm.collective_rpc(take)]
        drafted = [[one.pop("drafts") for one in records] for records in of_ranks]
        waves.append(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "spec_decode": spec_decode_counters(llm),
                "proposals": of_ranks[0],
                "parted": sum(
                    any(drafts != one[0] for drafts in one) for one in zip(*drafted, strict=True)
                ),
            }
        )
    Path(sys.argv[2]).write_text(json.dumps(waves))


# What follows runs in the worker; the first two are sent to it by value.


def start(worker: Any, root: str) -> None:
    """Compare from now on."""
    import sys

    sys.path.insert(0, root)
    from tests.gpu.drafting_probe import compare

    compare(worker)


def take(worker: Any) -> str:
    """The records since the last time, as JSON."""
    import json

    records, worker._proposals[:] = list(worker._proposals), []
    return json.dumps(records)


def compare(worker: Any) -> None:
    """Put a `propose` on the proposer that records, in `worker._proposals`, of each call:

    - `act`: whole, tail, stock; "" without a loop. `why`: the reason for stock.
    - `requests`, `tokens`.
    - `same`: requests all of whose drafts are stock's. `gaps`: for each of the others, how many
      logits the first other draft is below stock's, by stock's logits. Drafts from positions past
      the length limit do not count: nobody can take them, and stock goes on from position 0 there.
    - `past`: requests with such drafts. `position`: the furthest that is drafted from.
    - `waited`: the error of a wait for the GPU, or "".
    - `host_ms`: that the plugin's call took on the host.
    - `drafts`: those that go on to the target.
    """
    import time

    import torch

    from vllm_kimi_eagle3.drafting.loop import Signature

    proposer = worker.model_runner.drafter
    ours = type(proposer).propose
    stock = ours.__wrapped__
    signature = Signature(stock)
    records: list[dict[str, Any]] = []
    worker._proposals = records
    cuda = proposer.device.type == "cuda"
    caches = caches_of(proposer)

    def propose(*args: Any, **kwargs: Any) -> torch.Tensor:
        named = signature.named(proposer, args, kwargs)
        call = signature.call(proposer, named)
        # Without graphs it is made by the first call.
        loop = proposer.__dict__.get("kimi_eagle3_loop")
        act, why = loop.act_for(call) if loop is not None else ("", "")
        record: dict[str, Any] = {
            "act": act, "why": why, "waited": "", "requests": call.common.batch_size(),
            "tokens": call.target_token_ids.shape[0],
        }  # fmt: skip
        records.append(record)
        if act in ("", "stock"):
            drafts: torch.Tensor = ours(proposer, **named)
            record["drafts"] = drafts.tolist()
            return drafts
        logits: list[torch.Tensor] = []
        greedy = proposer._greedy_sample

        def sample(hidden: torch.Tensor) -> torch.Tensor:
            logits.append(proposer.model.compute_logits(hidden).float())
            sampled: torch.Tensor = greedy(hidden)
            return sampled

        indices = call.sample_indices
        if indices is None:
            indices = call.common.query_start_loc[1:] - 1
        positions = call.target_positions[indices.long()].clone()
        kept = [cache.clone() for cache in caches]
        proposer._greedy_sample = sample
        try:
            expected = stock(
                proposer, **{**named, "common_attn_metadata": copy_of(call.common)}
            ).clone()
        finally:
            del proposer._greedy_sample
        for cache, before in zip(caches, kept, strict=True):
            cache.copy_(before)
        if cuda:
            torch.cuda.synchronize()
            if act == "whole":
                torch.cuda.set_sync_debug_mode("error")
        begun = time.perf_counter()
        try:
            drafts = ours(proposer, **named)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            record["waited"] = f"{error}"[:300]
            torch.cuda.set_sync_debug_mode("default")
            drafts = ours(proposer, **named)
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
        record["host_ms"] = 1e3 * (time.perf_counter() - begun)
        steps = torch.arange(drafts.shape[1], device=drafts.device)
        counts = positions[:, None] + steps < proposer.max_model_len
        record |= judge(drafts, expected, logits, counts)
        record["position"] = int(positions.max())
        record["drafts"] = drafts.tolist()
        return drafts

    proposer.propose = propose


def copy_of(common: Any) -> Any:
    """The metadata, with copies of what stock's loop changes in place."""
    import copy

    import torch

    made = copy.copy(common)
    for name in (
        "seq_lens", "_seq_lens_cpu", "_num_computed_tokens_cpu", "seq_lens_cpu_upper_bound",
    ):  # fmt: skip
        value = getattr(made, name, None)
        if isinstance(value, torch.Tensor):
            setattr(made, name, value.clone())
    return made


def caches_of(proposer: Any) -> list[Any]:
    """The KV caches of the drafter's layers."""
    layers = proposer.vllm_config.compilation_config.static_forward_context
    found = [layers[name].kv_cache for name in sorted(proposer._draft_attn_layer_names)]
    # A list of one, in older releases.
    return [one[0] if isinstance(one, (list, tuple)) else one for one in found]


def judge(drafts: Any, expected: Any, logits: list[Any], counts: Any) -> dict[str, Any]:
    """`same`, `gaps` and `past`, as :func:`compare` has them, of `[requests, k]` drafts."""
    import torch

    other = (drafts != expected) & counts
    same = int((~other.any(dim=1)).sum())
    gaps = []
    for row in torch.nonzero(other.any(dim=1)).flatten().tolist():
        step = int(other[row].int().argmax())
        of_row = logits[step][row]
        gaps.append(float(of_row.max() - of_row[int(drafts[row, step])]))
    return {"same": same, "gaps": gaps, "past": int((~counts).any(dim=1).sum())}


if __name__ == "__main__":
    main()
