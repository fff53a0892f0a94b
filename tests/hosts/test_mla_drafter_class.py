# SPDX-License-Identifier: Apache-2.0
"""The MLA drafter class of the backport, on CPU builds that cannot attend with MLA.

What can run of it there is compared with the reference: the class as vLLM resolves, builds and
loads it, with the attention back-end replaced (see `mla_drafter_probe.py`). The engine around it is
shown with MLA on where the class is upstream's (`test_parity.py`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.assets.variants import copy_drafter
from tests.reference.drafter import load_drafter
from tests.reference.layers import KvCache, causal_visibility
from tests.reference.target import load_target

from . import harness
from .matrix import scenario

pytestmark = scenario("mla drafter: the class")
PROBE = Path(__file__).with_name("mla_drafter_probe.py")
TOKENS = 40


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    """One sequence: tokens, and aux hidden states that need not come from a target."""
    generator = torch.Generator().manual_seed(0)
    width = 3 * load_target(harness.TARGET).config["hidden_size"]
    return {
        "token_ids": torch.randint(20, 500, (TOKENS,), generator=generator),
        "aux_hidden_states": torch.randn(TOKENS, width, generator=generator),
    }


def probe(
    folder: Path, cache: Path, drafter: Path, inputs: dict[str, torch.Tensor]
) -> dict[str, Any] | str:
    """The probe's results, or the end of its output if it failed."""
    torch.save(inputs, folder / "inputs.pt")
    outputs = folder / "outputs.pt"
    command = [sys.executable, PROBE, harness.TARGET, drafter, folder / "inputs.pt", outputs]
    result = subprocess.run(
        [str(part) for part in command],
        env=harness.environment(cache, VLLM_PLUGINS=f"{harness.PLUGIN},{harness.SHIM_PLUGINS}"),
        capture_output=True,
        text=True,
        timeout=harness.START_TIMEOUT,
        check=False,
    )
    if result.returncode:
        return (result.stdout + result.stderr)[-4000:]
    loaded: dict[str, Any] = torch.load(outputs)
    return loaded


@pytest.mark.parametrize(
    "architecture", ["Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"]
)
def test_it_computes_what_the_reference_computes(
    tmp_path: Path, cache: Path, inputs: dict[str, torch.Tensor], architecture: str
) -> None:
    changed = {"architectures": [architecture]}
    folder = copy_drafter(harness.MLA_DRAFTER, tmp_path / "drafter", changed)
    got = probe(tmp_path, cache, folder, inputs)
    assert isinstance(got, dict), got
    assert got["class"][:2] == ["Eagle3DeepseekV2ForCausalLM", "Eagle3LlamaForCausalLM"]
    assert got["has_own"] == [True, True]

    drafter = load_drafter(harness.MLA_DRAFTER, load_target(harness.TARGET))
    with torch.inference_mode():
        logits, hidden = drafter(
            inputs["token_ids"],
            drafter.combine(inputs["aux_hidden_states"]),
            torch.arange(TOKENS),
            KvCache(),
            causal_visibility(TOKENS, 0),
        )
    torch.testing.assert_close(got["hidden_states"], hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got["logits"], logits, atol=1e-4, rtol=1e-4)


def test_a_tensor_without_a_place_stops_the_load(
    tmp_path: Path, cache: Path, inputs: dict[str, torch.Tensor]
) -> None:
    from safetensors.torch import load_file, save_file

    drafter = copy_drafter(harness.MLA_DRAFTER, tmp_path / "drafter")
    (file,) = drafter.glob("*.safetensors")
    tensors = load_file(file)
    tensors["fc_norm.0.weight"] = torch.ones(8)
    save_file(tensors, file)
    output = probe(tmp_path, cache, drafter, inputs)
    assert isinstance(output, str)
    assert "the drafter's checkpoint holds 'fc_norm.0.weight'" in output
