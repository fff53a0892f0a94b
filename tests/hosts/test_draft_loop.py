# SPDX-License-Identifier: Apache-2.0
"""The V1 drafting loop in whole engines: its drafts are the reference's, and stock's.

Both loops run over one paged cache, the shim's, so that a difference is the loop's. On the CPU
there are no CUDA graphs: the same code runs launch by launch, in Triton's interpreter.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from . import harness
from .conftest import Offline, RunJobs, expected_counts
from .harness import LLAMA_DRAFTER, Run
from .matrix import scenario
from .test_parity import assert_parity

pytestmark = scenario("drafting loop")

PAGED = {
    "CPU_PAGED_ATTENTION": "1",
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # A line for each proposal.
    "VLLM_LOGGING_LEVEL": "DEBUG",
}
ACT = re.compile(r"drafting: (whole|tail|stock) of (\d+) requests, (\d+) tokens")
SERVES = "drafting: the plugin's loop serves, without CUDA graphs"


def drafting(value: bool) -> dict[str, Any]:
    return {"additional_config": {"kimi_eagle3": {"drafting": value}}}


def acts(log: str) -> Counter[tuple[str, int]]:
    """How many proposals of how many requests were served by what."""
    return Counter((act, int(requests)) for act, requests, _ in ACT.findall(log))


@pytest.fixture(scope="module")
def looped(offline: Offline) -> Run:
    return offline("drafting loop", drafter=LLAMA_DRAFTER, env=PAGED, **drafting(True))


def test_drafts_and_tokens_are_the_references(looped: Run, expected: dict[str, Any]) -> None:
    assert_parity(looped, expected, expected_counts(LLAMA_DRAFTER))


def test_the_log_says_what_served(looped: Run) -> None:
    assert looped.tokens
    assert looped.log.count(SERVES) == 1
    assert "vLLM's own" not in looped.log
    served = acts(looped.log)
    # Prompts by stock's first pass, verify steps as a whole; nothing by stock alone.
    assert {act for act, _ in served} == {"whole", "tail"}
    assert sum(count for (act, _), count in served.items() if act == "whole") > 30


LIMIT = 88
# Tokens of the expected output that are part of the prompt: such requests end at the limit.
GIVEN = (0, 16, 0, 8, 0, 12, 0)
COMPARED = re.compile(r"drafts of (\d+) requests: (.*)")


def test_each_proposal_is_stocks(
    run_jobs: RunJobs, prompts: list[list[int]], expected: dict[str, Any]
) -> None:
    """Requests come and go, over pages and up to the length limit."""
    outputs = expected["output_token_ids"]
    job = {
        "engine": harness.engine_arguments(
            drafter=LLAMA_DRAFTER,
            max_model_len=LIMIT,
            # A prompt is computed in pieces beside those that verify.
            max_num_batched_tokens=LIMIT,
            block_size=32,
            **drafting(True),
        ),
        "prompts": [prompts[i] + outputs[i][:given] for i, given in enumerate(GIVEN)],
        "max_tokens": LIMIT - len(prompts[0]),
    }
    run = run_jobs("drafting loop, short", [job], env={**PAGED, "COMPARE_DRAFTS": "1"})
    for i, given in enumerate(GIVEN):
        assert run.tokens[i] == outputs[i][given : LIMIT - len(prompts[i])]
    compared = COMPARED.findall(run.log)
    assert [line for line in compared if line[1] != "as stock's"] == []
    served = acts(run.log)
    assert {act for act, _ in served} == {"whole", "tail"}
    assert sum(served.values()) == len(compared)
    # Full batches, and some with a row of padding.
    assert {requests for _, requests in served} >= {3, 4}


@scenario("drafting loop: two ranks")
@pytest.mark.parametrize("ranks", ["split", "whole on each"])
def test_two_ranks(
    run_jobs: RunJobs, prompts: list[list[int]], expected: dict[str, Any], ranks: str
) -> None:
    """Each finds the best of its columns of the head and they exchange a key a request; or each
    has the whole drafter, and nothing is exchanged."""
    tokens = 24
    engine = harness.engine_arguments(
        drafter=LLAMA_DRAFTER, tensor_parallel_size=2, **drafting(True)
    )
    if ranks != "split":
        engine["speculative_config"]["draft_tensor_parallel_size"] = 1
    job = {"engine": engine, "prompts": prompts[:2], "max_tokens": tokens}
    run = run_jobs(f"drafting loop, {ranks}", [job], env={**PAGED, "COMPARE_DRAFTS": "1"})
    assert run.tokens == [output[:tokens] for output in expected["output_token_ids"][:2]]
    assert run.log.count(SERVES) == 1
    assert {act for act, _ in acts(run.log)} == {"whole", "tail"}
    # The ranks' lines may run into each other.
    assert len(re.findall(r"drafts of \d+ requests: as stock's", run.log)) >= 10
    assert re.findall(r"drafts of \d+ requests: (?!as stock's)", run.log) == []
    assert ("replicated drafter: " in run.log) == (ranks != "split")


def test_stocks_loop_serves_where_it_is_not_asked_for(with_llama: Run) -> None:
    """On the CPU the plugin's would not be ahead."""
    assert with_llama.tokens
    assert with_llama.log.count("drafting: vLLM's own loop serves: there is no GPU") == 1
