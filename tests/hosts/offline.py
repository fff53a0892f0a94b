# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in one process: `python offline.py JOBS.json RESULTS.json` (see `harness.py`).

JOBS is a list; each job starts an engine, generates, and adds its result to the list in RESULTS:

- `engine`: keyword arguments of `vllm.LLM`;
- `prompts`: lists of token ids; `max_tokens`: for each, end of sequence ignored;
- `afterwards`: further prompts, `{"text": ..., "png": base64 or absent}`, which are generated for
  once the counters have been read, one at a time, so that they do not count;
- `install_patches`: ids of the plugin's patches to put in place by hand before the engine starts;
- `probe`: also report what is in the worker process.

A result has `tokens`, the `spec_decode` counters and `seconds`, or, if the engine did not start,
`error` (its type and message) and `raised_in` (a file). Standard library only at the top, because
`spawn` imports this file again in each of the engine's processes.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PREFIX = "vllm:spec_decode_"

if os.environ.get("TRITON_CPU_STAND_IN") == "1":
    # vLLM's V2 runner wants a Triton with a CPU back-end, which no registry has. With
    # TRITON_INTERPRET=1 none is called: its name in Triton's table is enough. Here, at the top,
    # because vLLM looks while it is imported, in each of the engine's processes.
    import triton.backends

    triton.backends.backends.setdefault("cpu", triton.backends.backends["nvidia"])


def main(jobs_path: str, results_path: str) -> None:
    results = []
    for job in json.loads(Path(jobs_path).read_text()):
        results.append(run(job))
        Path(results_path).write_text(json.dumps(results))
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            clean_up()


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One job's result."""
    started = time.monotonic()
    from vllm import LLM, SamplingParams

    for patch_id in job.get("install_patches", []):
        install_patch(patch_id)
    imported = time.monotonic()
    try:
        llm = LLM(**job["engine"])
    except Exception as error:
        clean_up()
        return {
            "error": {"type": type(error).__name__, "message": str(error)},
            "raised_in": traceback.extract_tb(error.__traceback__)[-1].filename,
        }
    ready = time.monotonic()
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    result: dict[str, Any] = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "spec_decode": spec_decode_counters(llm),
        "afterwards": [],
        "seconds": {
            "import": round(imported - started, 1),
            "start": round(ready - imported, 1),
            "generate": round(time.monotonic() - ready, 1),
        },
    }
    for prompt in job.get("afterwards", []):
        (output,) = llm.generate([to_prompt(llm, prompt)], sampling, use_tqdm=False)
        answer = {"tokens": list(output.outputs[0].token_ids), "text": output.outputs[0].text}
        result["afterwards"].append({**answer, "num_prompt_tokens": len(output.prompt_token_ids)})
    if job.get("probe"):
        result["workers"] = llm.collective_rpc(probe_worker)
    return result


def to_prompt(llm: Any, prompt: dict[str, str]) -> dict[str, Any]:
    """A prompt of a text and perhaps an image: as token ids, which 0.15 insists on."""
    token_ids = llm.get_tokenizer().encode(prompt["text"], add_special_tokens=False)
    if "png" not in prompt:
        return {"prompt_token_ids": token_ids}
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(prompt["png"]))).convert("RGB")
    chunk = {"type": "image", "image": image, "uuid": None}
    return {"prompt_token_ids": token_ids, "multi_modal_data": {"vision_chunk": [chunk]}}


def spec_decode_counters(llm: Any) -> dict[str, Any]:
    """The `vllm:spec_decode_*` counters without their prefix; empty without speculation."""
    return {
        metric.name.removeprefix(PREFIX): getattr(metric, "values", None) or metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(PREFIX)
    }


def clean_up() -> None:
    """After an engine in this process failed: what the next one would stumble over."""
    import gc

    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.collect()


def install_patch(patch_id: str) -> None:
    """Put one of the plugin's patches in place, without what the plugin's own rules say of it."""
    from vllm_kimi_eagle3.patches import PATCHES

    (patch,) = (patch for patch in PATCHES if patch.id == patch_id)
    patch.install()
    assert patch.verify(), patch_id


def probe_worker(worker: Any) -> dict[str, Any]:
    """Runs in the worker: what serves the target and the drafter, and the compile-cache keys."""
    import sys

    from vllm import envs
    from vllm.model_executor.models import ModelRegistry

    def describe(model: Any) -> list[str]:
        return [f"{cls.__module__}.{cls.__qualname__}" for cls in type(model).__mro__]

    def decoder_config_hash(model: Any) -> str | None:
        """The hash that the decoder's compiled graph is cached by; None if it has none."""
        for module in model.modules():
            config = getattr(module, "vllm_config", None)
            if type(module).__name__ in ("DeepseekV2Model", "LlamaModel") and config is not None:
                return config.compute_hash()
        return None

    def shares(drafter: Any, target: Any) -> dict[str, bool]:
        """Which of its layers the drafter has in common with the target."""
        of_target = {id(module) for module in target.modules()}
        layers = {
            "embed_tokens": getattr(getattr(drafter, "model", None), "embed_tokens", None),
            "lm_head": getattr(drafter, "lm_head", None),
        }
        return {name: id(layer) in of_target for name, layer in layers.items()}

    runner = worker.model_runner
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    registered = {
        name: [getattr(entry, "module_name", None), getattr(entry, "class_name", None)]
        for name, entry in ModelRegistry.models.items()
    }
    return {
        "target": describe(runner.model),
        "drafter": describe(drafter.model) if drafter is not None else None,
        "shared": shares(drafter.model, runner.model) if drafter is not None else None,
        "runner": describe(runner),
        "registered": registered,
        "config_hash": worker.vllm_config.compute_hash(),
        "decoder_config_hash": decoder_config_hash(runner.model),
        "compile_factors": {k: repr(v) for k, v in envs.compile_factors().items()},
        "plugin_modules": sorted(m for m in sys.modules if m.startswith("vllm_kimi_eagle3")),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
