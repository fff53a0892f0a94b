# SPDX-License-Identifier: Apache-2.0
"""The tokens and the acceptance counters of real engines, against the plain-torch reference.

Equal tokens show that speculation is lossless. Equal counters show that the drafter saw the hidden
states it was trained on: a wrong aux layer leaves the output as it is and lowers acceptance only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.assets import variants

from . import harness
from .conftest import IMAGE_CHAT, TEXT_CHAT, Offline, expected_counts
from .harness import LLAMA_DRAFTER, MLA_DRAFTER, Run
from .matrix import BACKPORT, scenario


def assert_parity(run: Run, expected: dict[str, Any], counts: dict[str, Any]) -> None:
    """A run's tokens are the reference's, and so are its counters."""
    assert run.tokens == expected["output_token_ids"]
    assert run.counts == counts


@scenario("parity")
def test_without_speculation(without: Run, expected: dict[str, Any]) -> None:
    assert without.tokens == expected["output_token_ids"]
    assert without.result["spec_decode"] == {}


@scenario("parity")
def test_llama_drafter(with_llama: Run, expected: dict[str, Any]) -> None:
    assert_parity(with_llama, expected, expected_counts(LLAMA_DRAFTER))


@scenario("faults")
def test_none_of_stocks_faults(with_llama: Run) -> None:
    assert with_llama.tokens
    for text in ("agle3 is only supported", "image_token_index", "does not support EAGLE3"):
        assert text not in with_llama.log


@scenario("image")
def test_image_with_speculation(without: Run, with_llama: Run) -> None:
    """Text and image requests give the same tokens with speculation as without."""
    assert with_llama.tokens
    assert with_llama.result["afterwards"] == without.result["afterwards"]
    text, image = without.result["afterwards"]
    assert image["num_prompt_tokens"] > text["num_prompt_tokens"]
    assert image["tokens"] != text["tokens"]
    assert "png" in IMAGE_CHAT
    assert "png" not in TEXT_CHAT


@scenario("mla drafter")
def test_mla_drafter(offline: Offline, expected: dict[str, Any]) -> None:
    run = offline("mla", drafter=MLA_DRAFTER, mla=True, probe=True)
    assert_parity(run, expected, expected_counts(MLA_DRAFTER))


@scenario("shifted aux layers")
@pytest.mark.parametrize("shifted", [(3, 5, 6)], ids=str)
def test_parity_fails_with_shifted_aux_layers(
    host: str,
    offline: Offline,
    with_llama: Run,
    expected: dict[str, Any],
    tmp_path: Path,
    shifted: tuple[int, ...],
) -> None:
    """The test of the test: one layer off gives the same output, and the counters show it."""
    layers = {"eagle_aux_hidden_state_layer_ids": list(shifted)}
    nested = {"eagle_config": {"use_aux_hidden_state": True, **layers}}
    drafter = variants.copy_drafter(LLAMA_DRAFTER, tmp_path / "shifted", nested)
    run = offline("shifted", drafter=drafter, probe=True)
    with pytest.raises(AssertionError):
        assert_parity(run, expected, expected_counts(LLAMA_DRAFTER))
    assert_parity(run, expected, expected_counts(LLAMA_DRAFTER, aux_layer_ids=shifted))
    # The layers are constants in the compiled graph, so its cache has another key.
    keys = [r.worker["decoder_config_hash"] for r in (with_llama, run)]
    assert host not in BACKPORT or keys[0] != keys[1]


@scenario("torch.compile")
def test_compiled(offline: Offline, expected: dict[str, Any]) -> None:
    run = offline("compiled", drafter=LLAMA_DRAFTER, enforce_eager=False)
    assert_parity(run, expected, expected_counts(LLAMA_DRAFTER))


@scenario("shared head")
def test_embedding_and_head_are_the_targets(
    offline: Offline, with_llama: Run, expected: dict[str, Any], tmp_path: Path
) -> None:
    """A drafter without a head of its own drafts with the target's, and has its embedding too."""
    assert with_llama.worker["shared"] == {"embed_tokens": True, "lm_head": False}
    drafter = variants.copy_drafter(
        LLAMA_DRAFTER, tmp_path / "headless", remove=["draft_vocab_size"]
    )
    (file,) = drafter.glob("*.safetensors")
    own = {"lm_head.weight", "d2t", "t2d"}
    save_file({k: v for k, v in load_file(file).items() if k not in own}, file)
    run = offline("headless", drafter=drafter, probe=True)
    assert run.tokens == expected["output_token_ids"]
    assert run.worker["shared"] == {"embed_tokens": True, "lm_head": True}


@scenario("text-only K2")
def test_text_only_k2(offline: Offline, expected: dict[str, Any], tmp_path: Path) -> None:
    target = variants.write_kimi_k2_target(tmp_path / "kimi-k2")
    run = offline("text only", target=target, drafter=LLAMA_DRAFTER)
    assert_parity(run, expected, expected_counts(LLAMA_DRAFTER))


@scenario("tensor parallel")
def test_tensor_parallel(offline: Offline, expected: dict[str, Any]) -> None:
    run = offline("tensor parallel", drafter=LLAMA_DRAFTER, tensor_parallel_size=2)
    assert_parity(run, expected, expected_counts(LLAMA_DRAFTER))


@scenario("v2 runner")
def test_v2_runner(offline: Offline, expected: dict[str, Any]) -> None:
    run = offline("v2", drafter=LLAMA_DRAFTER, probe=True, env=harness.V2_RUNNER)
    assert_parity(run, expected, expected_counts(LLAMA_DRAFTER))
    assert "vllm.v1.worker.gpu.model_runner.GPUModelRunner" in run.worker["runner"]


@scenario("parity")
def test_runner(with_llama: Run) -> None:
    """Which runner the counters above are of."""
    assert "vllm.v1.worker.gpu_model_runner.GPUModelRunner" in with_llama.worker["runner"]
    assert harness.at_least(0, 22) == (
        "vllm_cpu_spec_shim.worker.SpecCPUModelRunner" not in with_llama.worker["runner"]
    )
