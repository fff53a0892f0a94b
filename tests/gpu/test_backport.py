# SPDX-License-Identifier: Apache-2.0
"""The backport on a GPU: bfloat16, MLA back-ends, torch.compile and CUDA graphs.

    python -m pytest tests/gpu        # beside a stock CUDA vLLM 0.15 to 0.17, with the plugin

Not part of CI, which has no GPU. In bfloat16 an argmax can tip over where two logits are close, and
does so from run to run, as the batches' sizes differ. So outputs may part where the float32
reference has a near tie between just these two tokens, and nowhere else, and the counts lie within
a few drafts of the reference's. The tiny target's head sizes are none that TRITON_MLA's prefill
takes on Hopper, so the back-end is the one that vLLM chooses.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.assets.variants import (
    copy_drafter,
    expected_run,
    expected_variant,
    load_expected,
    load_prompts,
    write_variant,
    wrong_variant,
)
from tests.hosts.harness import LLAMA_DRAFTER, MLA_DRAFTER, TARGET, Run, run_offline

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Of the reference's drafts; a shifted aux layer makes a difference several times as large.
TOLERANCE = 0.03
# In logits. The smallest difference between the two best along the reference's outputs is 0.12.
NEAR_TIE = 0.5


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def engine(folder: Path, cache: Path, drafter: Path | None = None, **extra: Any) -> Run:
    """One engine over the prompts of `expected.json`, compiled and with CUDA graphs."""
    arguments: dict[str, Any] = {
        "model": str(TARGET),
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "trust_remote_code": True,
        "disable_log_stats": False,
        "seed": 0,
        "gpu_memory_utilization": 0.2,
        **extra,
    }
    if drafter is not None:
        speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3}
        arguments["speculative_config"] = speculative
    job = {
        "engine": arguments,
        "prompts": [prompt["token_ids"] for prompt in load_prompts()],
        "max_tokens": load_expected()["max_tokens"],
    }
    environment = {
        **os.environ,
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    return run_offline([job], environment, folder)


@pytest.fixture(scope="session")
def without(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Run:
    """The target alone."""
    return engine(tmp_path_factory.mktemp("without"), cache)


def assert_same_or_tied(tokens: list[list[int]], others: list[list[int]]) -> None:
    """Two runs' outputs are equal, or part at a near tie of the reference."""
    from tests.reference.target import load_target

    for prompt, ours, theirs in zip(load_prompts(), tokens, others, strict=True):
        if ours == theirs:
            continue
        at = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        known = torch.tensor(prompt["token_ids"] + ours[:at])
        best = load_target(TARGET)(known).logits[-1].topk(2)
        assert {ours[at], theirs[at]} == set(best.indices.tolist()), (at, ours, theirs)
        assert best.values[0] - best.values[1] < NEAR_TIE


def assert_counts(run: Run, drafter: Path, aux_layer_ids: tuple[int, ...] = (2, 4, 5)) -> None:
    assert_drafts(run, expected_run(drafter.name, 3, aux_layer_ids)["num_drafts"])


def assert_drafts(run: Run, wanted: int) -> None:
    assert abs(run.counts["num_drafts"] - wanted) <= TOLERANCE * wanted, (run.counts, wanted)


def reference_share(run: Run) -> str:
    """How many outputs are the float32 reference's, as a whole."""
    pairs = list(zip(run.tokens, load_expected()["output_token_ids"], strict=True))
    return f"{sum(ours == reference for ours, reference in pairs)} of {len(pairs)}"


@pytest.mark.parametrize("drafter", [LLAMA_DRAFTER, MLA_DRAFTER], ids=lambda path: path.name)
def test_speculation_is_lossless_and_accepted(
    tmp_path: Path, cache: Path, without: Run, drafter: Path
) -> None:
    run = engine(tmp_path, cache, drafter)
    print(drafter.name, run.counts, "equal to the reference:", reference_share(run))
    assert_same_or_tied(run.tokens, without.tokens)
    assert_counts(run, drafter)
    # A second start loads what the first one compiled.
    warm = engine(tmp_path / "warm", cache, drafter)
    assert_same_or_tied(warm.tokens, run.tokens)
    assert_counts(warm, drafter)
    assert "Directly load" in warm.log


def test_another_choice_of_layers_is_not_served_from_the_cache(
    tmp_path: Path, cache: Path, without: Run
) -> None:
    """The artefacts of layers (2, 4, 5) are in the cache; (3, 5, 6) must not load them."""
    counts = []
    for name, layers in (("first", (2, 4, 5)), ("second", (3, 5, 6))):
        changed = {"eagle_aux_hidden_state_layer_ids": list(layers)}
        drafter = copy_drafter(
            LLAMA_DRAFTER, tmp_path / name / "drafter", changed, remove=["eagle_config"]
        )
        run = engine(tmp_path / name, cache, drafter)
        assert_same_or_tied(run.tokens, without.tokens)
        assert_counts(run, LLAMA_DRAFTER, layers)
        counts.append(run.counts)
    assert counts[0] != counts[1]


def test_embedding_and_last_output(tmp_path: Path, cache: Path, without: Run) -> None:
    layers = (0, 4, 8)
    changed = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    drafter = copy_drafter(LLAMA_DRAFTER, tmp_path / "drafter", changed, remove=["eagle_config"])
    run = engine(tmp_path, cache, drafter)
    assert_same_or_tied(run.tokens, without.tokens)
    assert_counts(run, LLAMA_DRAFTER, layers)


# What the plugin completes or puts right outside the compiled decoder, with a drafter of each kind.
VARIANTS = ("mla-eagle31-nested", "mla-norm-before-fc", "llama-eagle31", "llama-four-aux-top")
VARIANTS += ("mla-no-head", "llama-yarn", "mla-plain-rope-5x")


@pytest.mark.parametrize("name", VARIANTS)
def test_drafter_variants(tmp_path: Path, cache: Path, without: Run, name: str) -> None:
    run = engine(tmp_path, cache, write_variant(name, tmp_path / name))
    wanted = expected_variant(name)["num_drafts"]
    wrong = {way: row["num_drafts"] for way, row in wrong_variant(name).items()}
    print(name, run.counts, "reference:", wanted, "wrong ways:", wrong)
    assert_same_or_tied(run.tokens, without.tokens)
    assert_drafts(run, wanted)


def test_training_data_is_the_references_hidden_states(tmp_path: Path, cache: Path) -> None:
    """`extract_hidden_states` writes what the reference has at these layers."""
    from safetensors.torch import load_file

    from tests.reference.target import load_target

    layers = (0, 2, 4, 5, 8)
    command = [sys.executable, "-m", "tests.gpu.extract_probe", str(tmp_path / "states")]
    result = subprocess.run(
        [*command, ",".join(map(str, layers))],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "VLLM_CACHE_ROOT": str(cache / "vllm")},
        capture_output=True,
        text=True,
        check=False,
    )
    files = [line.split()[-1] for line in result.stdout.splitlines() if "STATES" in line]
    assert len(files) == len(load_prompts()), result.stdout[-3000:] + result.stderr[-3000:]
    target = load_target(TARGET)
    for file, prompt in zip(files, load_prompts(), strict=True):
        taken = load_file(file)
        assert taken["token_ids"].tolist() == prompt["token_ids"]
        tokens = torch.tensor(prompt["token_ids"])
        reference = target(tokens, aux_layer_ids=layers).aux_hidden_states
        error = relative_error(
            taken["hidden_states"].float(), reference.view(len(tokens), len(layers), -1)
        )
        print("relative error per layer", [round(e, 4) for e in error])
        assert max(error) < 0.05
        # Each is its own layer's and not a neighbour's.
        every = target(tokens, aux_layer_ids=range(target.num_layers + 1)).aux_hidden_states
        every = every.view(len(tokens), target.num_layers + 1, -1)
        for index, layer in enumerate(layers):
            distances = (taken["hidden_states"][:, index : index + 1].float() - every).norm(
                dim=(0, 2)
            )
            assert int(distances.argmin()) == layer


def relative_error(taken: torch.Tensor, reference: torch.Tensor) -> list[float]:
    """Per layer, of `[tokens, layers, hidden_size]`."""
    assert taken.shape == reference.shape
    return ((taken - reference).norm(dim=(0, 2)) / reference.norm(dim=(0, 2))).tolist()
