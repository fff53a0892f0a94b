# SPDX-License-Identifier: Apache-2.0
"""Does `vllm-kimi-eagle3 check` say what vLLM then does? On a GPU, with the vLLM that is installed.

    python benchmarks/check_against_vllm.py [--row] [NAME ...]

Makes one tensor-parallel rank's share of a Kimi-K2 (eight layers, dummy weights) and two drafters,
checks each command, starts it, and holds the two side by side: started or refused, the attention
back-ends, the weights' bytes, the KV cache's bytes per token. `--row` appends what was seen to
benchmarks/results/check_against_vllm.jsonl. Exit code 1 if they disagree on whether it starts or
on a back-end.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import rows  # noqa: E402
from vllm_kimi_eagle3.checkpoint.drafter import TargetShape, read_drafter  # noqa: E402
from vllm_kimi_eagle3.checkpoint.drafter_tensors import expected_tensors  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "check_against_vllm.jsonl"
VOCABULARY, HIDDEN, LAYERS = 20480, 7168, 8
YARN = {
    "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
MLA = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
COMMON = {
    "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "intermediate_size": 2304,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 262144,
    "rope_theta": 50000.0, "rope_scaling": YARN, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TARGET = {
    **COMMON, **MLA,
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
    "num_hidden_layers": LAYERS, "moe_intermediate_size": 256, "n_routed_experts": 64,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "num_nextn_predict_layers": 0, "attention_bias": False,
}  # fmt: skip
LLAMA_DRAFTER = {
    **COMMON,
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
MLA_DRAFTER = {
    **COMMON, **MLA,
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2",
    "num_hidden_layers": 1,
}  # fmt: skip

# What tensor parallelism divides; of each expert every rank has a part.
DIVIDED = (
    "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size",
    "vocab_size",
)  # fmt: skip


@dataclass(frozen=True)
class Attempt:
    """A command to check and to start."""

    drafter: str
    speculative: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)


ATTEMPTS = {
    "llama": Attempt("llama"),
    "mla": Attempt("mla"),
    "triton-llama": Attempt(
        "llama", {"attention_backend": "FLASH_ATTN"}, {"attention_backend": "TRITON_MLA"}
    ),
    "triton-mla": Attempt("mla", {}, {"attention_backend": "TRITON_MLA"}),
    "triton-mla-fp8": Attempt(
        "mla", {}, {"attention_backend": "TRITON_MLA", "kv_cache_dtype": "fp8"}
    ),
    "triton-mla-fp8-64": Attempt(
        "mla", {}, {"attention_backend": "TRITON_MLA", "kv_cache_dtype": "fp8", "block_size": 64}
    ),
    "fp8": Attempt("mla", {}, {"kv_cache_dtype": "fp8"}),
    "llama-on-mla": Attempt("llama", {"attention_backend": "TRITON_MLA"}),
    "wrong-gpu": Attempt("mla", {}, {"attention_backend": "CUTLASS_MLA"}),
    "too-long": Attempt("mla", {}, {"max_model_len": 262144, "gpu_memory_utilization": 0.08}),
    "full-graphs": Attempt(
        "mla",
        {},
        {
            "attention_backend": "TRITON_MLA",
            "enforce_eager": False,
            "compilation_config": {"cudagraph_mode": "FULL"},
        },
    ),
}

SERVE = """
import json, os, sys
from vllm import LLM, SamplingParams
from vllm.config.load import LoadConfig
arguments = json.loads(sys.argv[1])
# With dummy weights a drafter would share the target's head.
arguments["speculative_config"]["draft_load_config"] = LoadConfig(load_format="safetensors")
llm = LLM(load_format="dummy", skip_tokenizer_init=True, **arguments)
prompt = {"prompt_token_ids": list(range(10, 200))}
llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, detokenize=False))
print("SERVED", flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--row", action="store_true", help="append what was seen to the results")
    parser.add_argument("names", nargs="*", default=list(ATTEMPTS))
    options = parser.parse_args()
    agree = True
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_models(folder)
        for name in options.names:
            seen = attempt(ATTEMPTS[name], folder)
            row = {"name": name, **seen}
            agree &= seen["agree"]
            print(json.dumps(row, indent=1), flush=True)
            if options.row:
                rows.append(RESULTS, row)
    return 0 if agree else 1


def make_models(folder: Path, layers: int = LAYERS, shares: int = 1) -> None:
    """The config of a target with so many layers, and both drafters with random weights.

    Args:
        folder: where `target`, `llama` and `mla` are made.
        layers: of the target.
        shares: how many TP=8 ranks' shares the models are, for as many ranks.
    """
    import torch
    from safetensors.torch import save_file

    shape = TargetShape(layers, HIDDEN, VOCABULARY * shares)
    target, llama, mla = (widened(one, shares) for one in (TARGET, LLAMA_DRAFTER, MLA_DRAFTER))
    target["num_hidden_layers"] = layers
    for name, config in (("target", target), ("llama", llama), ("mla", mla)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        if name != "target":
            drafter = read_drafter(config, shape)
            assert drafter is not None
            wants = expected_tensors(drafter.expected)
            tensors = {
                tensor: torch.randn(want.shape, dtype=torch.bfloat16) * 0.02
                for tensor, want in wants.items()
            }
            save_file(tensors, folder / name / "model.safetensors")


def widened(config: dict[str, Any], shares: int) -> dict[str, Any]:
    """A config whose widths that tensor parallelism divides are `shares` times as large."""
    return {name: value * shares if name in DIVIDED else value for name, value in config.items()}


def attempt(one: Attempt, folder: Path) -> dict[str, Any]:
    """What the check said, what vLLM did, and whether they agree."""
    arguments = {
        "model": str(folder / "target"),
        "max_model_len": 40960,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8192,  # A server's default there; LLM has twice that.
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
        **one.flags,
        "speculative_config": {
            "method": "eagle3",
            "model": str(folder / one.drafter),
            "num_speculative_tokens": 3,
            **one.speculative,
        },
    }
    line = [arguments["model"]]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if name == "model" or value is False:
            continue
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        line += [flag] if value is True else [flag, text]
    program = [sys.executable, "-m", "vllm_kimi_eagle3.cli", "check", "--json"]
    before = time.monotonic()
    answer = subprocess.run([*program, *line], capture_output=True, text=True)
    seconds = time.monotonic() - before
    report = json.loads(answer.stdout)
    served = subprocess.run(
        [sys.executable, "-c", SERVE, json.dumps(arguments)], capture_output=True, text=True
    )
    log = served.stdout + served.stderr
    against = [f for f in report["findings"] if f["severity"] in ("fails", "wrong")]
    fails = any(f["severity"] == "fails" for f in against)
    started = "SERVED" in log
    untold = any(f["id"] == "memory-context-is-tight" for f in report["findings"])
    said = " ".join(f["fact"] for f in report["findings"])
    backends = re.findall(r"Using (?:AttentionBackendEnum\.)?(\w+)(?: attention)? backend", log)
    backends = list(dict.fromkeys(b for b in backends if b.isupper()))
    unsaid = [b for b in backends if b not in said]
    return {
        "agree": (untold or started is not fails) and not (started and unsaid),
        "check_seconds": round(seconds, 2),
        "gpus": report["gpus"],
        "exit_code": report["exit_code"],
        "check_against": [f"{f['id']}: {f['fact']}" for f in against],
        "check_memory": [f["fact"] for f in report["findings"] if f["id"].startswith("memory-")],
        "check_attention": [f["fact"] for f in report["findings"] if "attention" in f["id"]],
        "started": started,
        "backends": backends,
        "backends_not_said": unsaid,
        "log": [
            found.group(0)[:300]
            for pattern in (
                r"Model loading took [^\n]*",
                r"Available KV cache memory[^\n]*",
                r"GPU KV cache size[^\n]*",
                r"[^\n]*cudagraph_mode[^\n]{0,200}",
            )
            for found in list(re.finditer(pattern, log))[:2]
        ],
        "errors": [
            line[-300:]
            for line in dict.fromkeys(log.splitlines())
            if not started and re.search(r"\w(Error|Exception):", line)
        ][:4],
    }


if __name__ == "__main__":
    sys.exit(main())
