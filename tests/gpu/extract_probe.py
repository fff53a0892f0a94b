# SPDX-License-Identifier: Apache-2.0
"""Takes hidden states of the tiny Kimi-K2.5 with vLLM's method for taking training data.

python extract_probe.py FOLDER LAYER,LAYER,...    # prints the file of each prompt, one a line
"""

from __future__ import annotations

import sys

from vllm import LLM, SamplingParams

from tests.assets.variants import load_prompts
from tests.hosts.harness import TARGET


def main() -> None:
    folder, layers = sys.argv[1], [int(layer) for layer in sys.argv[2].split(",")]
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}
    llm = LLM(
        model=str(TARGET),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=8,
        trust_remote_code=True,
        gpu_memory_utilization=0.2,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": draft,
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        },
    )
    prompts = [{"prompt_token_ids": prompt["token_ids"]} for prompt in load_prompts()]
    sampling = SamplingParams(temperature=0, max_tokens=1)
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        print("STATES", output.kv_transfer_params["hidden_states_path"])


if __name__ == "__main__":
    main()
