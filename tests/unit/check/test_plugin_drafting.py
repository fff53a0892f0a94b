# SPDX-License-Identifier: Apache-2.0
"""Whether the plugin's drafting can serve a command, and a drafter that is whole on each rank."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from vllm_kimi_eagle3.check import cost, memory, plugin_drafting, run
from vllm_kimi_eagle3.check.attention import choices
from vllm_kimi_eagle3.check.subject import Weights
from vllm_kimi_eagle3.checkpoint.drafter_tensors import expected_tensors
from vllm_kimi_eagle3.findings import Severity
from vllm_kimi_eagle3.patches import PATCHES

from .subjects import H200, ids, only, subject

ON = dict.fromkeys((patch.id for patch in PATCHES), True)
TP8 = ("--tensor-parallel-size", "8")
ONE = {"draft_tensor_parallel_size": 1}


def settings(**given: Any) -> tuple[str, str]:
    return "--additional-config", json.dumps({"kimi_eagle3": given})


def why(*words: str, release: str = "0.33.0", patches: Any = None, **kwargs: Any) -> str:
    """Why vLLM's own drafts; "" where the plugin's does."""
    given = subject(release, *TP8, *words, patches=ON if patches is None else patches, **kwargs)
    found = list(plugin_drafting.findings(given))
    assert len(found) <= 1
    for finding in found:
        assert finding.id == "run-drafting"
        assert finding.severity is Severity.NOTE
        assert finding.text.isprintable()
    return found[0].text if found else ""


@pytest.mark.parametrize(
    ("release", "patch", "what"),
    [
        ("0.17.1", "draft-loop", "loop"),
        ("0.28.0", "draft-loop", "loop"),
        ("0.33.0", "draft-forward", "forward pass of the drafter"),
    ],
)
def test_the_patch_of_the_runner(release: str, patch: str, what: str) -> None:
    assert why(release=release) == ""
    other = {"draft-loop": "draft-forward", "draft-forward": "draft-loop"}[patch]
    assert why(release=release, patches={**ON, other: False}) == ""
    assert f"vLLM's own {what} drafts" in why(release=release, patches={**ON, patch: False})
    # Of a plugin that is switched off as a whole nothing is said here.
    given = subject(release, *TP8, patches={**ON, patch: False})
    given.environ = {"VLLM_KIMI_EAGLE3_DISABLE": "1"}
    given.patches_off = {patch: "switched off"}
    assert list(plugin_drafting.findings(given)) == []
    assert why(release=release, patches={}) == ""


@pytest.mark.parametrize(
    ("words", "kwargs", "text"),
    [
        (settings(drafting=False), {}, '"drafting": false of "kimi_eagle3" in --additional-config'),
        (("-dp", "2"), {}, "with -dp 2 the ranks' batches differ"),
        (("-dcp", "8"), {}, "a part of the drafter's KV cache"),
        (("--enable-dbo",), {}, "leave out --enable-dbo"),
        (("--enable-lora",), {}, "--enable-lora replaces layers"),
        (("--kv-transfer-config", "{}"), {}, "--kv-transfer-config moves the KV cache"),
        (("--enforce-eager",), {}, "there are no CUDA graphs"),
        (("-O0",), {}, "there are no CUDA graphs"),
        ((), {"environ": {"VLLM_BATCH_INVARIANT": "1"}}, "unset VLLM_BATCH_INVARIANT"),
        ((), {"speculative": {"enforce_eager": True}}, 'leave "enforce_eager" out'),
        ((), {"speculative": {"parallel_drafting": True}}, "has no draft steps after the first"),
        ((), {"gpu": "sm_75,16GiB,8"}, "below 8.0"),
    ],
)
def test_why_not(words: tuple[str, ...], kwargs: dict[str, Any], text: str) -> None:
    assert text in why(*words, **kwargs)


def test_forced() -> None:
    forced = settings(drafting=True)
    assert why(*forced) == ""
    # Slower then, perhaps, but possible.
    assert why(*forced, "--enforce-eager") == ""
    assert "ranks' batches differ" in why(*forced, "-dp", "2")
    # A server with other settings than there are is refused, which drafter-setting says.
    assert why(*settings(drafting=3)) == ""


# -------------------------------------------------------------------- the drafter whole on a rank


@pytest.mark.parametrize(
    ("words", "speculative", "patches", "wanted"),
    [
        (TP8, ONE, ON, True),
        (TP8, {"draft_tensor_parallel_size": "1"}, ON, True),
        (TP8, {}, ON, False),
        (TP8, {"draft_tensor_parallel_size": 8}, ON, False),
        ((), ONE, ON, False),
        ((*TP8, "-dcp", "2"), ONE, ON, False),
        (TP8, ONE, {**ON, "replicated-drafter": False}, False),
    ],
)
def test_whether_it_is_replicated(
    words: tuple[str, ...], speculative: Any, patches: Any, wanted: bool
) -> None:
    given = subject("0.33.0", *words, speculative=speculative, patches=patches)
    assert run.is_replicated(given) is wanted
    assert run.drafter_parallel(given).tensor == (1 if wanted or not words else 8)


@pytest.mark.parametrize("drafter", ["mla", "llama"])
def test_what_it_takes(drafter: str) -> None:
    given, split = (
        subject("0.26.0", *TP8, drafter=drafter, speculative=keys, patches=ON, gpu=H200)
        for keys in (ONE, {})
    )
    assert given.pair is not None
    whole = sum(
        2 * wanted.shape[0] * (wanted.shape[1] if len(wanted.shape) > 1 else 1)
        for name, wanted in expected_tensors(given.pair.expected).items()
        if name not in ("d2t", "t2d")
    )
    assert memory.drafter_bytes(given)[0] == whole
    assert memory.drafter_bytes(split)[0] < whole / 2
    caches = [memory.kv_cache(s) for s in (given, split)]
    assert caches[0] is not None
    assert caches[1] is not None
    assert caches[0].target == caches[1].target
    ratio = caches[0].drafter / caches[1].drafter
    assert ratio == (1 if drafter == "mla" else min(8, given.pair.expected.num_kv_heads))
    for one in (given, split):
        one.weights = Weights(70 * 2**30, 554 * 2**30, estimated=False)
    finding = only(memory.findings(given), "memory-replicated-drafter")
    assert "whole on each of 8 ranks" in finding.fact
    assert ("in place of" in finding.fact.partition("KV cache")[2]) is (drafter == "llama")
    assert "memory-replicated-drafter" not in ids(memory.findings(split))


def test_a_draft_step_reads_all_of_it() -> None:
    read = {}
    for size in (1, 8):
        given = subject(
            "0.26.0",
            *TP8,
            drafter="llama",
            gpu=H200,
            patches=ON,
            speculative={"draft_tensor_parallel_size": size},
        )
        gpu, found = cost.machine(given), choices(given)
        assert gpu is not None
        assert found is not None
        work = cost.work_of(given, found, gpu)
        assert work is not None
        read[size] = work.drafter_bytes
    assert read[1] > 7 * read[8]


def test_heads_that_cannot_be_spread_may_be_whole() -> None:
    for keys, said in (({}, True), (ONE, False)):
        given = subject("0.26.0", *TP8, drafter="llama", patches=ON, speculative=keys)
        assert given.pair is not None
        given.pair = replace(given.pair, expected=replace(given.pair.expected, num_heads=60))
        assert ("run-heads" in ids(run.findings(given))) is said
