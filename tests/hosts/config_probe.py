# SPDX-License-Identifier: Apache-2.0
"""Makes engine configurations without starting an engine, and says how each attempt ended.

    python config_probe.py JOBS.json RESULTS.json

A job has `target`, `speculative` and, optionally, `first`: what to do before, `register` (call the
plugin's entry point by hand, three times) or `revert` (take its patches back).
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any


def attempt(job: dict[str, Any]) -> dict[str, Any]:
    """How making the configuration of one job ended."""
    from vllm.engine.arg_utils import EngineArgs

    if job.get("first") == "register":
        from vllm_kimi_eagle3.plugin import register

        for _ in range(3):
            register()
    elif job.get("first") == "revert":
        from vllm_kimi_eagle3.patches import revert

        revert()
    try:
        config = EngineArgs(
            model=job["target"],
            dtype="float32",
            max_model_len=128,
            trust_remote_code=True,
            enforce_eager=True,
            speculative_config=job["speculative"],
            **job.get("extra", {}),
        ).create_engine_config()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines()]
        return {"type": type(error).__name__, "message": lines[1] if len(lines) > 1 else lines[0]}
    from vllm.model_executor.model_loader.utils import get_model_cls

    # As it arrives in the engine core and in the workers.
    config = pickle.loads(pickle.dumps(config))
    hf_config = config.model_config.hf_config
    cls = get_model_cls(config.model_config)
    return {
        "method": config.speculative_config.method,
        "compile_keys": compile_keys(config) if job.get("compile_keys") else None,
        "target_class": f"{cls.__module__}:{cls.__name__}",
        "image_token_index": getattr(hf_config, "image_token_index", None),
        "own_image_token_index": "image_token_index" in vars(hf_config),
    }


def compile_keys(config: Any) -> list[str]:
    """The configuration's hash as it is, then with layers chosen; see the test for which."""
    from vllm_kimi_eagle3.models.aux_hidden_states import add_to_compile_key

    class PlatformConfig:
        def compute_hash(self) -> str:
            return "a platform's"

    keys = [config.compute_hash()]
    for layers in ((2, 4, 5), (3, 5, 6), (2, 4, 5)):
        add_to_compile_key(config, layers)
        keys.append(config.compute_hash())
    config.additional_config = PlatformConfig()
    for layers in ((2, 4, 5), (3, 5, 6), (2, 4, 5)):
        add_to_compile_key(config, layers)
        keys.append(config.compute_hash())
    return keys


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    results = [attempt(job) for job in jobs]
    import torch

    facts = {
        "cuda_initialised": torch.cuda.is_initialized(),
        "models_imported": sorted(
            m for m in sys.modules if m.startswith("vllm_kimi_eagle3.models.")
        ),
    }
    Path(sys.argv[2]).write_text(json.dumps({"results": results, **facts}))


if __name__ == "__main__":
    main()
