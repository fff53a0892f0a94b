# SPDX-License-Identifier: Apache-2.0
"""The attention back-end in a real vLLM: who gets it, what it declares, what it computes.

No GPU is here: the classes are resolved, built and called by hand (see `attention_probe.py`), and
the kernel runs in Triton's interpreter. The judge is the plain-torch reference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.assets import variants

from . import harness
from .matrix import scenario

pytestmark = scenario("attention")

STOCK = "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"
PATH = "vllm_kimi_eagle3.attention.triton_mla.TritonMLABackend"
OURS = "vllm_kimi_eagle3.attention.backend.MlaDecodeBackend"
OFF = {"additional_config": {"kimi_eagle3": {"attention": False}}}


# 16 requests of four tokens in a call of the kernel.
SMALL = {"scheduler_config.max_num_seqs": 64, "scheduler_config.max_num_batched_tokens": 64}


def speculative(drafter: Path, k: int = 3) -> dict[str, Any]:
    return {
        "speculative_config": {
            "method": "eagle3",
            "model": str(drafter),
            "num_speculative_tokens": k,
        }
    }


def job(kind: str, model: Path = harness.TARGET, drafter: Any = None, **more: Any) -> Any:
    k = more.pop("k", 3)
    rest = {name: more.pop(name) for name in ("set", "env") if name in more}
    engine = {"model": str(model), **more}
    if drafter is not None:
        engine.update(speculative(drafter, k))
    return {"kind": kind, "engine": engine, **rest}


def deepseek(folder: Path) -> Path:
    """A DeepSeek-V3 of the tiny Kimi's sizes."""
    variants.write_kimi_k2_target(folder)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "deepseek_v3"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("attention")
    llama_target, llama_drafter = variants.write_llama_pair(folder / "llama")
    llama, mla = harness.LLAMA_DRAFTER, harness.MLA_DRAFTER
    jobs = {
        "llama drafter": job("classes", drafter=llama),
        "mla drafter": job("classes", drafter=mla),
        "no drafter": job("classes"),
        "text-only": job("classes", variants.write_kimi_k2_target(folder / "k2")),
        "deepseek": job("classes", deepseek(folder / "deepseek")),
        "another model": job("classes", llama_target, llama_drafter),
        "off": job("classes", drafter=mla, **OFF),
        "dcp": job(
            "classes", drafter=llama, set={"parallel_config.decode_context_parallel_size": 2}
        ),
        "steps": job("steps", drafter=mla, set=SMALL),
        "steps, fp8": job("steps", drafter=mla, set={**SMALL, "cache_config.cache_dtype": "fp8"}),
        "steps, fp8, off": job(
            "steps", drafter=mla, set={"cache_config.cache_dtype": "fp8"}, **OFF
        ),
        "reserved": job("reserved", drafter=mla),
        "plan": job("plan", drafter=mla),
        "plan, no drafter": job("plan"),
        "plan, dcp": job(
            "plan", drafter=mla, set={"parallel_config.decode_context_parallel_size": 2}
        ),
        "plan, parallel": job(
            "plan", drafter=llama, set={"speculative_config.parallel_drafting": True}
        ),
        "plan, 9 drafts": job("plan", drafter=llama, k=9),
        "plan, page": job("plan", drafter=llama, set={"cache_config.block_size": 8}),
        "plan, cache": job("plan", drafter=llama, set={"cache_config.cache_dtype": "fp8_e5m2"}),
        "plan, invariant": job("plan", drafter=llama, env={"VLLM_BATCH_INVARIANT": "1"}),
        "plan, block": job("plan", drafter=llama, set={"speculative_config.method": "dflash"}),
        "plan, microbatches": job("plan", drafter=llama, set={"parallel_config.enable_dbo": True}),
        "page": job("page", drafter=llama),
        "page, off": job("page", drafter=llama, **OFF),
        "page, the user's": job(
            # From 0.28 on, a CPU would not have it.
            "page",
            drafter=llama,
            block_size=32,
            set={"cache_config.block_size": 32},
        ),
        "plan, drafter": job(
            "plan",
            drafter=mla,
            set={"speculative_config.draft_model_config.hf_text_config.kv_lora_rank": 256},
        ),
    }
    return harness.run_probe(
        Path(__file__).with_name("attention_probe.py"),
        jobs,
        folder / "probe",
        cache,
        harness.START_TIMEOUT,
        VLLM_MLA_DISABLE="0",
        TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES="",
    )


def of(said: dict[str, Any], name: str) -> dict[str, Any]:
    answer: dict[str, Any] = said[name]
    assert "error" not in answer, answer["error"]
    return answer


def test_registration_is_read_back_taken_back_and_leaves_anothers(said: dict[str, Any]) -> None:
    registry = said["registry"]
    assert {what: registry[what] for what in registry if not what.startswith("state")} == {
        "stock": STOCK,
        "ours": PATH,
        "disabled": STOCK,
        "another's": "other.plugin.Backend",
        "again": PATH,
        "another's, later": "other.plugin.Backend",
    }


@pytest.mark.parametrize("when", ["state", "state again"])
def test_its_state_where_nobody_else_overrides_the_name(said: dict[str, Any], when: str) -> None:
    assert said["registry"][when][:2] == ["applied", True]


@pytest.mark.parametrize("when", ["state after another's", "state before another's"])
def test_its_state_where_another_plugin_overrides_the_name(said: dict[str, Any], when: str) -> None:
    assert said["registry"][when] == [
        "not needed",
        None,
        "another plugin has overridden TRITON_MLA: other.plugin.Backend",
    ]


@pytest.mark.parametrize("name", ["llama drafter", "mla drafter", "no drafter", "text-only"])
def test_a_kimi_gets_it(said: dict[str, Any], name: str) -> None:
    answer = of(said, name)
    assert (answer["backend"], answer["name"]) == (OURS, "TRITON_MLA")
    assert answer["fp8"]
    # The text tower alone is a DeepSeek-V3's, and a text-only Kimi has none.
    if name != "text-only":
        assert answer["backend within"] == OURS
        assert answer["same plan within"]


@pytest.mark.parametrize("name", ["another model", "deepseek", "off"])
def test_others_get_vllms_own_class(said: dict[str, Any], name: str) -> None:
    answer = of(said, name)
    assert (answer["backend"], answer["is_stock"]) == (STOCK, True)
    assert (answer["backend within"], answer["same plan within"]) == (STOCK, True)


def test_on_stock_a_verify_step_is_no_decode_or_reads_the_cache_per_token(
    said: dict[str, Any],
) -> None:
    """The fault, by stock's own classes: what `test_a_verify_step_is_a_decode` asks, they lack."""
    answer = of(said, "off")
    if harness.at_least(0, 31):
        assert answer["threshold"] == 4  # And a row of the kernel's grid for each token.
        return
    assert answer["threshold"] == 1
    # On the GPU it goes to prefill, which needs pinned memory, and there is none here.
    assert answer["verify"] == "RuntimeError"
    assert answer["capture"] == "AssertionError"
    declared = {"UNIFORM_BATCH"} if harness.at_least(0, 22) else {"NEVER"}
    if harness.at_least(0, 26):
        declared = {"UNIFORM_SINGLE_TOKEN_DECODE"}
    assert answer["graphs"] in declared


@pytest.mark.parametrize("name", ["llama drafter", "mla drafter"])
def test_a_verify_step_is_a_decode(said: dict[str, Any], name: str) -> None:
    answer = of(said, name)
    assert (answer["threshold"], answer["graphs"]) == (4, "UNIFORM_BATCH")
    # Decodes, their tokens, prefills: two requests of four tokens, also while a graph is captured.
    assert answer["verify"] == answer["capture"] == [2, 8, 0]
    # The drafter's later steps have one token, and a graph's padding is requests without any.
    assert answer["decode"] == [3, 3, 0]
    assert answer["padded"] == [3, 12, 0]
    # One request without drafts, and one with few, do not send the others to prefill.
    assert answer["ragged"] == [3, 7, 0]


def test_without_speculation_a_decode_is_one_token(said: dict[str, Any]) -> None:
    answer = of(said, "no drafter")
    assert (answer["threshold"], answer["graphs"]) == (1, "UNIFORM_BATCH")
    assert answer["decode"] == [3, 3, 0]


def test_over_dcp_a_verify_step_stays_prefill_and_out_of_graphs(said: dict[str, Any]) -> None:
    answer = of(said, "dcp")
    assert answer["backend"] == OURS
    assert (answer["threshold"], answer["graphs"]) == (1, "UNIFORM_SINGLE_TOKEN_DECODE")


@pytest.mark.parametrize("name", ["steps", "steps, fp8"])
@pytest.mark.parametrize(
    ("step", "tokens", "launches"),
    [
        ("decode", 3, [[1, 3]]),
        ("verify", 12, [[4, 3]]),
        ("padded", 12, [[4, 3]]),
        ("ragged", 7, [[4, 3]]),
        ("short", 6, [[4, 3]]),
        ("one padded", 4, [[1, 1]]),
        ("drafts padded", 8, [[1, 5]]),
        ("ragged, padded", 8, [[4, 2]]),
        ("ragged, as many", 12, [[4, 3]]),
        ("padding alone", 16, [[1, 4]]),
        ("many", 140, [[4, 16], [4, 16], [4, 3]]),
        ("many, ragged", 56, [[4, 16], [4, 8]]),
        ("capture", 6, [[2, 3]]),
    ],
)
def test_it_computes_what_the_reference_does(
    said: dict[str, Any], name: str, step: str, tokens: int, launches: list[list[int]]
) -> None:
    answer = of(said, name)
    assert answer["quantises queries"] is (False if "fp8" in name else answer["quantises queries"])
    distance = answer[step]
    assert distance["shape"] == [tokens, 4, 512]
    assert distance["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert distance.get("out", 0) < 2e-2
    assert distance.get("lse", 0) < 2e-2
    assert distance["padding"]
    assert distance["launches"] == launches
    # A graph is captured before anything is served, so it may compile.
    assert distance.get("not compiled", 0) == 0


def test_fp8_is_refused_by_stock_up_to_0_17_alone(said: dict[str, Any]) -> None:
    answer = of(said, "steps, fp8, off")
    if harness.at_least(0, 18):
        assert "refused" not in answer
    else:
        assert "FP8 KV cache not yet supported" in answer["refused"]
    assert of(said, "steps, fp8")["kv_cache_dtype"] == "fp8"


def test_scratch_is_reserved_once_by_the_layer(said: dict[str, Any]) -> None:
    answer = of(said, "reserved")
    assert answer["at first"] == 0
    taken = answer["with the layer"]
    assert taken - answer["most"] in range(256)  # The manager rounds up.
    assert answer["with the builder"] == answer["after a full step"] == taken


def test_the_plan_and_its_log_line(said: dict[str, Any]) -> None:
    plan = of(said, "plan")
    assert (plan["stock"], plan["query_len"], plan["graphs"]) == ("", 4, "UNIFORM_BATCH")
    assert plan["log"] == (
        "mla_decode (interpreter, 1 MiB of scratch) serves TRITON_MLA: decode steps and verify "
        "steps of 4 tokens, in full CUDA graphs"
    )
    plain = of(said, "plan, no drafter")
    assert (plain["query_len"], plain["log"].partition(": ")[2]) == (
        1,
        "decode steps, in full CUDA graphs",
    )


def test_the_plan_over_dcp(said: dict[str, Any]) -> None:
    plan = of(said, "plan, dcp")
    assert (plan["stock"], plan["query_len"], plan["heads"]) == ("", 1, 8)
    assert "verify steps of 4 tokens are prefill" in plan["log"]


def test_the_plan_for_a_parallel_drafter(said: dict[str, Any]) -> None:
    """Its own pass has up to seven tokens a request."""
    plan = of(said, "plan, parallel")
    assert (plan["stock"], plan["query_len"], plan["verify_len"]) == ("", 7, 4)


def pages(said: dict[str, Any], name: str) -> dict[str, Any]:
    return {what: size for what, size in of(said, name).items() if what != "seconds"}


def test_a_page_holds_a_tile_unless_the_user_says_otherwise(said: dict[str, Any]) -> None:
    page, off, own = (pages(said, name) for name in ("page", "page, off", "page, the user's"))
    if not harness.at_least(0, 18):
        assert page == {"no rule": True}
        return
    # From 0.31 on, back-ends of two kinds get what vLLM takes by default if all can.
    both = 16 if harness.at_least(0, 31) else 64
    assert page == {"mla": 64, "mla and flash": both}
    assert off == {"mla": 16, "mla and flash": 16}
    assert own == {"mla": 32, "mla and flash": 32}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("9 drafts", "query_len is 10"),
        ("page", "the page size is 8"),
        ("cache", "--kv-cache-dtype fp8_e5m2"),
        ("invariant", "VLLM_BATCH_INVARIANT is set"),
        ("microbatches", "share scratch"),
        ("block", 'method "dflash" drafts a block'),
        ("drafter", "the MLA drafter has other dimensions"),
    ],
)
def test_where_stock_serves_and_why(said: dict[str, Any], name: str, why: str) -> None:
    plan = of(said, f"plan, {name}")
    assert why in plan["stock"]
    assert plan["log"] == f"vLLM's own kernel serves TRITON_MLA: {plan['stock']}"
    assert plan["graphs"] in (
        "NEVER",
        "UNIFORM_SINGLE_TOKEN_DECODE",
        "UNIFORM_BATCH",
    )  # As the release has it.
