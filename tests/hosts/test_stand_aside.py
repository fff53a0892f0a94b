# SPDX-License-Identifier: Apache-2.0
"""What is in place where: from 0.18 on the model classes are upstream's."""

from __future__ import annotations

from .harness import Run
from .matrix import scenario


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
