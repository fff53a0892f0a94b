# SPDX-License-Identifier: Apache-2.0
"""What is refused on which release, and how a run is read from vLLM's configuration."""

from __future__ import annotations

import functools
from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from vllm_kimi_eagle3.findings import Finding, Severity
from vllm_kimi_eagle3.host import SUPPORTED
from vllm_kimi_eagle3.limits import Attention, Run, Runner, limits, run_of
from vllm_kimi_eagle3.patches import cannot_work

AUX = {"aux_layers": (2, 30, 58)}


def run(version: str | None, runner: Runner, attention: Attention, **settings: Any) -> Run:
    return Run(
        version=None if version is None else Version(version),
        runner=runner,
        drafter_attention=attention,
        **{"tensor_parallel_size": 8, "num_speculative_tokens": 3, **settings},
    )


def found(*args: Any, **settings: Any) -> dict[str, bool]:
    """The limits' ids, and whether each refuses."""
    return {finding.id: refuses(finding) for finding in limits(run(*args, **settings))}


def refuses(finding: Finding) -> bool:
    return finding.severity is Severity.FAILS


def releases(first: str, last: str) -> list[str]:
    return list(SUPPORTED[SUPPORTED.index(first) : SUPPORTED.index(last) + 1])


@pytest.mark.parametrize("release", SUPPORTED)
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("attention", ["llama", "mla"])
def test_the_usual_run_meets_none(release: str, runner: Runner, attention: Attention) -> None:
    assert found(release, runner, attention, drafter_kv_heads=64, **AUX, last_rank_start=0) == {}
    assert found(release, runner, attention, draft_tensor_parallel_size=8) == {}


@pytest.mark.parametrize("release", SUPPORTED)
def test_pipeline_parallelism_where_a_layer_is_on_an_earlier_rank(release: str) -> None:
    refused = {"run-pipeline-parallel": True}
    two = {"pipeline_parallel_size": 2}
    assert found(release, "V1", "llama", **two) == refused
    assert found(release, "V1", "llama", **two, **AUX, last_rank_start=31) == refused
    assert found(release, "V2", "mla", **two) == refused
    assert found(release, "V2", "mla", **two, aux_layers=(40, 50), last_rank_start=31) == refused
    late = found(release, "V1", "llama", **two, aux_layers=(31, 45, 58), last_rank_start=31)
    # Before 0.30 vLLM asks the drafter to support it.
    assert late == (refused if release in releases("0.15.1", "0.29.0") else {})


@pytest.mark.parametrize("release", SUPPORTED)
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_context_parallelism_with_a_llama_drafter(release: str, runner: Runner) -> None:
    for settings in ({"drafter_kv_heads": 64}, {"drafter_kv_heads": 8}, {}):
        assert found(release, runner, "llama", decode_context_parallel_size=8, **settings) == {
            "run-dcp-llama": True
        }
    # One KV head over 8 ranks, or two over 4 each: every rank of a group holds the same.
    for heads, size in ((1, 8), (1, 2), (2, 4)):
        assert (
            found(
                release,
                runner,
                "llama",
                decode_context_parallel_size=size,
                drafter_kv_heads=heads,
            )
            == {}
        )


def test_the_crash_is_named_where_it_can_happen() -> None:
    met = {
        release: limits(run(release, "V1", "llama", decode_context_parallel_size=8))[0]
        for release in SUPPORTED
    }
    named = [r for r, finding in met.items() if "first request does not fail" in finding.fact]
    assert named == [r for r, finding in met.items() if finding.links]
    assert named == releases("0.20.2", "0.33.0")


@pytest.mark.parametrize("release", SUPPORTED)
def test_context_parallelism_with_an_mla_drafter(release: str) -> None:
    dcp = {"decode_context_parallel_size": 8}
    assert found(release, "V1", "mla", **dcp) == {"run-dcp-later-drafts": False}
    refused = release in releases("0.15.1", "0.28.0")
    assert found(release, "V2", "mla", **dcp) == ({"run-dcp-v2": True} if refused else {})
    for runner in ("V1", "V2"):
        assert found(release, runner, "mla", **dcp, num_speculative_tokens=1) == {}


BACKENDS = {
    # runner, first and last release: with the server's forced, with the drafter's own as well.
    ("V1", "0.15.1", "0.20.2"): ("refused", "refused"),
    ("V1", "0.21.0", "0.33.0"): ("", ""),
    ("V2", "0.15.1", "0.29.0"): ("refused", "refused"),
    ("V2", "0.30.0", "0.33.0"): ("refused", ""),
}


@pytest.mark.parametrize(("where", "expected"), BACKENDS.items(), ids=str)
@pytest.mark.parametrize(
    ("attention", "wrong", "right"),
    [("llama", "TRITON_MLA", "FLASH_ATTN"), ("mla", "FLASH_ATTN", "FLASHMLA")],
)
def test_a_back_end_of_the_other_kind(
    where: tuple[Runner, str, str],
    expected: tuple[str, str],
    attention: Attention,
    wrong: str,
    right: str,
) -> None:
    runner, *span = where
    refused = {"run-draft-backend": True}
    for release in releases(*span):
        alone = found(release, runner, attention, attention_backend=wrong)
        assert alone == (refused if expected[0] else {}), release
        settings = {"attention_backend": wrong, "draft_attention_backend": right}
        assert found(release, runner, attention, **settings) == (refused if expected[1] else {})
        assert found(release, runner, attention, attention_backend=right) == {}


@pytest.mark.parametrize("release", releases("0.21.0", "0.33.0"))
def test_the_drafters_own_back_end(release: str) -> None:
    own = {"draft_attention_backend": "TRITON_MLA"}
    assert found(release, "V1", "llama", **own) == {"run-draft-backend": True}
    ignored = release in releases("0.21.0", "0.29.0")
    assert found(release, "V2", "llama", **own) == (
        {"run-draft-backend-ignored": False} if ignored else {"run-draft-backend": True}
    )
    assert found(release, "V2", "mla", **own) == (
        {"run-draft-backend-ignored": False} if ignored else {}
    )


@pytest.mark.parametrize(
    ("version", "runner", "fix"),
    [
        ("0.20.2", "V1", "or vLLM 0.21 or later"),
        ("0.17.1", "V2", "or vLLM 0.21 or later"),
        ("0.29.0", "V2", "VLLM_USE_V2_MODEL_RUNNER=0"),
        ("0.33.0", "V2", '"attention_backend": "FLASH_ATTN"'),
    ],
)
def test_the_fix_is_one_that_the_release_has(version: str, runner: Runner, fix: str) -> None:
    (finding,) = limits(run(version, runner, "llama", attention_backend="TRITON_MLA"))
    assert fix in finding.fix
    assert "TRITON_MLA" in finding.fact


@pytest.mark.parametrize("release", SUPPORTED)
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("attention", ["llama", "mla"])
def test_draft_tensor_parallel_size(release: str, runner: Runner, attention: Attention) -> None:
    of = functools.partial(found, release, runner, attention)
    # vLLM itself refuses a size that is neither 1 nor the target's.
    assert of(draft_tensor_parallel_size=4) == {"run-draft-tensor-parallel": True}
    assert of(draft_tensor_parallel_size=4, replicated=True) == {"run-draft-tensor-parallel": True}
    # The plugin makes 1 true, if its patch is in effect.
    assert of(draft_tensor_parallel_size=1, replicated=True) == {}
    assert of(draft_tensor_parallel_size=1) == {"run-draft-tensor-parallel": False}


def test_why_a_draft_tensor_parallel_size_of_1_has_no_effect() -> None:
    (finding,) = limits(run("0.33.0", "V2", "llama", draft_tensor_parallel_size=1))
    assert "the plugin's patch replicated-drafter, which makes it true, is not in" in finding.fact
    for flag, name in (("decode", "decode_context"), ("prefill", "prefill_context")):
        size = {f"{name}_parallel_size": 4}
        (finding,) = limits(run("0.33.0", "V2", "mla", draft_tensor_parallel_size=1, **size))
        assert f"has no effect beside --{flag}-context-parallel-size 4" in finding.fact


def test_what_vllm_forces_itself_is_not_the_users_fault() -> None:
    (finding,) = limits(run("0.17.1", "V1", "llama", attention_backend="FLASHINFER_MLA"))
    assert finding.id == "run-draft-backend"
    assert "vLLM 0.17.1 itself forces on a Blackwell GPU" in finding.fact
    assert "--attention-backend" not in finding.fix
    (finding,) = limits(run("0.18.1", "V1", "llama", attention_backend="FLASHINFER_MLA"))
    assert "leave out --attention-backend" in finding.fix


def test_an_unknown_version_is_a_new_one() -> None:
    assert found(None, "V1", "llama", attention_backend="TRITON_MLA") == {}
    assert found(None, "V2", "mla", decode_context_parallel_size=8) == {}
    # A development version is of the release that it leads to.
    assert found("0.21.0.dev3+gabc", "V1", "llama", attention_backend="TRITON_MLA") == {}


SIZES = st.integers(-1, 16)
NAMES = st.none() | st.sampled_from(["FLASH_ATTN", "TRITON_MLA", "FLASHMLA", "", "no name"])


@given(
    st.builds(
        Run,
        version=st.none() | st.sampled_from([Version(release) for release in SUPPORTED]),
        runner=st.sampled_from(["V1", "V2"]),
        drafter_attention=st.sampled_from(["llama", "mla"]),
        tensor_parallel_size=SIZES,
        pipeline_parallel_size=SIZES,
        decode_context_parallel_size=SIZES,
        attention_backend=NAMES,
        draft_attention_backend=NAMES,
        prefill_context_parallel_size=SIZES,
        draft_tensor_parallel_size=st.none() | SIZES,
        replicated=st.booleans(),
        num_speculative_tokens=st.none() | SIZES,
        drafter_kv_heads=st.none() | SIZES,
        aux_layers=st.none() | st.tuples(SIZES, SIZES),
        last_rank_start=st.none() | SIZES,
    )
)
def test_any_run_gives_lines(any_run: Run) -> None:
    first = limits(any_run)
    assert first == limits(replace(any_run))
    assert all("\n" not in finding.text for finding in first)
    assert len({finding.id for finding in first}) == len(first)
    assert [refuses(f) for f in first] == sorted(map(refuses, first), reverse=True)


class Backend(Enum):
    """As AttentionBackendEnum: a member's value is a class's path."""

    TRITON_MLA = "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"


def vllm_config(**changes: Any) -> SimpleNamespace:
    """What a VllmConfig of 0.15 has of what is read; ``changes`` by dotted name with ``__``."""
    text = SimpleNamespace(num_hidden_layers=61)
    hf_config = SimpleNamespace(num_attention_heads=64, num_key_value_heads=64)
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=8, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        attention_config=SimpleNamespace(backend=None),
        device_config=SimpleNamespace(device_type="cuda"),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=3,
            draft_tensor_parallel_size=8,
            draft_model_config=SimpleNamespace(
                architectures=["Eagle3LlamaForCausalLM"], hf_config=hf_config
            ),
        ),
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        owner: Any = config
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return config


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)


def test_a_run_of_each_era(monkeypatch: pytest.MonkeyPatch) -> None:
    old = run_of(vllm_config(attention_config__backend=Backend.TRITON_MLA), Version("0.15.1"))
    assert old == run(
        "0.15.1",
        "V1",
        "llama",
        attention_backend="TRITON_MLA",
        drafter_kv_heads=64,
        aux_layers=(2, 30, 58),
        last_rank_start=0,
    )
    # From 0.21 the drafter can have its own; from 0.22 the configuration knows the runner.
    newer = vllm_config(
        speculative_config__attention_backend=Backend.FLASH_ATTN,
        speculative_config__draft_model_config__architectures=["Eagle3DeepseekV2ForCausalLM"],
        speculative_config__draft_tensor_parallel_size=1,
        parallel_config__decode_context_parallel_size=4,
        use_v2_model_runner=True,
    )
    read = run_of(newer, Version("0.28.0"))
    assert (read.runner, read.drafter_attention) == ("V2", "mla")
    assert (read.draft_attention_backend, read.decode_context_parallel_size) == ("FLASH_ATTN", 4)
    assert read.draft_tensor_parallel_size == 1
    # Before that, the environment.
    assert run_of(vllm_config(), Version("0.21.0")).runner == "V1"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert run_of(vllm_config(), Version("0.21.0")).runner == "V2"
    assert run_of(vllm_config(use_v2_model_runner=False), Version("0.29.0")).runner == "V1"


def test_pipeline_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(parallel_config__pipeline_parallel_size=4, use_v2_model_runner=False)
    assert run_of(config, Version("0.31.0")).last_rank_start == 46
    assert run_of(config, Version("0.31.0")).aux_layers == (2, 30, 58)
    read = run_of(config, Version("0.31.0"), (50, 55, 60))
    assert read.aux_layers == (50, 55, 60)
    assert limits(read) == []
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "20,20,20,1")
    read = run_of(config, Version("0.31.0"))
    assert read.last_rank_start == 60
    assert [finding.id for finding in limits(read)] == ["run-pipeline-parallel"]


def test_a_forced_back_end_is_ignored_on_the_cpu() -> None:
    config = vllm_config(
        attention_config__backend=Backend.TRITON_MLA, device_config__device_type="cpu"
    )
    assert limits(run_of(config, Version("0.17.1"))) == []


def test_a_configuration_that_lacks_everything() -> None:
    bare = SimpleNamespace(parallel_config=SimpleNamespace(), speculative_config=SimpleNamespace())
    assert run_of(bare, Version("0.33.0")) == Run(Version("0.33.0"), "V2", "llama")


@pytest.mark.parametrize(("aux", "refused"), [((50, 55, 60), False), ((2, 30, 58), True)])
def test_the_start_goes_by_what_the_drafter_is_fed(aux: tuple[int, ...], refused: bool) -> None:
    config = vllm_config(parallel_config__pipeline_parallel_size=4, use_v2_model_runner=False)
    fed = SimpleNamespace(aux=SimpleNamespace(captured=aux))
    pair = SimpleNamespace(drafter=fed, notes=[], decisions={})
    if refused:
        with pytest.raises(ValueError, match="aux layers"):
            cannot_work._decide(config, pair)
    else:
        cannot_work._decide(config, pair)


def test_the_start_says_where_a_draft_tensor_parallel_size_has_no_effect() -> None:
    config = vllm_config(speculative_config__draft_tensor_parallel_size=1)
    fed = SimpleNamespace(aux=None)
    for decisions, said in (({}, ["run-draft-tensor-parallel"]), ({"replicated": True}, [])):
        pair = SimpleNamespace(drafter=fed, notes=[], decisions=decisions)
        cannot_work._decide(config, pair)
        assert [note.rpartition("[")[2].rstrip("]") for note in pair.notes] == said
