# SPDX-License-Identifier: Apache-2.0
"""The plugin's forward pass of a drafter, against the release's own module and the reference.

Every drafter of `tests/assets/variants.py` is loaded by the release and run by both in float32 on
given hidden states (see `forward_probe.py`): with the release's attention layer, which is replaced
there, with embeddings in the place of token ids, by the paged kernels alone, and as the class that
the V2 runner gets.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.assets import variants
from tests.reference.drafter import load_drafter
from tests.reference.layers import KvCache, causal_visibility
from tests.reference.target import Target, load_target

from . import harness, test_drafters
from .conftest import Offline, expected_counts
from .matrix import scenario
from .test_drafters import joined

FORWARD = scenario("drafter forward")
PROBE = Path(__file__).with_name("forward_probe.py")
NAMES = sorted(variants.VARIANTS)
TOKENS = 18  # The interpreter takes its time.

Outcome = dict[str, Any]


def token_ids() -> torch.Tensor:
    return test_drafters.token_ids()[:TOKENS]


def hidden_states(count: int, width: int) -> torch.Tensor:
    return test_drafters.hidden_states(count, width)[:TOKENS]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(harness.TARGET)


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, target: Target
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("forward")
    jobs = []
    for name in NAMES:
        count = joined(name)
        inputs = folder / f"inputs-{count}.pt"
        states = hidden_states(count, target.config["hidden_size"])
        torch.save({"token_ids": token_ids(), "hidden_states": states}, inputs)
        drafter = variants.write_variant(name, folder / name)
        jobs.append({"target": str(harness.TARGET), "drafter": str(drafter), "inputs": str(inputs)})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    outputs = folder / "outputs.pt"
    plugins = f"{harness.PLUGIN},{harness.SHIM_PLUGINS}"
    result = subprocess.run(
        [sys.executable, str(PROBE), str(folder / "jobs.json"), str(outputs)],
        env=harness.environment(cache, VLLM_PLUGINS=plugins, TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    loaded: dict[str, Any] = torch.load(outputs)
    return loaded


@pytest.fixture
def outcome(outcomes: dict[str, Any], name: str) -> Outcome:
    found = outcomes[name]
    assert isinstance(found, dict), found
    return found


def agree(got: Outcome, wanted: Outcome, keys: tuple[str, ...], tokens: int = TOKENS) -> None:
    for key in keys:
        torch.testing.assert_close(
            got[key], wanted[key][:tokens], atol=1e-4, rtol=1e-4, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("name", NAMES)
@FORWARD
def test_it_is_the_release_s_own_pass(outcome: Outcome) -> None:
    agree(outcome["ours"], outcome["stock"], ("combined", "for_head", "for_next"))
    assert outcome["facts"][:3] == [outcome["widths"][1], outcome["widths"][0], 1]


@pytest.mark.parametrize("name", NAMES)
@FORWARD
def test_embeddings_in_place_of_ids(outcome: Outcome) -> None:
    agree(outcome["embeds"], outcome["stock"], ("for_head", "for_next"))


@pytest.mark.parametrize("name", NAMES)
@FORWARD
def test_by_the_paged_kernels(outcome: Outcome) -> None:
    tokens = len(outcome["paged"]["for_head"])
    agree(outcome["paged"], outcome["stock"], ("for_head", "for_next"), tokens)


@pytest.mark.parametrize("name", NAMES)
@FORWARD
def test_the_greedy_token(outcome: Outcome) -> None:
    if outcome["ids"] is None:
        pytest.skip("it has no head of its own, and the target is not loaded here")
    assert torch.equal(outcome["ids"]["ours"], outcome["ids"]["stock"])
    assert outcome["ids"]["ours"].dtype == torch.int64


@pytest.mark.parametrize("name", NAMES)
@FORWARD
def test_it_is_what_the_reference_computes(
    name: str, outcome: Outcome, target: Target, tmp_path: Path
) -> None:
    drafter = load_drafter(variants.write_variant(name, tmp_path / name), target)
    states = hidden_states(joined(name), target.config["hidden_size"])
    with torch.inference_mode():
        combined = drafter.combine(states) if variants.VARIANTS[name].aux_layer_ids else states
        _, hidden = drafter(
            token_ids(), combined, torch.arange(TOKENS), KvCache(), causal_visibility(TOKENS, 0)
        )
    torch.testing.assert_close(outcome["ours"]["for_next"], hidden, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
@FORWARD
def test_a_position_limit(outcome: Outcome) -> None:
    assert outcome["clamped"]


@pytest.mark.parametrize("name", NAMES)
@FORWARD
def test_the_class_of_the_v2_runner(outcome: Outcome) -> None:
    fused = outcome["fused"]
    agree(fused, outcome["stock"], ("combined", "for_head", "for_next"))
    assert not fused["without a cache"]
    assert fused["with one"]
    assert not fused["a large pass"]
    assert not fused["piecewise"]
    if outcome["ids"] is not None:
        assert torch.equal(fused["ids"], outcome["ids"]["stock"])


DRAFTERS = [
    pytest.param(harness.LLAMA_DRAFTER, id="llama"),
    pytest.param(harness.MLA_DRAFTER, id="mla", marks=scenario("mla drafter")),
]


@scenario("drafter forward: V2 runner")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_in_an_engine_on_the_v2_runner(
    offline: Offline, expected: dict[str, Any], drafter: Path
) -> None:
    run = offline(
        f"forward-{drafter.name}",
        drafter=drafter,
        mla=drafter == harness.MLA_DRAFTER,
        probe=True,
        env=harness.V2_RUNNER,
        additional_config={"kimi_eagle3": {"drafting": True}},
    )
    assert run.tokens == expected["output_token_ids"]
    assert run.counts == expected_counts(drafter)
    assert "vllm_kimi_eagle3.models.fused_drafter._Fused" in run.worker["drafter"]
    assert run.log.count("run on the plugin's kernels inside vLLM's graphs") == 1
