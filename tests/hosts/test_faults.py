# SPDX-License-Identifier: Apache-2.0
"""What stock does with Kimi-K2.5 + EAGLE-3 on the releases that get the backport.

Three refusals in a row, each seen only when the one before it is out of the way. The plugin is not
loaded (`VLLM_PLUGINS` lets only the shim through): one process tries three times, and after each
refusal the plugin's patch for just that one is put in place by hand, so that the next is stock's
own, raised by stock's code. The third is a check of `GPUModelRunner.load_model`, which the CPU
runner replaces; the shim lets the GPU runner's method run and holds no copy of it.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from . import harness
from .conftest import RunJobs
from .matrix import scenario

pytestmark = scenario("faults")

FIRST, SECOND, THIRD, NONE = range(4)


@pytest.fixture(scope="module")
def refusals(run_jobs: RunJobs) -> list[dict[str, Any]]:
    """What the three attempts ended with."""
    engine = harness.engine_arguments(drafter=harness.LLAMA_DRAFTER)
    jobs = [
        {"engine": engine, "prompts": [], "max_tokens": 1, "install_patches": patches}
        for patches in ([], ["whitelist"], ["image-token"])
    ]
    # One process, so that what is patched by hand in it is patched for the engine.
    env = {"VLLM_PLUGINS": harness.SHIM_PLUGINS, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    run = run_jobs("faults", jobs, env=env)
    assert len(run.results) == len(jobs), run.tail()
    return run.results


def test_first_the_whitelist(refusals: list[dict[str, Any]]) -> None:
    message = refusals[FIRST]["error"]["message"]
    assert re.search(r"[Ee]agle3 is only supported for \['llama', 'qwen', 'minicpm', ", message)
    config = json.loads((harness.TARGET / "config.json").read_text())
    got = f"hf_text_config.model_type={config['text_config']['model_type']!r}"
    assert f" models. Got self.target_model_config.{got}" in message


def test_then_the_image_token(refusals: list[dict[str, Any]]) -> None:
    assert refusals[SECOND]["error"] == {
        "type": "AttributeError",
        "message": "'KimiK25Config' object has no attribute 'image_token_index'",
    }
    # Raised in Transformers' `__getattribute__`, asked by the proposer.


@scenario("faults: the interface")
def test_then_the_missing_interface(refusals: list[dict[str, Any]]) -> None:
    assert refusals[THIRD]["error"] == {
        "type": "RuntimeError",
        "message": "Model does not support EAGLE3 interface but "
        "aux_hidden_state_outputs was requested",
    }
    assert refusals[THIRD]["raised_in"].endswith("vllm/v1/worker/gpu_model_runner.py")


@scenario("faults: the bare language model")
def test_then_the_bare_language_model(refusals: list[dict[str, Any]]) -> None:
    assert refusals[THIRD]["error"] == {
        "type": "AttributeError",
        "message": "'DeepseekV2Model' object has no attribute 'model'",
    }
