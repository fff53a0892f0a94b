# SPDX-License-Identifier: Apache-2.0
"""One engine that answers waves of requests.

    python -m tests.gpu.lossless_probe JOB.json OUT.json

JOB has `engine`, the keyword arguments of `vllm.LLM`, `waves`, lists of requests that are given at
once (`{"tokens": [...], "max_tokens": n}`), and `recorded`, the number of one of them. A wave may
have more requests than the engine serves at a time; the others join as earlier ones leave. OUT
gets the output tokens per wave, the counters, and, of the recorded wave, how many of the target's
forwards replayed how many CUDA graphs, and how many of the proposals of drafts did.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams

    from benchmarks.step_time import start_recording, stop_recording
    from tests.hosts.offline import spec_decode_counters

    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**job["engine"])
    waves: list[list[list[int]]] = []
    recorded: list[list[Any]] = []
    for number, wave in enumerate(job["waves"]):
        if number == job["recorded"]:
            llm.collective_rpc(start_recording)
        outputs = llm.generate(
            [{"prompt_token_ids": request["tokens"]} for request in wave],
            [
                SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
                for request in wave
            ],
            use_tqdm=False,
        )
        if number == job["recorded"]:
            recorded = llm.collective_rpc(stop_recording)[0]
        waves.append([list(output.outputs[0].token_ids) for output in outputs])
    graphs, drafting = (
        Counter(span[3] for span in recorded if span[0] == label)
        for label in ("target", "drafting")
    )
    result = {
        "waves": waves,
        "spec_decode": spec_decode_counters(llm),
        "graphs": sorted(graphs.items()),
        "drafting_graphs": sorted(drafting.items()),
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
