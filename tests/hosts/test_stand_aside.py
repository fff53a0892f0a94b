# SPDX-License-Identifier: Apache-2.0
"""What is in place where: from 0.18 on the model classes are upstream's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from . import harness
from .harness import Run
from .matrix import BACKPORT, scenario


@scenario("stand aside")
def test_no_model_class_of_ours_in_any_process(with_llama: Run) -> None:
    assert with_llama.tokens
    assert any("EngineCore" in process for process in with_llama.imports)
    for process, modules in with_llama.imports.items():
        assert [m for m in modules if m.startswith("vllm_kimi_eagle3.models")] == [], process
    assert not [m for m in with_llama.worker["plugin_modules"] if ".models" in m]


@scenario("stand aside")
def test_registry_and_classes_are_upstreams(with_llama: Run) -> None:
    for name, (module, _) in with_llama.worker["registered"].items():
        assert module is None or module.startswith("vllm."), name
    for model in ("target", "drafter"):
        assert not [c for c in with_llama.worker[model] if c.startswith("vllm_kimi_eagle3")]


@scenario("backport classes")
def test_classes_keep_upstreams_names(with_llama: Run) -> None:
    target = with_llama.worker["target"]
    assert target[0].startswith("vllm_kimi_eagle3.models.")
    assert target[0].rpartition(".")[2] == "KimiK25ForConditionalGeneration"
    assert "vllm.model_executor.models.kimi_k25.KimiK25ForConditionalGeneration" in target
    assert "vllm.model_executor.models.interfaces.SupportsEagle3" in target


@scenario("status")
def test_status_agrees(tmp_path: Path) -> None:
    """`vllm-kimi-eagle3 status --json` in a fresh process."""
    program = Path(sys.executable).with_name("vllm-kimi-eagle3")
    answer = subprocess.run(
        [str(program), "status", "--json"],
        cwd=tmp_path,
        env=harness.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    status = json.loads(answer.stdout)
    assert status["host"]["version"].startswith(harness.host_release())
    assert status["complete"]
    applied = {patch["id"] for patch in status["patches"] if patch["state"] == "applied"}
    expected = {"drafter-folder"}
    if harness.host_release() in BACKPORT:
        expected |= {
            "image-token",
            "target-interface",
            "kimi-k2-config",
            "mla-drafter",
            "whitelist",
        }
    if harness.host_release() == "0.15.1":
        expected |= {"bare-language-model"}
    assert applied == expected
