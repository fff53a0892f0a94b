# SPDX-License-Identifier: Apache-2.0
"""What is said of how a pair is run: limits, the runner, scheduling, batches, tool calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3.check.run import batch_limits, findings, graph_mode
from vllm_kimi_eagle3.check.runner import runner_of
from vllm_kimi_eagle3.findings import Severity
from vllm_kimi_eagle3.host import SUPPORTED, V2_RUNNER_SWITCH

from .subjects import A100, B200, H200, ids, only, releases, subject

REPLICATED_ON = {"replicated-drafter": True}


def said(*args: Any, **kwargs: Any) -> list[str]:
    return ids(findings(subject(*args, **kwargs)))


def those_that_say(id: str, *words: str, **kwargs: Any) -> list[str]:
    return [release for release in SUPPORTED if id in said(release, *words, **kwargs)]


@pytest.mark.parametrize("release", SUPPORTED)
@pytest.mark.parametrize("drafter", ["mla", "llama", None])
def test_the_usual_command_is_fine(release: str, drafter: str | None) -> None:
    words = ("--tensor-parallel-size", "8", "--max-model-len", "32768")
    assert said(release, *words, drafter=drafter) == []


# ---------------------------------------------------------------------------- limits of the pair


def test_limits_are_read_from_the_command() -> None:
    words = ("-tp", "4", "-pp", "2")
    assert "run-pipeline-parallel" in said("0.26.0", *words)
    # Aux layers [2, 30, 58] of 61: layer 2 is on the first rank.
    finding = only(findings(subject("0.30.0", *words, environ={V2_RUNNER_SWITCH: "0"})),
                   "run-pipeline-parallel")  # fmt: skip
    assert "only those from 31 on are on the last rank" in finding.fact
    assert "run-dcp-llama" in said("0.26.0", "-tp", "8", "-dcp", "8", drafter="llama")
    assert said("0.29.0", "-tp", "8", "-dcp", "8", drafter="mla") == []
    one = {"draft_tensor_parallel_size": 1}
    assert said("0.26.0", "-tp", "8", speculative=one) == ["run-draft-tensor-parallel"]
    assert said("0.26.0", "-tp", "8", speculative=one, patches=REPLICATED_ON) == []
    dcp = ("-dcp", "8")
    both = said("0.26.0", "-tp", "8", *dcp, drafter="mla", speculative=one, patches=REPLICATED_ON)
    assert "run-draft-tensor-parallel" in both
    backend = ("--attention-backend", "TRITON_MLA")
    assert said("0.20.2", *backend, drafter="llama") == ["run-draft-backend"]
    own = {"attention_backend": "FLASH_ATTN"}
    assert said("0.26.0", *backend, drafter="llama", speculative=own) == []
    assert said("0.33.0", *backend, drafter="llama", speculative=own) == []


def test_blackwell_up_to_0_17() -> None:
    for gpu, expected in ((B200, releases("0.15.1", "0.17.1")), (H200, [])):
        assert those_that_say("run-draft-backend", gpu=gpu, drafter="llama") == expected
    assert those_that_say("run-draft-backend", gpu=B200) == []


def test_of_an_unknown_drafter_what_holds_for_either_family() -> None:
    assert said("0.26.0", "-tp", "4", "-pp", "2", drafter=None) == ["run-pipeline-parallel"]
    assert said("0.26.0", "-tp", "8", "-dcp", "8", drafter=None) == []


# ------------------------------------------------------------------------------------ the runner


def test_which_runner() -> None:
    def of(release: str, *words: str, **kwargs: Any) -> str:
        one = subject(release, *words, **kwargs)
        assert one.facts is not None
        return runner_of(one.command, one.facts, one.environ)

    assert of("0.28.0") == "V1"
    assert of("0.29.0") == "V2"
    assert of("0.29.0", "--enable-dbo") == "V1"
    assert of("0.30.0", "--logits-processors", "x:Y") == "V1"
    assert of("0.31.0", "--logits-processors", "x:Y") == "V2"
    assert of("0.33.0", speculative={"parallel_drafting": True}) == "V1"
    assert of("0.29.0", "--enable-dbo", environ={V2_RUNNER_SWITCH: "1"}) == "V2"
    assert of("0.33.0", environ={V2_RUNNER_SWITCH: "0"}) == "V1"


def test_a_runner_that_does_not_have_it() -> None:
    forced = {V2_RUNNER_SWITCH: "1"}
    assert those_that_say("run-runner", "--enable-dbo", environ=forced) == [
        *releases("0.15.1", "0.16.0"), *releases("0.20.2", "0.33.0")
    ]  # fmt: skip
    assert those_that_say("run-runner", environ=forced) == releases("0.15.1", "0.16.0")
    finding = only(findings(subject("0.26.0", "--enable-dbo", environ=forced)), "run-runner")
    assert finding.severity is Severity.FAILS
    finding = only(findings(subject("0.33.0", "--enable-dbo")), "run-runner")
    assert finding.severity is Severity.NOTE
    assert "with the V1 runner" in finding.fact
    quantised = {"draft_lm_head_quantization": "fp8"}
    first = {V2_RUNNER_SWITCH: "0"}
    assert "run-runner" in said("0.33.0", speculative=quantised, environ=first)
    assert "run-runner" not in said("0.33.0", speculative=quantised)


# ------------------------------------------------------------------------ scheduling and graphs


def test_asynchronous_scheduling() -> None:
    unpadded = {"disable_padded_drafter_batch": True}
    on, off = ("--async-scheduling",), ("--no-async-scheduling",)
    assert those_that_say("run-async-refused", *on, speculative=unpadded) == releases(
        "0.15.1", "0.32.0"
    )
    assert those_that_say("run-async-off", speculative=unpadded) == releases("0.15.1", "0.32.0")
    assert those_that_say("run-async-off", *off) == list(SUPPORTED)
    assert those_that_say("run-async-off", *on) == []
    ray = ("--distributed-executor-backend", "ray")
    assert those_that_say("run-async-off", *ray) == releases("0.15.1", "0.32.0")
    newer = {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1"}
    assert those_that_say("run-async-off", *ray, environ=newer) == releases("0.15.1", "0.19.1")
    finding = only(findings(subject("0.26.0", *off)), "run-async-off")
    assert finding.fact.startswith("--no-async-scheduling turns off")
    assert finding.evidence.key == "--no-async-scheduling"
    finding = only(findings(subject("0.26.0", speculative=unpadded)), "run-async-off")
    key = '"disable_padded_drafter_batch" in --speculative-config'
    assert (finding.evidence.key, finding.evidence.value) == (key, "true")
    finding = only(findings(subject("0.26.0", *ray)), "run-async-off")
    assert finding.evidence.key == "--distributed-executor-backend"


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ((), "FULL_AND_PIECEWISE"),
        (("--enforce-eager",), "NONE"),
        (("-O0",), "NONE"),
        (("-O1",), "PIECEWISE"),
        (("-O3",), "FULL_AND_PIECEWISE"),
        (("--compilation-config", '{"cudagraph_mode": "full_decode_only"}'), "FULL_DECODE_ONLY"),
        (("-cc.cudagraph_mode=none",), "NONE"),
    ],
)
def test_modes_of_graphs(words: tuple[str, ...], mode: str) -> None:
    one = subject("0.26.0", *words)
    assert graph_mode(one) == mode
    assert ("run-no-graphs" in ids(findings(one))) is (mode == "NONE")


def test_graphs_that_are_too_small() -> None:
    sizes = ("--compilation-config", '{"cudagraph_capture_sizes": [1, 2, 3]}')
    finding = only(findings(subject("0.26.0", *sizes)), "run-capture-sizes")
    assert finding.severity is Severity.FAILS
    finding = only(findings(subject("0.33.0", *sizes)), "run-capture-sizes")
    assert finding.severity is Severity.SLOW
    words = ("--max-num-seqs", "32", "--max-cudagraph-capture-size", "64")
    finding = only(findings(subject("0.26.0", *words)), "run-capture-sizes")
    assert "which 16 requests of 4 tokens fill" in finding.fact
    assert finding.fix == "raise it to 128"
    enough = ("--max-num-seqs", "32", "--max-cudagraph-capture-size", "128")
    assert said("0.26.0", *enough) == []
    assert "run-capture-sizes" not in said("0.26.0", *sizes, "--enforce-eager")


# ------------------------------------------------------------------------------ batch and length


def test_defaults_of_a_server() -> None:
    def of(release: str, gpu: str | None, *words: str) -> tuple[int, int]:
        one = subject(release, *words, gpu=gpu)
        assert one.facts is not None
        return batch_limits(one, one.facts)

    assert of("0.26.0", H200) == (8192, 1024)
    assert of("0.26.0", None) == (2048, 256)
    assert of("0.26.0", B200) == (8192, 1024)
    assert of("0.27.1", B200) == (8192, 1024)
    assert of("0.28.0", B200) == of("0.33.0", B200) == (16384, 1024)
    assert of("0.26.0", H200, "--max-num-batched-tokens", "512") == (512, 512)
    assert of("0.26.0", H200, "--max-num-seqs", "7") == (8192, 7)
    assert of("0.26.0", A100) == of("0.33.0", A100) == (2048, 256)
    gb10 = "sm_121,128GB,1"
    assert of("0.32.0", gb10) == (8192, 1024)
    assert of("0.33.0", gb10) == (2048, 256)


def test_a_budget_that_is_too_small() -> None:
    words = ("--max-num-seqs", "256", "--max-num-batched-tokens", "512")
    finding = only(findings(subject("0.26.0", *words)), "run-batch")
    assert finding.severity is Severity.SLOW
    assert "with more than 128 requests" in finding.fact
    assert finding.fix == "raise --max-num-batched-tokens to 1024, or lower --max-num-seqs to 128"
    words = ("--max-num-seqs", "256", "--max-num-batched-tokens", "128")
    assert only(findings(subject("0.26.0", *words)), "run-batch").severity is Severity.FAILS
    words = ("--max-num-seqs", "256", "--max-num-batched-tokens")
    assert said("0.26.0", *words, "1023") == ["run-batch"]
    assert said("0.26.0", *words, "1024") == []


def test_a_gpu_for_each_rank() -> None:
    def fix(*words: str, gpu: str = "sm_90,141GB,4", **kwargs: Any) -> str | None:
        found = findings(subject("0.26.0", *words, gpu=gpu, **kwargs))
        return next((f.fix for f in found if f.id == "run-too-few-gpus"), None)

    assert those_that_say("run-too-few-gpus", "-tp", "8", gpu="sm_90,141GB,4") == list(SUPPORTED)
    assert (fix("-tp", "8") or "").startswith("use -tp 4, or ")
    assert fix("-tp", "4") is None
    assert fix("-tp", "8", gpu="sm_90,141GB") is None  # How many is not known.
    assert fix("-tp", "8", gpu="sm_90,141GB,8") is None
    assert fix("-tp", "4", "-pp", "2") is not None
    assert fix("-tp", "2", "-dp", "4") is not None
    assert fix("-tp", "2", "-dp", "4", "--data-parallel-size-local", "2") is None
    assert fix("-tp", "4", "-dp", "4", "--data-parallel-size-local", "2") is not None
    assert fix("-tp", "4", "-dp", "4", "--data-parallel-size-local", "0") is None
    assert fix("-tp", "4", "-dp", "4", "--data-parallel-rank", "0") is None
    assert fix("-tp", "4", "-dp", "4", "--data-parallel-backend", "ray") is None
    assert fix("-tp", "8", "--distributed-executor-backend", "mp") is not None
    for elsewhere in ("ray", "external_launcher", "my.Executor"):
        assert fix("-tp", "8", "--distributed-executor-backend", elsewhere) is None
    assert fix("-tp", "8", "--nnodes", "2") is None


def test_heads_that_cannot_be_spread() -> None:
    finding = only(findings(subject("0.26.0", "-tp", "6")), "run-heads")
    assert finding.fact == "-tp 6 does not divide the target's 64 attention heads"
    assert finding.fix == "use -tp 4"
    for size in (1, 2, 4, 8, 16, 32, 64):
        for drafter in ("mla", "llama"):
            assert "run-heads" not in said("0.26.0", "-tp", str(size), gpu=None, drafter=drafter)
    one = subject("0.26.0", "-tp", "8", drafter="llama")
    assert one.pair is not None
    for heads, kv_heads, what in (
        (64, 2, None),  # Fewer than ranks: copied.
        (64, 12, "12 KV heads"),
        (64, 16, None),
        (60, 60, "60 attention heads"),
    ):
        expected = replace(one.pair.expected, num_heads=heads, num_kv_heads=kv_heads)
        one.pair = replace(one.pair, expected=expected)
        found = [f.fact for f in findings(one) if f.id == "run-heads"]
        assert found == ([] if what is None else [f"-tp 8 does not divide the drafter's {what}"])


def test_too_many_drafts() -> None:
    assert those_that_say("run-many-drafts", k=129) == releases("0.15.1", "0.28.0")
    assert those_that_say("run-many-drafts", k=128) == []


def test_a_context_that_is_too_long() -> None:
    words = ("--max-model-len", "262145")
    assert those_that_say("run-max-model-len", *words) == list(SUPPORTED)
    assert "run-max-model-len" not in said("0.26.0", "--max-model-len", "262144")
    allowed = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    assert "run-max-model-len" not in said("0.26.0", *words, environ=allowed)


# --------------------------------------------------------------------------------- tool calls


def test_tool_parsers() -> None:
    auto, kimi = ("--enable-auto-tool-choice",), ("--tool-call-parser", "kimi_k2")
    assert those_that_say("run-no-tool-parser", *auto) == list(SUPPORTED)
    assert those_that_say("run-no-tool-parser", *auto, *kimi) == []
    assert those_that_say("run-tool-parser", *auto, *kimi) == releases("0.15.1", "0.19.1")
    repaired = {"tool-parser": True}
    assert those_that_say("run-tool-parser", *auto, *kimi, patches=repaired) == []
    one = subject("0.19.1", *kimi)
    one.patches_off = {"tool-parser": "it is off"}
    fix = only(findings(one), "run-tool-parser").fix
    assert fix == (
        "let the plugin's patch tool-parser be applied (it is off), or use vLLM 0.20 or later"
    )


def test_offloading_with_expert_parallelism() -> None:
    words = ("--kv-offloading-size", "64", "--enable-expert-parallel")
    assert those_that_say("run-offload", *words) == ["0.19.1"]
    assert those_that_say("run-offload", *words[:2]) == []


# ------------------------------------------------------------------------------ what is no case


def test_what_is_no_kimi_is_left_alone() -> None:
    one = subject("0.26.0", "-pp", "2")
    one.shape = None
    assert ids(findings(one)) == []
    one.target = None
    assert ids(findings(one)) == ["run-pipeline-parallel"]
    assert said("0.26.0", "-pp", "2", speculative={"method": "ngram"}) == []


WORDS = st.lists(
    st.sampled_from([
        "-tp", "8", "0", "-1", "3", "-pp", "2", "-dcp", "--max-num-seqs", "--max-model-len",
        "auto", "--max-num-batched-tokens", "--async-scheduling", "--no-async-scheduling",
        "--enforce-eager", "-O0", "--compilation-config", '{"cudagraph_capture_sizes": ["a", 4]}',
        '{"cudagraph_capture_sizes": {}}', '{"max_cudagraph_capture_size": "x"}', "--enable-dbo",
        "--tool-call-parser", "kimi_k2", "hermes", "--enable-auto-tool-choice",
        "--kv-transfer-config", "{}", "--enable-expert-parallel", "--distributed-executor-backend",
        "ray", "--cudagraph-capture-sizes", "1", "2",
    ]),
    max_size=10,
)  # fmt: skip
VALUES = (
    st.none() | st.booleans() | st.integers(-5, 300) | st.text(max_size=4) | st.lists(st.none())
)
KEYS = ("draft_tensor_parallel_size", "num_speculative_tokens", "attention_backend",
        "kv_cache_dtype", "parallel_drafting", "disable_padded_drafter_batch")  # fmt: skip


@given(
    st.sampled_from(SUPPORTED),
    WORDS,
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3),
    st.dictionaries(
        st.sampled_from([V2_RUNNER_SWITCH, "VLLM_PP_LAYER_PARTITION"]), st.text(max_size=5)
    ),
)
def test_any_command_gives_findings(
    release: str, words: list[str], keys: dict[str, Any], environ: dict[str, str]
) -> None:
    for finding in findings(subject(release, *words, speculative=keys, environ=environ)):
        assert finding.text.isprintable()
        if finding.severity in (Severity.FAILS, Severity.WRONG):
            assert finding.fix
            assert str(finding.evidence)


@pytest.mark.parametrize("release", SUPPORTED)
def test_the_names_of_parsers(release: str) -> None:
    auto = ("--enable-auto-tool-choice", "--tool-call-parser")
    for words in ((*auto, "kimi"), ("--reasoning-parser", "kimi"), (*auto, "Kimi-K2")):
        finding = only(findings(subject(release, *words)), "run-unknown-parser")
        assert finding.severity is Severity.FAILS
        assert finding.fix.startswith(f"use {words[-2]} kimi_k2")
    for words in (
        (*auto, "kimi_k2", "--reasoning-parser", "kimi_k2"),
        ("--tool-call-parser", "kimi"),
        (*auto, "mine", "--tool-parser-plugin", "mine.py"),
        ("--reasoning-parser", "mine", "--reasoning-parser-plugin", "mine.py"),
    ):
        assert "run-unknown-parser" not in said(release, *words)


def test_a_parser_of_some_releases() -> None:
    words = ("--enable-auto-tool-choice", "--tool-call-parser")
    assert those_that_say("run-unknown-parser", *words, "kimi_k3") == releases("0.15.1", "0.26.0")
    assert those_that_say("run-unknown-parser", *words, "minimax") == releases("0.24.0", "0.33.0")
    finding = only(findings(subject("0.26.0", *words, "kimi_k3")), "run-unknown-parser")
    assert "which came in 0.27" in finding.fact
    assert finding.fix == "use --tool-call-parser kimi_k2"
