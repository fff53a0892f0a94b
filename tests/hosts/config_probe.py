# SPDX-License-Identifier: Apache-2.0
"""Makes engine configurations without starting an engine, and says how each attempt ended.

    python config_probe.py JOBS.json RESULTS.json

A job has `target`, `speculative` and, optionally, `first`: what to do before, `register` (call the
plugin's entry point by hand, three times) or `revert` (take its patches back).
"""

from __future__ import annotations

import copy
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
            trust_remote_code=True,
            enforce_eager=True,
            speculative_config=job["speculative"],
            **{"max_model_len": 128, **job.get("extra", {})},
        ).create_engine_config()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines()]
        return {"type": type(error).__name__, "message": lines[1] if len(lines) > 1 else lines[0]}
    from vllm.model_executor.model_loader.utils import get_model_cls

    # As it arrives in the engine core and in the workers.
    config = pickle.loads(pickle.dumps(config))
    hf_config = config.model_config.hf_config
    cls = get_model_cls(config.model_config)
    asked = {question: ANSWERS[question](config) for question in job.get("ask", [])}
    return {
        **asked,
        "method": config.speculative_config.method,
        "target_class": f"{cls.__module__}:{cls.__name__}",
        "image_token_index": getattr(hf_config, "image_token_index", None),
        "own_image_token_index": "image_token_index" in vars(hf_config),
    }


def layer_choices(config: Any) -> dict[str, Any]:
    """What the target's class says of choices of layers, without a model being built.

    The decoder is a stand-in that has only what the methods read.
    """
    from types import SimpleNamespace

    from vllm_kimi_eagle3.models import aux_hidden_states
    from vllm_kimi_eagle3.models.aux_hidden_states import DeepseekV2Model, Eagle3Target

    decoder = SimpleNamespace(
        config=config.model_config.hf_config.text_config,
        _keyed_configs=(),
    )

    class Target(Eagle3Target):
        def _decoder(self) -> Any:
            return decoder

    decoder.choose_aux_hidden_state_layers = lambda layers: (
        DeepseekV2Model.choose_aux_hidden_state_layers(decoder, layers)
    )
    target = Target()
    said: dict[str, Any] = {}
    for pipeline_stages, layers in (
        (1, (0, 4, 8)),
        (1, (2, 9)),
        (1, (-1,)),
        (1, ("2",)),
        (2, (2,)),
    ):
        group = SimpleNamespace(world_size=pipeline_stages)
        aux_hidden_states.get_pp_group = lambda group=group: group
        try:
            target.set_aux_hidden_state_layers(layers)
            said[f"{layers} on {pipeline_stages}"] = list(decoder.aux_hidden_state_layers)
        except ValueError as error:
            said[f"{layers} on {pipeline_stages}"] = str(error)
    said["default"] = [
        list(target.get_eagle3_aux_hidden_state_layers()),
        list(target.get_eagle3_default_aux_hidden_state_layers()),
    ]
    return said


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
        keys.append(copy.deepcopy(config.additional_config).compute_hash())
    return keys


def image_placeholder(config: Any) -> int:
    """The token that the target itself takes for an image."""
    return config.model_config.hf_config.media_placeholder_token_id


def drafter_decisions(config: Any) -> dict[str, Any]:
    """What the plugin decided, as the workers see it; none for another model's drafter."""
    draft = config.speculative_config.draft_model_config
    hf_config = draft.hf_config
    return {
        "decisions": getattr(hf_config, "kimi_eagle3", None),
        "aux_layers": getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None),
        "max_model_len": draft.max_model_len,
        "rope_parameters": getattr(hf_config, "rope_parameters", None),
    }


ANSWERS = {
    "drafter_decisions": drafter_decisions,
    "compile_keys": compile_keys,
    "layer_choices": layer_choices,
    "image_placeholder": image_placeholder,
}


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    import torch

    # What a call that needs CUDA comes through; a CPU build of torch would refuse it anyway.
    initialised: list[str] = []
    torch.cuda._lazy_init = lambda: initialised.append("called")
    results = [attempt(job) for job in jobs]

    facts = {
        "cuda_initialised": initialised,
        "models_imported": sorted(
            m for m in sys.modules if m.startswith("vllm_kimi_eagle3.models.")
        ),
    }
    Path(sys.argv[2]).write_text(json.dumps({"results": results, **facts}))


if __name__ == "__main__":
    main()
