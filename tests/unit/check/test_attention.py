# SPDX-License-Identifier: Apache-2.0
"""Which back-end is chosen on which GPU and release, and what is said of it.

Of vLLM's own back-ends: no patch is in effect. test_plugin_attention.py has the plugin's.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3.check import attention
from vllm_kimi_eagle3.check.attention import cache_runs, choices, findings
from vllm_kimi_eagle3.check.facts import facts_for
from vllm_kimi_eagle3.findings import Severity
from vllm_kimi_eagle3.host import SUPPORTED

from .subjects import A100, B200, H200, SM120, ids, only, releases, subject

FP8 = ("--kv-cache-dtype", "fp8")


def chosen(*args: Any, **kwargs: Any) -> tuple[str | None, str | None]:
    """The back-ends of target and drafter."""
    found = choices(subject(*args, **kwargs))
    assert found is not None
    both = [None if choice.backend is None else choice.backend.name for choice in found.both]
    return both[0], both[1]


def said(*args: Any, **kwargs: Any) -> list[str]:
    return ids(findings(subject(*args, **kwargs)))


def those_that_say(id: str, *words: str, **kwargs: Any) -> list[str]:
    return [release for release in SUPPORTED if id in said(release, *words, **kwargs)]


# ------------------------------------------------------------------------------------ the choice


@pytest.mark.parametrize("release", SUPPORTED)
def test_the_choice_on_each_gpu(release: str) -> None:
    """As vLLM's log says "Using ... attention backend out of potential backends"."""
    assert chosen(release, gpu=H200) == ("FLASH_ATTN_MLA", "FLASH_ATTN_MLA")
    assert chosen(release, gpu=SM120) == ("TRITON_MLA", "TRITON_MLA")
    assert chosen(release, gpu=A100) == ("TRITON_MLA", "TRITON_MLA")
    assert chosen(release, gpu=B200) == ("FLASHINFER_MLA", "FLASHINFER_MLA")
    assert chosen(release, *FP8, gpu=H200) == ("FLASHMLA", "FLASHMLA")
    assert chosen(release, *FP8, gpu=B200) == ("FLASHINFER_MLA", "FLASHINFER_MLA")


@pytest.mark.parametrize("release", SUPPORTED)
def test_a_llama_drafter_has_another(release: str) -> None:
    assert chosen(release, gpu=H200, drafter="llama") == ("FLASH_ATTN_MLA", "FLASH_ATTN")
    assert chosen(release, gpu=SM120, drafter="llama") == ("TRITON_MLA", "FLASH_ATTN")
    # FlashAttention 2 has no fp8 KV cache, 3 has.
    assert chosen(release, *FP8, gpu=H200, drafter="llama") == ("FLASHMLA", "FLASH_ATTN")
    assert chosen(release, *FP8, gpu=SM120, drafter="llama")[1] == "FLASHINFER"
    # Up to 0.17 vLLM forces the MLA back-end on all layers.
    on_b200 = None if release in releases("0.15.1", "0.17.1") else "FLASHINFER"
    assert chosen(release, gpu=B200, drafter="llama") == ("FLASHINFER_MLA", on_b200)


def test_the_drafters_own_cache_and_back_end() -> None:
    own = {"kv_cache_dtype": "bfloat16"}
    kwargs: dict[str, Any] = {"drafter": "llama", "speculative": own}
    assert chosen("0.26.0", *FP8, **kwargs)[1] == "FLASH_ATTN"
    assert chosen("0.25.1", *FP8, **kwargs)[1] == "FLASHINFER"
    own = {"attention_backend": "TRITON_ATTN"}
    kwargs = {"drafter": "llama", "speculative": own}
    assert chosen("0.26.0", **kwargs) == ("TRITON_MLA", "TRITON_ATTN")
    assert chosen("0.20.2", **kwargs) == ("TRITON_MLA", "FLASH_ATTN")


@pytest.mark.parametrize(
    "words",
    [
        ("--attention-backend", "TRITON_MLA"),
        ("--attention-backend", "triton_mla"),
        ("--attention-config.backend", "TRITON_MLA"),
        ("--attention-config", '{"backend": "TRITON_MLA"}'),
    ],
)
def test_ways_to_force_one(words: tuple[str, ...]) -> None:
    assert chosen("0.26.0", *words, gpu=H200)[0] == "TRITON_MLA"


def test_auto_forces_none() -> None:
    assert chosen("0.26.0", "--attention-backend", "auto", gpu=H200)[0] == "FLASH_ATTN_MLA"


def test_a_capability_of_a_known_family_stands_for_another() -> None:
    assert attention.known_capability((12, 2)) == "12.1"
    assert attention.known_capability((9, 0)) == "9.0"
    assert attention.known_capability((7, 5)) is None
    assert attention.known_capability((11, 0)) is None


def test_a_newer_release_counts_as_the_newest() -> None:
    facts = facts_for("0.33.0")
    newest = attention.backend_named("TRITON_MLA", facts, "12.0")
    object.__setattr__(facts, "version", None)
    assert attention.backend_named("TRITON_MLA", facts, "12.0") == newest
    assert newest is not None
    assert newest.queries == "UNIFORM"


def test_every_back_end_that_is_tried_is_described() -> None:
    for release in SUPPORTED:
        facts = facts_for(release)
        for capability in attention._table()["capabilities"]:
            for mla in (True, False):
                layers = attention.Layers("x", mla, 576 if mla else 128, "float64", "auto")
                choice = attention.choose(layers, facts, capability)
                assert choice.backend is None
                names = [name for name, _ in choice.rejected]
                assert ("TRITON_MLA" in names) is mla


# -------------------------------------------------------------------------------- no back-end


def test_fp8_without_a_back_end() -> None:
    assert those_that_say("run-no-backend", *FP8) == releases("0.15.1", "0.17.1")
    finding = only(findings(subject("0.17.1", *FP8)), "run-no-backend")
    assert "TRITON_MLA (kv_cache_dtype not supported)" in finding.fact
    assert finding.fix == "use --kv-cache-dtype bfloat16, and vLLM takes TRITON_MLA"


def test_one_that_is_not_for_the_gpu() -> None:
    words = ("--attention-backend", "FLASHMLA")
    finding = only(findings(subject("0.26.0", *words)), "run-no-backend")
    assert "compute capability not supported" in finding.fact
    assert finding.fix == "leave out --attention-backend, and vLLM takes TRITON_MLA"
    # Said once, where it is forced on target and drafter.
    assert said("0.20.2", *words).count("run-no-backend") == 1


def test_the_page_size_counts_from_0_18_on() -> None:
    words = ("--attention-backend", "TRITON_MLA", "--block-size", "8")
    assert those_that_say("run-no-backend", *words, gpu=H200) == releases("0.18.1", "0.33.0")
    sixteen = ("--attention-backend", "FLASHMLA", "--block-size", "16")
    assert those_that_say("run-no-backend", *sixteen, gpu=H200) == releases("0.18.1", "0.33.0")
    # Of the target, and of the drafter, which is free to choose.
    both = list(findings(subject("0.26.0", *words, gpu=H200)))[:2]
    assert ["Kimi's MLA layers" in f.fact for f in both] == [True, False]
    assert all("leave out --block-size" in f.fix for f in both)


def test_a_llama_back_end_on_the_target_is_said_here_and_on_the_drafter_elsewhere() -> None:
    words = ("--attention-backend", "FLASH_ATTN")
    finding = only(findings(subject("0.26.0", *words)), "run-no-backend")
    assert "MLA not supported" in finding.fact
    assert "run-no-backend" not in said(
        "0.26.0", speculative={"attention_backend": "TRITON_MLA"}, drafter="llama"
    )


def test_a_back_end_of_a_plugin_is_not_judged() -> None:
    assert "run-no-backend" not in said("0.26.0", "--attention-backend", "CUSTOM")


# ------------------------------------------------------------------------------- fp8 KV cache


def test_fp8_on_small_shared_memory() -> None:
    for gpu in (SM120, "sm_121", "sm_89"):
        assert those_that_say("run-fp8-shared-memory", *FP8, gpu=gpu) == releases(
            "0.20.2", "0.33.0"
        )
    assert those_that_say("run-fp8-shared-memory", *FP8, gpu=H200) == []
    assert those_that_say("run-fp8-shared-memory") == []
    forced = (*FP8, "--attention-backend", "TRITON_MLA")
    assert those_that_say("run-fp8-shared-memory", *forced, gpu=H200) == []


def test_fp8_before_capability_8_9() -> None:
    for gpu in (A100, "sm_86"):
        assert those_that_say("run-fp8-capability", *FP8, gpu=gpu) == releases("0.18.1", "0.33.0")
    assert those_that_say("run-fp8-capability", *FP8, gpu="sm_89") == []
    texts = {r: only(findings(subject(r, *FP8, gpu=A100)), "run-fp8-capability").fact
             for r in ("0.25.1", "0.26.0")}  # fmt: skip
    assert "when it compiles" in texts["0.25.1"]
    assert "refuses it" in texts["0.26.0"]


def test_a_checkpoint_brings_an_fp8_cache() -> None:
    own = {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}
    finding = only(findings(subject("0.26.0", target=own)), "run-fp8-shared-memory")
    assert "the fp8_e4m3 KV cache that the target's checkpoint brings" in finding.fact
    assert "run-fp8-shared-memory" not in said("0.26.0", "--kv-cache-dtype", "bfloat16", target=own)


# -------------------------------------------------------------- the verify step and its graphs


def test_the_verify_step_of_triton_mla() -> None:
    assert those_that_say("run-verify-prefill") == releases("0.15.1", "0.30.0")
    assert those_that_say("run-verify-rows") == releases("0.31.0", "0.33.0")
    for gpu in (H200, B200):
        assert those_that_say("run-verify-prefill", gpu=gpu) == []
        assert those_that_say("run-verify-rows", gpu=gpu) == []
    finding = only(findings(subject("0.26.0", k=5)), "run-verify-prefill")
    assert "a verify step of 6 tokens" in finding.fact
    assert "vLLM 0.31 or later" in finding.fix


def test_leaving_a_forced_back_end_out_is_the_nearer_way() -> None:
    words = ("--attention-backend", "TRITON_MLA")
    finding = only(findings(subject("0.26.0", *words, gpu=H200)), "run-verify-prefill")
    assert finding.fix == "leave out --attention-backend, and vLLM takes FLASH_ATTN_MLA"


def test_graphs_of_triton_mla() -> None:
    """An AssertionError was seen on an H200 with 0.24.0, and a start with PIECEWISE."""
    capture = releases("0.22.1", "0.25.1")
    assert those_that_say("run-graphs-capture") == capture
    assert those_that_say("run-graphs-piecewise") == [
        *releases("0.15.1", "0.21.0"), *releases("0.26.0", "0.30.0")
    ]  # fmt: skip
    for words in (
        ("--enforce-eager",),
        ("--compilation-config", '{"cudagraph_mode": "PIECEWISE"}'),
        ("-O0",),
        ("-O1",),
    ):
        assert those_that_say("run-graphs-capture", *words) == []
        assert those_that_say("run-graphs-piecewise", *words) == []
    assert those_that_say("run-graphs-capture", gpu=H200) == []
    assert those_that_say("run-graphs-capture", gpu=B200) == []


def test_full_graphs_are_refused_where_there_are_none() -> None:
    words = ("--compilation-config", '{"cudagraph_mode": "FULL"}')
    assert those_that_say("run-graphs-refused", *words) == releases("0.15.1", "0.21.0")
    assert those_that_say("run-graphs-refused", *words, gpu=H200) == []


def test_a_llama_drafter_can_hold_the_target_back() -> None:
    """FLASHINFER, with an fp8 KV cache on a GPU whose FlashAttention has none."""
    piecewise = those_that_say("run-graphs-piecewise", *FP8, gpu="sm_89", drafter="llama")
    assert "0.24.0" in piecewise
    finding = only(
        findings(subject("0.24.0", *FP8, gpu="sm_89", drafter="llama")), "run-graphs-piecewise"
    )
    assert "FLASHINFER, which takes the Llama drafter's layer" in finding.fact


# ------------------------------------------------------------------- decode context parallelism

DCP = ("--tensor-parallel-size", "8", "--decode-context-parallel-size", "8")


def test_context_parallelism_and_fp8() -> None:
    assert those_that_say("run-dcp-fp8", *DCP, *FP8, gpu=H200) == releases("0.15.1", "0.24.0")
    assert those_that_say("run-dcp-fp8", *DCP, gpu=H200) == []


def test_context_parallelism_needs_a_log_sum_exp() -> None:
    assert those_that_say("run-dcp-backend", *DCP, gpu=B200) == releases("0.15.1", "0.24.0")
    assert those_that_say("run-dcp-backend", *DCP, gpu=H200) == []
    assert those_that_say("run-dcp-backend", gpu=B200) == []


def test_the_release_from_which_the_back_end_has_it() -> None:
    words = ("-dcp", "8")
    forced = (*words, "--attention-backend", "TOKENSPEED_MLA", "--kv-cache-dtype", "fp8")
    for release, asked, since in (
        ("0.24.0", words, "0.25"),
        ("0.24.0", forced, "0.26"),
        ("0.25.1", forced, "0.26"),
    ):
        finding = only(findings(subject(release, *asked, gpu=B200)), "run-dcp-backend")
        assert finding.fix.endswith(f"or vLLM {since} or later"), finding.fix


def test_who_forces_a_back_end_is_said_of_those_layers_alone() -> None:
    def fact(*words: str, **kwargs: Any) -> str:
        return only(findings(subject("0.33.0", *words, gpu=H200, **kwargs)), "run-attention").fact

    server, own = ("--attention-backend", "TRITON_MLA"), {"attention_backend": "FLASHMLA"}
    v1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    said_by_own = 'on FLASHMLA, as "attention_backend" in --speculative-config says'
    assert "on TRITON_MLA, as --attention-backend says, and" in fact(*server, environ=v1)
    both = fact(*server, speculative=own)
    assert "on TRITON_MLA, as --attention-backend says, and" in both
    assert f"{said_by_own}; " in both  # And whose kernel serves TRITON_MLA.
    assert said_by_own in fact(speculative=own)
    assert fact(*server).count("says") == 1
    assert "says" not in fact()


def test_vllms_reasons_end_without_a_full_stop() -> None:
    for release in SUPPORTED:
        for gpu in (SM120, H200, B200, A100, "sm_89"):
            for finding in findings(subject(release, gpu=gpu)):
                assert ".;" not in finding.fact
                assert not finding.fact.endswith(".")
                assert ".," not in finding.fact


def test_a_cache_that_runs() -> None:
    assert cache_runs(subject("0.26.0", gpu=H200), "fp8")
    assert not cache_runs(subject("0.26.0", gpu=SM120), "fp8")  # Too much shared memory.
    assert not cache_runs(subject("0.26.0", gpu="sm_89"), "fp8")
    assert cache_runs(subject("0.19.1", gpu=SM120), "fp8")
    assert not cache_runs(subject("0.26.0", gpu=A100), "fp8")
    assert not cache_runs(subject("0.24.0", "-dcp", "8", gpu=H200), "fp8")
    assert not cache_runs(subject("0.26.0", gpu=None), "fp8")


def test_context_parallelism_and_the_verify_step() -> None:
    """FLASHMLA's AssertionError was seen with 0.24.0 on two H200."""
    assert those_that_say("run-graphs-capture", *DCP, *FP8, gpu=H200) == list(SUPPORTED)
    assert those_that_say("run-graphs-capture", *DCP, gpu=H200) == []
    assert those_that_say("run-verify-prefill", *DCP, gpu=H200) == []
    assert those_that_say("run-graphs-capture", *DCP, gpu=B200) == releases("0.15.1", "0.28.0")
    assert those_that_say("run-graphs-capture", *DCP) == [
        *releases("0.22.1", "0.25.1"), *releases("0.31.0", "0.33.0")
    ]  # fmt: skip


def test_a_llama_drafter_has_no_decode_path_to_leave() -> None:
    assert those_that_say("run-graphs-capture", *DCP, gpu=H200, drafter="llama") == []


def test_an_interleaved_cache() -> None:
    words = (*DCP, "--cp-kv-cache-interleave-size", "16")
    assert those_that_say("run-dcp-interleave", *words, gpu=H200) == list(SUPPORTED)
    assert those_that_say("run-dcp-interleave", *DCP, gpu=H200) == []
    assert "run-dcp-interleave" not in said("0.26.0", *words[:2], *words[4:], gpu=H200)


# ------------------------------------------------------------------------------------- the rest


def test_no_gpu_and_unknown_gpus() -> None:
    assert said("0.26.0", gpu=None) == ["run-no-gpu"]
    assert said("0.26.0", gpu="sm_75") == ["run-unknown-gpu"]


def test_the_old_variable() -> None:
    environ = {"VLLM_ATTENTION_BACKEND": "TRITON_MLA"}
    finding = only(findings(subject("0.17.1", environ=environ)), "run-attention-variable")
    assert finding.fix == "unset it, and use --attention-backend TRITON_MLA"
    hostile = {"VLLM_ATTENTION_BACKEND": "\x1b[2J\n" * 100}
    finding = only(findings(subject("0.17.1", environ=hostile)), "run-attention-variable")
    assert finding.text.isprintable()


def test_what_is_no_eagle3_is_left_alone() -> None:
    assert said("0.26.0", *FP8, speculative={"method": "mtp"}) == []


def test_a_drafter_that_is_not_here() -> None:
    assert "run-verify-prefill" in said("0.26.0", drafter=None)


WORDS = st.lists(
    st.sampled_from([
        "--kv-cache-dtype", "fp8", "int4_per_token_head", "--block-size", "8", "0", "-3", "64",
        "--attention-backend", "FLASHMLA", "NONE", "CUSTOM", "FLASH_ATTN", "--dtype", "half",
        "float32", "--decode-context-parallel-size", "4", "--attention-config", "{}", "[]",
        '{"backend": 3}', '{"backend_per_kind": {"mla_attention": "TRITON_MLA"}}',
        "--additional-config",
        '{"kimi_eagle3": {"attention": false}}', '{"kimi_eagle3": 3}',
        "--compilation-config", '{"cudagraph_mode": 7}', '{"cudagraph_mode": "full"}', "-O0",
    ]),
    max_size=8,
)  # fmt: skip


@given(
    st.sampled_from(SUPPORTED),
    WORDS,
    st.sampled_from([None, SM120, H200, B200, A100, "sm_75", "sm_121"]),
    st.sampled_from([None, "mla", "llama"]),
    st.sampled_from([1, 3, 200]),
    st.booleans(),
)
def test_any_command_gives_findings(
    release: str, words: list[str], gpu: str | None, drafter: str | None, k: int, plugin: bool
) -> None:
    patches = {"mla-attention": plugin}
    one = subject(release, *words, gpu=gpu, drafter=drafter, k=k, patches=patches)
    for finding in findings(one):
        assert finding.text.isprintable()
        if finding.severity is Severity.FAILS:
            assert finding.fix
            assert str(finding.evidence)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("FOO", "vLLM has none of that name"),
        ("TRITON_MLAA", "vLLM has none of that name"),
        ("FLASHMLA_SPARSE", "non-sparse not supported"),
    ],
)
def test_a_forced_back_end_that_is_none_for_kimi(name: str, said: str) -> None:
    one = subject("0.26.0", "--attention-backend", name, gpu="sm_90,141GiB,8")
    (finding,) = [f for f in findings(one) if f.id == "run-no-backend"]
    assert said in finding.fact
    assert "FLASH_ATTN_MLA" in finding.fix or "TRITON_MLA" in finding.fix


def test_no_back_end_is_said_once_for_target_and_drafter() -> None:
    one = subject("0.26.0", "--dtype", "float32", gpu="sm_90,141GiB,8")
    assert [f.id for f in findings(one)].count("run-no-backend") == 1
