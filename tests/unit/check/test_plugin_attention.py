# SPDX-License-Identifier: Apache-2.0
"""Whose kernel serves TRITON_MLA, and what is said where it is the plugin's."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_kimi_eagle3.attention import plan
from vllm_kimi_eagle3.check import plugin_attention
from vllm_kimi_eagle3.check.attention import cache_runs, choices, closed_by_the_plugin, findings
from vllm_kimi_eagle3.check.memory import attention_workspace
from vllm_kimi_eagle3.check.plugin_attention import BACKEND, PATCH, why_stock
from vllm_kimi_eagle3.check.run import batch_limits
from vllm_kimi_eagle3.findings import Severity
from vllm_kimi_eagle3.host import SUPPORTED
from vllm_kimi_eagle3.kernels.arch import arch, workspace_numel
from vllm_kimi_eagle3.patches import PATCHES

from .subjects import A100, B200, H200, SM120, ids, only, releases, subject

ON, OFF = {PATCH: True}, {PATCH: False}
EIGHT = ("--tensor-parallel-size", "8")
DCP = (*EIGHT, "--decode-context-parallel-size", "8")
FP8 = ("--kv-cache-dtype", "fp8")
FULL = ("--compilation-config", '{"cudagraph_mode": "FULL"}')
SET = ("--additional-config", '{"kimi_eagle3": {"attention": false}}')
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
KERNELS = Path(plan.__file__).parents[1] / "kernels"

# What the plugin's back-end is for.
CLOSED = {
    "run-verify-prefill", "run-verify-rows", "run-graphs-capture", "run-graphs-piecewise",
    "run-graphs-refused", "run-fp8-shared-memory", "run-no-backend",
}  # fmt: skip


def said(*args: Any, **kwargs: Any) -> set[str]:
    return set(ids(findings(subject(*args, patches=ON, **kwargs))))


def serves(*args: Any, **kwargs: Any) -> bool:
    """The plugin's kernel serves the target."""
    found = choices(subject(*args, **{"patches": ON, **kwargs}))
    assert found is not None
    return found.target.backend is not None and found.target.backend.plugin


def reason(*args: Any, **kwargs: Any) -> tuple[str, str]:
    one = subject(*args, **{"patches": ON, **kwargs})
    found = choices(one)
    assert found is not None
    layers = found.target.layers
    why = why_stock(one, layers.kv_cache_dtype, layers.page_size)
    assert why is not None
    return why.reason, why.fix


# ------------------------------------------------------------------------------ where it serves


def test_it_is_a_patch() -> None:
    (patch,) = (patch for patch in PATCHES if patch.id == PATCH)
    assert set(SUPPORTED) <= set(patch.releases)


@pytest.mark.parametrize("release", SUPPORTED)
@pytest.mark.parametrize("gpu", [SM120, A100, "sm_86", "sm_89", "sm_121"])
def test_nothing_is_left_to_say_where_it_serves(release: str, gpu: str) -> None:
    assert serves(release, *EIGHT, gpu=gpu)
    for words in ((), FULL, () if gpu in (A100, "sm_86") else FP8):
        for drafter in ("mla", None) if words == FP8 else ("mla", "llama", None):
            assert not said(release, *EIGHT, *words, gpu=gpu, drafter=drafter) & CLOSED
    assert (
        "the plugin's kernel serves TRITON_MLA"
        in only(findings(subject(release, *EIGHT, gpu=gpu, patches=ON)), "run-attention").fact
    )


def test_other_back_ends_are_what_they_were() -> None:
    for release, gpu, words in itertools.product(SUPPORTED, (H200, B200), ((), FP8, DCP)):
        on, off = (subject(release, *words, gpu=gpu, patches=p) for p in (ON, OFF))
        assert choices(on) == choices(off)
        assert list(findings(on)) == list(findings(off))
        assert closed_by_the_plugin(on) is None
    forced = ("--attention-backend", "CUTLASS_MLA")
    assert "run-verify-prefill" in said("0.33.0", *forced, gpu=B200)


def test_a_llama_drafter_still_holds_it_back() -> None:
    fact = only(
        findings(subject("0.24.0", *FP8, gpu="sm_89", drafter="llama", patches=ON)),
        "run-graphs-piecewise",
    ).fact
    assert "FLASHINFER, which takes the Llama drafter's layer" in fact


@pytest.mark.parametrize("release", SUPPORTED)
def test_context_parallelism(release: str) -> None:
    """A decode is one token there, and says so: no start fails."""
    assert serves(release, *DCP)
    assert said(release, *DCP) & CLOSED == {"run-verify-prefill", "run-graphs-piecewise"}
    for id in ("run-verify-prefill", "run-graphs-piecewise"):
        finding = only(findings(subject(release, *DCP, patches=ON)), id)
        assert finding.fix == "use --decode-context-parallel-size 1"
    eight_bits = "run-dcp-fp8" in said(release, *DCP, *FP8)
    assert eight_bits == (release in releases("0.15.1", "0.24.0"))


# --------------------------------------------------------------------------- where it does not


@pytest.mark.parametrize(
    ("words", "kwargs", "reason_has", "fix"),
    [
        (SET, {}, '"attention": false of "kimi_eagle3" in --additional-config',
         'leave "attention" out of "kimi_eagle3" in --additional-config'),
        ((), {"environ": INVARIANT}, "VLLM_BATCH_INVARIANT is set", "unset VLLM_BATCH_INVARIANT"),
        (("--enable-dbo",), {}, "microbatches run at the same time", "leave out --enable-dbo"),
        (("--ubatch-size", "2"), {}, "microbatches run at the same", "leave out --ubatch-size"),
        ((), {"k": 9}, "9 tokens of a request",
         'use 8 for "num_speculative_tokens" in --speculative-config, or fewer'),
        (FP8, {"gpu": A100}, "no fp8 instructions", "use --kv-cache-dtype bfloat16"),
        ((), {"patches": OFF}, "the patch mla-attention is not in effect", ""),
        ((), {"patches": {}}, "the patch mla-attention is not in effect", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("release", ["0.20.2", "0.24.0", "0.33.0"])
def test_why_it_does_not(
    release: str, words: tuple[str, ...], kwargs: dict[str, Any], reason_has: str, fix: str
) -> None:
    assert not serves(release, *EIGHT, *words, **kwargs)
    why = reason(release, *EIGHT, *words, **kwargs)
    assert reason_has in why[0]
    assert why[1] == fix
    one = subject(release, *EIGHT, *words, **{"patches": ON, **kwargs})
    found = {finding.id: finding for finding in findings(one)}
    assert why[0] in found["run-attention"].fact
    (verify,) = found.keys() & {"run-verify-prefill", "run-verify-rows"}
    assert found[verify].fix.startswith(fix)


@pytest.mark.parametrize("value", ["0", "", " 0 "])
def test_batch_invariance_that_is_off(value: str) -> None:
    assert serves("0.33.0", environ={"VLLM_BATCH_INVARIANT": value})


def test_what_it_takes() -> None:
    assert serves("0.33.0", k=8)
    assert serves("0.33.0", *DCP, k=12)  # A decode is one token there.
    assert serves("0.33.0", "--block-size", "64")
    assert not serves("0.17.1", "--block-size", "8")
    assert serves("0.33.0", "--additional-config", '{"kimi_eagle3": {"attention": true}}')
    # The server is refused.
    assert serves("0.33.0", "--additional-config", '{"kimi_eagle3": {"attention": 3}}')
    assert serves("0.33.0", "--additional-config", "[]")
    parallel = {"parallel_drafting": True}
    assert serves("0.33.0", k=8, speculative=parallel)
    assert not serves("0.33.0", k=9, speculative=parallel)


@pytest.mark.parametrize("edit", [{"num_attention_heads": 32}, {"kv_lora_rank": 256}])
def test_a_drafter_of_other_dimensions(edit: dict[str, int]) -> None:
    one = subject("0.33.0", patches=ON)
    assert one.pair is not None
    names = {"num_attention_heads": "num_heads"}
    for key, value in edit.items():
        object.__setattr__(one.pair.expected, names.get(key, key), value)
    found = choices(one)
    assert found is not None
    assert [c.backend is not None and c.backend.plugin for c in found.both] == [False, False]


def test_fp8_before_vllm_has_it() -> None:
    """The selector goes by the class, the layer by its kernel."""
    for release in releases("0.15.1", "0.17.1"):
        for gpu in (SM120, "sm_89", "sm_121"):
            assert not said(release, *EIGHT, *FP8, gpu=gpu) & {
                "run-no-backend",
                "run-fp8-capability",
            }
        for gpu in (A100, "sm_86"):
            one = subject(release, *EIGHT, *FP8, gpu=gpu, patches=ON)
            finding = only(findings(one), "run-fp8-capability")
            assert finding.fact.endswith("TritonMLAImpl refuses it")
            assert "run-no-backend" not in ids(findings(one))
            assert not cache_runs(subject(release, *EIGHT, gpu=gpu, patches=ON), "fp8")
        one = subject(release, *EIGHT, *FP8, k=9, patches=ON)
        finding = only(findings(one), "run-no-backend")
        assert "its kernel takes 9 tokens of a request at most" in finding.fact
        assert finding.fix.endswith("or use --kv-cache-dtype bfloat16")
        one = subject(release, *EIGHT, *FP8, *SET, patches=ON)
        finding = only(findings(one), "run-no-backend")
        assert finding.fix == (
            'leave "attention" out of "kimi_eagle3" in --additional-config, and the plugin\'s '
            "TRITON_MLA takes it, or use --kv-cache-dtype bfloat16, and vLLM takes TRITON_MLA"
        )


def test_a_cache_that_runs() -> None:
    for release in SUPPORTED:
        assert cache_runs(subject(release, *EIGHT, patches=ON), "fp8")
        assert not cache_runs(subject(release, *EIGHT, gpu=A100, patches=ON), "fp8")
    assert not cache_runs(subject("0.17.1", *EIGHT, k=9, patches=ON), "fp8")
    assert not cache_runs(subject("0.33.0", *EIGHT, *SET, patches=ON), "fp8")


# ------------------------------------------------------------------------------- what it closes


@pytest.mark.parametrize("release", SUPPORTED)
@pytest.mark.parametrize("patches", [ON, OFF, {}])
def test_how_bad_it_is_without(release: str, patches: dict[str, bool]) -> None:
    def bad(*words: str, **kwargs: Any) -> Severity | None:
        closed = closed_by_the_plugin(subject(release, *EIGHT, *words, patches=patches, **kwargs))
        return None if closed is None else closed[0]

    captures, fails, slow = releases("0.22.1", "0.25.1"), Severity.FAILS, Severity.SLOW
    assert bad() is (fails if release in captures else slow)
    assert bad("--enforce-eager") is slow
    unfit = release not in releases("0.18.1", "0.19.1")
    assert bad(*FP8) is (fails if unfit else slow)
    assert bad(*SET) is None
    assert bad(gpu=H200) is None
    assert bad(gpu=None) is None
    assert bad(environ={"VLLM_MLA_DISABLE": "1"}) is None
    assert bad(speculative={"method": "mtp"}) is None
    assert bad(*FP8, gpu=A100) is None
    assert bad(drafter="llama") is bad()


def test_what_is_met_without_it_is_named() -> None:
    def words(release: str, *more: str) -> str:
        closed = closed_by_the_plugin(subject(release, *EIGHT, *more))
        assert closed is not None
        return closed[1]

    assert words("0.24.0") == "the command meets run-graphs-capture and run-verify-prefill"
    assert words("0.33.0") == "the command meets run-verify-rows"
    # Nothing of it: a decode is faster, that is all.
    assert words("0.30.0", "--decode-context-parallel-size", "8") == ""


# -------------------------------------------------------------------- as the server decides it


def test_the_kernels_limits() -> None:
    text = (KERNELS / "paged.py").read_text(encoding="utf-8")
    (most,) = re.findall(r"^MAX_QUERY_LEN = (\d+)$", text, re.MULTILINE)
    assert int(most) == plan.MAX_QUERY_LEN


@pytest.mark.parametrize("gpu", [SM120, "sm_121", "sm_89", "sm_86", A100, H200, B200])
@pytest.mark.parametrize(
    "words", [EIGHT, (), DCP, (*EIGHT, "--max-num-seqs", "4"), (*EIGHT, "--max-num-seqs", "4096")]
)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_workspace_is_the_kernels(gpu: str, words: tuple[str, ...], k: int) -> None:
    """Enough for the kernel of the largest card, and no more."""
    words = (*words, "--attention-backend", BACKEND)
    one = subject("0.33.0", *words, gpu=gpu, k=k, patches=ON)
    assert one.gpus is not None
    requests = 4 if "4" in words else 4096 if "4096" in words else None
    tokens, most = batch_limits(one, one.facts)
    block = {
        "query_len": plugin_attention.query_len(one), "heads": plugin_attention.heads(one),
    }  # fmt: skip
    asked = {
        "max_batch": plan.max_batch(requests or most, tokens, **block), "kv_lora_rank": 512,
        **block,
    }  # fmt: skip
    assert attention_workspace(one) == 4 * workspace_numel(**asked, arch=arch(one.gpus.capability))


def test_the_workspace_of_vllms_own() -> None:
    """1,024 requests of eight heads, in 64 parts of 512 tokens."""
    words = (*EIGHT, "--max-model-len", "32768", "--max-num-seqs", "1024")
    one_token = 1024 * 8 * 64 * 513 * 4
    for release in SUPPORTED:
        expected = one_token * (4 if release in releases("0.31.0", "0.33.0") else 1)
        expected *= release not in releases("0.15.1", "0.24.0")
        assert attention_workspace(subject(release, *words)) == expected
        assert attention_workspace(subject(release, *words, gpu=H200)) == 0
        assert attention_workspace(subject(release, *words, gpu=None)) == 0
    # At most two parts for each multiprocessor.
    longest = subject("0.25.1", *EIGHT, "--max-model-len", "262144", "--max-num-seqs", "1024")
    assert attention_workspace(longest) == 1024 * 8 * 2 * 188 * 513 * 4


@pytest.mark.parametrize("gpu", [SM120, A100, "sm_86", "sm_89", H200, B200])
def test_it_is_what_the_server_decides(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against ``plan_of``. A mock stands for vLLM's platform and configuration."""
    torch = pytest.importorskip("torch", reason="plan_of asks the kernel")
    pytest.importorskip("triton", reason="plan_of asks the kernel")
    stand_in = ModuleType("vllm.platforms")
    monkeypatch.setitem(sys.modules, "vllm", sys.modules.get("vllm") or ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", stand_in)
    served = set()
    for dcp, k, cache, (page, invariant, parallel, heads) in itertools.product(
        (1, 8),
        (1, 3, 8, 9),
        ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
        (
            (None, "0", False, 64),
            (64, "0", True, 64),
            (24, "", False, 64),
            (None, "1", False, 64),
            (None, "0", False, 32),
        ),
    ):
        more = () if page is None else ("--block-size", str(page))
        one = subject(
            "0.33.0", *EIGHT, "--decode-context-parallel-size", str(dcp), *more, gpu=gpu, k=k,
            environ={"VLLM_BATCH_INVARIANT": invariant}, patches=ON,
            speculative={"parallel_drafting": parallel},
        )  # fmt: skip
        assert one.gpus is not None
        assert one.pair is not None
        object.__setattr__(one.pair.expected, "num_heads", heads)
        capability = SimpleNamespace(major=one.gpus.capability[0], minor=one.gpus.capability[1])
        stand_in.__dict__["current_platform"] = SimpleNamespace(
            is_rocm=lambda: False,
            is_xpu=lambda: False,
            get_device_capability=lambda capability=capability: capability,
        )
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
        decided = plan.plan_of(server(torch, dcp, k, cache, page, parallel, heads))
        why = why_stock(one, cache, page)
        assert (why is not None) == bool(decided.stock), (why, decided)
        assert plugin_attention.query_len(one) == decided.query_len
        assert plugin_attention.heads(one) == decided.heads
        served.add(why is None)
    assert served == {True, False}


def server(
    torch: Any, dcp: int, k: int, cache: str, page: int | None, parallel: bool, heads: int
) -> SimpleNamespace:
    """What ``plan_of`` reads of vLLM's configuration."""
    text = SimpleNamespace(
        model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=64
    )
    target = SimpleNamespace(
        hf_config=SimpleNamespace(model_type="kimi_k25", text_config=text),
        hf_text_config=text,
        dtype=torch.bfloat16,
        get_num_attention_heads=lambda _: 8,
    )
    own = SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=heads)
    return SimpleNamespace(
        model_config=target,
        additional_config={},
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp, use_ubatching=False),
        cache_config=SimpleNamespace(cache_dtype=cache, block_size=page),
        scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=8192),
        speculative_config=SimpleNamespace(
            method="eagle3",
            num_speculative_tokens=k,
            parallel_drafting=parallel,
            target_model_config=target,
            draft_model_config=SimpleNamespace(hf_text_config=own),
        ),
    )


def test_advice_looks_at_vllms_own_back_ends() -> None:
    """Other releases' TRITON_MLA, as stock has it, are what "use vLLM" means."""
    finding = only(findings(subject("0.26.0", *EIGHT)), "run-verify-prefill")
    assert finding.fix == "use vLLM 0.31 or later, whose TRITON_MLA keeps it in the decode path"
    finding = only(findings(subject("0.26.0", *DCP)), "run-verify-prefill")
    assert finding.fix.endswith(", with --decode-context-parallel-size 1")
    finding = only(findings(subject("0.26.0", *DCP)), "run-graphs-piecewise")
    assert finding.fix == ""
    off = {"VLLM_KIMI_EAGLE3_DISABLE": PATCH}
    finding = only(findings(subject("0.26.0", *EIGHT, environ=off)), "run-verify-prefill")
    assert finding.fix == (
        "take mla-attention out of VLLM_KIMI_EAGLE3_DISABLE, and the plugin's kernel keeps it in "
        "the decode path"
    )
