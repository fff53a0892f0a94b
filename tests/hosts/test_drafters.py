# SPDX-License-Identifier: Apache-2.0
"""What a real vLLM makes of a drafter's folder, against the reference, for every known variant.

The release's own configuration, registry, loader and layers build and run each drafter of
`tests/assets/variants.py` on given hidden states (see `drafter_probe.py`, which also says what is
replaced: attention). Then the same without the plugin, or on 0.15 to 0.17, where stock has no
EAGLE-3 for Kimi at all, without the patches that these variants are for: each fault is shown
before it is shown to be gone. Which layers the runners capture is read from the same runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from tests.assets import variants
from tests.reference.drafter import load_drafter
from tests.reference.layers import KvCache, causal_visibility
from tests.reference.target import Target, load_target
from vllm_kimi_eagle3.checkpoint.drafter_class import drafter_class

from . import harness
from .faults import CAPTURE_FAULTS, FAULTS, NEWER_LAYOUT, hits
from .matrix import BACKPORT, scenario

pytestmark = scenario("drafters")
PROBE = Path(__file__).with_name("drafter_probe.py")
TOKENS = 40
NAMES = sorted(variants.VARIANTS)

# Leaving these out on 0.15 to 0.17 leaves what starts EAGLE-3 there.
RIGHT_TENSORS = (
    "aux-layers",
    "drafter-rope",
    "yarn-magnitude",
    "drafter-positions",
    "drafter-tensors",
    "draft-vocabulary",
    "head-sharing",
    "eagle31-drafter",
)

Outcome = dict[str, Any] | str


def joined(name: str) -> int:
    """How many hidden states the drafter joins; the one final hidden state counts as one."""
    return len(variants.VARIANTS[name].aux_layer_ids) or 1


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(harness.TARGET)


def token_ids() -> torch.Tensor:
    return torch.randint(20, 500, (TOKENS,), generator=torch.Generator().manual_seed(0))


def hidden_states(count: int, width: int) -> torch.Tensor:
    """Hidden states that need not come from a target."""
    return torch.randn(TOKENS, count * width, generator=torch.Generator().manual_seed(count))


@pytest.fixture(scope="module")
def probe(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, target: Target
) -> Callable[[list[str], dict[str, str]], dict[str, Outcome]]:
    """Runs the probe over variants in one process, in a given environment."""

    def run(names: list[str], env: dict[str, str]) -> dict[str, Outcome]:
        folder = tmp_path_factory.mktemp("probe")
        jobs = []
        for name in names:
            count = joined(name)
            inputs = folder / f"inputs-{count}.pt"
            states = hidden_states(count, target.config["hidden_size"])
            torch.save({"token_ids": token_ids(), "hidden_states": states}, inputs)
            drafter = variants.write_variant(name, folder / name)
            jobs.append(
                {"target": str(harness.TARGET), "drafter": str(drafter), "inputs": str(inputs)}
            )
        (folder / "jobs.json").write_text(json.dumps(jobs))
        outputs = folder / "outputs.pt"
        result = subprocess.run(
            [sys.executable, str(PROBE), str(folder / "jobs.json"), str(outputs)],
            env=harness.environment(cache, **env),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
        outcomes: dict[str, Outcome] = torch.load(outputs)
        return outcomes

    return run


@pytest.fixture(scope="module")
def with_plugin(probe: Any) -> dict[str, Outcome]:
    return probe(NAMES, {"VLLM_PLUGINS": f"{harness.PLUGIN},{harness.SHIM_PLUGINS}"})


@pytest.fixture(scope="module")
def without(probe: Any, host: str) -> dict[str, Outcome]:
    """vLLM without the patches."""
    if host not in BACKPORT:
        return probe(NAMES, {"VLLM_PLUGINS": harness.SHIM_PLUGINS})
    plugins = f"{harness.PLUGIN},{harness.SHIM_PLUGINS}"
    return probe(
        NAMES, {"VLLM_PLUGINS": plugins, "VLLM_KIMI_EAGLE3_DISABLE": ",".join(RIGHT_TENSORS)}
    )


def difference(name: str, outcome: Outcome, target: Target, folder: Path) -> str | None:
    """How an outcome differs from what the reference computes; None if it does not."""
    if isinstance(outcome, str):
        return outcome
    drafter = load_drafter(variants.write_variant(name, folder / name), target)
    states = hidden_states(joined(name), target.config["hidden_size"])
    with torch.inference_mode():
        combined = drafter.combine(states) if variants.VARIANTS[name].aux_layer_ids else states
        logits, hidden = drafter(
            token_ids(), combined, torch.arange(TOKENS), KvCache(), causal_visibility(TOKENS, 0)
        )
    if outcome["logits"] is not None:
        got = outcome["logits"][:, drafter.draft_to_target]
        if not torch.allclose(got, logits, atol=1e-3, rtol=1e-3):
            return f"logits differ by up to {(got - logits).abs().max().item():.3g}"
        others = outcome["logits"].shape[-1] - len(drafter.draft_to_target)
        if others and outcome["logits"].isneginf().sum().item() != others * TOKENS:
            return "tokens that the drafter does not know have a score"
    if not torch.allclose(outcome["hidden_states"], hidden, atol=1e-3, rtol=1e-3):
        off = (outcome["hidden_states"] - hidden).abs().max().item()
        return f"hidden states for the next draft step differ by up to {off:.3g}"
    return None


@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_the_reference_computes(
    name: str, with_plugin: dict[str, Outcome], target: Target, tmp_path: Path
) -> None:
    assert difference(name, with_plugin[name], target, tmp_path) is None


@pytest.mark.parametrize("name", NAMES)
def test_both_runners_capture_what_it_was_trained_on(
    name: str, with_plugin: dict[str, Outcome]
) -> None:
    outcome = with_plugin[name]
    assert isinstance(outcome, dict), outcome
    trained_on = variants.VARIANTS[name].aux_layer_ids or None
    assert set(outcome["captured"].values()) == {trained_on}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_quantised(name: str, with_plugin: dict[str, Outcome]) -> None:
    outcome = with_plugin[name]
    assert isinstance(outcome, dict), outcome
    assert all(method.startswith("Unquantized") for method in outcome["linear_methods"])


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_the_fault_without_the_patches(
    name: str, without: dict[str, Outcome], target: Target, tmp_path: Path, host: str
) -> None:
    wrong = difference(name, without[name], target, tmp_path)
    if hits(FAULTS[name], host):
        assert wrong is not None
    else:
        assert wrong is None, "this release is thought to have no fault here"


@pytest.mark.parametrize("name", sorted(NEWER_LAYOUT))
def test_the_fault_of_the_newer_layout(
    name: str, without: dict[str, Outcome], target: Target, tmp_path: Path, host: str
) -> None:
    older = Version(metadata.version("transformers")) < Version("5")
    wrong = difference(name, without[name], target, tmp_path)
    assert (wrong is not None) == (older or hits(NEWER_LAYOUT[name], host))


@pytest.mark.parametrize("name", sorted(CAPTURE_FAULTS))
def test_the_wrong_layers_without_the_patches(
    name: str, without: dict[str, Outcome], host: str
) -> None:
    outcome = without[name]
    assert isinstance(outcome, dict), outcome
    default = (2, 4, 5)
    for runner, got in outcome["captured"].items():
        ranges = CAPTURE_FAULTS[name].get(runner, [])
        right = (got or default) == variants.VARIANTS[name].aux_layer_ids
        assert right == (not hits(ranges, host)), (runner, got)


def test_a_drafter_that_lacks_nothing_is_served_by_the_stock_class(
    with_plugin: dict[str, Outcome], host: str
) -> None:
    outcome = with_plugin["llama-aux-output-nested"]
    assert isinstance(outcome, dict), outcome
    assert outcome["module"] == "vllm.model_executor.models.llama_eagle3"


CLASSES = """
import json
from dataclasses import asdict, replace
from vllm_kimi_eagle3.patches.drafter_tensors import head_takes_quantization
from vllm_kimi_eagle3.patches.eagle31_drafter import class_of
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
try:
    from vllm.model_executor.models.deepseek_eagle3 import Eagle3DeepseekV2ForCausalLM
except ImportError:
    from vllm_kimi_eagle3.models.kimi_mla_drafter import Eagle3DeepseekV2ForCausalLM
found = {"llama": Eagle3LlamaForCausalLM, "mla": Eagle3DeepseekV2ForCausalLM}
for name, cls in found.items():
    does = replace(class_of(cls), quantized_head=head_takes_quantization(name))
    print(json.dumps([name, asdict(does)]))
"""


def test_the_classes_do_what_is_known_of_their_release(host: str, cache: Path) -> None:
    """`check` goes by the release, the plugin by the class itself."""
    result = subprocess.run(
        [sys.executable, "-c", CLASSES],
        env=harness.environment(cache, VLLM_PLUGINS="none"),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('["')]
    assert len(lines) == 2, (result.stdout + result.stderr)[-4000:]
    for name, does in lines:
        assert does == asdict(drafter_class(name, Version(host)))


def test_the_mla_class_of_the_backport(with_plugin: dict[str, Outcome], host: str) -> None:
    outcome = with_plugin["mla-aux-output-nested"]
    assert isinstance(outcome, dict), outcome
    if host in BACKPORT:
        assert outcome["class"][:2] == ["Eagle3DeepseekV2ForCausalLM", "Eagle3LlamaForCausalLM"]
        assert outcome["module"] == "vllm_kimi_eagle3.models.kimi_mla_drafter"
    else:
        assert outcome["module"] == "vllm.model_executor.models.deepseek_eagle3"


def test_it_drafts_as_far_as_the_target_goes(with_plugin: dict[str, Outcome]) -> None:
    """max_position_embeddings is 64 here, and the target's context is 512."""
    for name in ("llama-short", "mla-short"):
        outcome = with_plugin[name]
        assert isinstance(outcome, dict), outcome
        assert outcome["max_model_len"] == 512
