# SPDX-License-Identifier: Apache-2.0
"""A request longer than the drafter reaches, beside one that is not.

Counters are of the whole engine; what each request adds to them is the reference's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.assets import variants
from tests.reference.drafter import load_drafter
from tests.reference.speculate import (
    ReferenceDrafter,
    ReferenceTarget,
    SpeculationCounts,
    speculate,
)
from tests.reference.target import load_target

from . import harness
from .conftest import RunJobs
from .harness import LLAMA_DRAFTER, Run
from .matrix import scenario

REACH = 64  # Positions that the drafter has.
K = 3
MAX_TOKENS = 40
LONG, SHORT = 50, 8  # Tokens of the prompts.


class StopsDrafting:
    """A `DraftSession` that drafts only while `K` more tokens fit into `limit`.

    With asynchronous scheduling that is decided while the last step's outcome is not known: all
    that it verifies counts as accepted.
    """

    def __init__(self, drafter: ReferenceDrafter, limit: int, asynchronous: bool) -> None:
        self._drafter = drafter
        self._limit = limit
        self._asynchronous = asynchronous
        self._length = 1  # Tokens so far: those that were given, and the one after them.
        self._at_most = 0  # As many as there can be, as the scheduler knows it.
        self.num_stopped = 0

    def propose(
        self, next_token_ids: Sequence[int], aux_hidden_states: Tensor, num_speculative_tokens: int
    ) -> list[int]:
        self._length += len(next_token_ids)
        at_most = max(self._length, self._at_most) if self._asynchronous else self._length
        drafts = self._drafter.propose(next_token_ids, aux_hidden_states, num_speculative_tokens)
        if at_most + num_speculative_tokens > self._limit:
            drafts = []
            self.num_stopped += 1
        self._at_most = self._length + 1 + len(drafts)
        return drafts


@pytest.fixture(scope="module")
def two_prompts(prompts: list[list[int]]) -> list[list[int]]:
    """One that passes the drafter's reach within a few steps, and one that never does."""
    assert LONG + MAX_TOKENS > REACH > SHORT + MAX_TOKENS + K
    return [prompts[0][:LONG], prompts[1][:SHORT]]


def expected(
    drafter: Path, prompts: list[list[int]], limit: int, asynchronous: bool = False
) -> tuple[list[list[int]], list[SpeculationCounts]]:
    """The tokens of each prompt, and what each adds to the counters."""
    target = load_target(harness.TARGET)
    model = load_drafter(drafter, target)
    tokens, counts = [], []
    for prompt in prompts:
        session = StopsDrafting(ReferenceDrafter(model), limit, asynchronous)
        done = speculate(ReferenceTarget(target, (2, 4, 5)), session, prompt, K, MAX_TOKENS)
        # A step without drafts counts as none.
        done.counts.num_drafts -= session.num_stopped
        tokens.append(done.output_token_ids)
        counts.append(done.counts)
    return tokens, counts


def counted(counts: Sequence[SpeculationCounts]) -> dict[str, Any]:
    total = SpeculationCounts.zero(K)
    for one in counts:
        total.add(one)
    return {name: getattr(total, name) for name in harness.COUNTERS}


@pytest.fixture(scope="module")
def yarn_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter whose table of cos and sin has 16 * 4 positions."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": REACH // 4}
    return variants.copy_drafter(
        LLAMA_DRAFTER,
        tmp_path_factory.mktemp("lengths") / "yarn",
        {"rope_scaling": yarn, "max_position_embeddings": REACH},
    )


@pytest.fixture(scope="module")
def plain_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of plain rope, whose config.json names as many positions."""
    return variants.copy_drafter(
        LLAMA_DRAFTER,
        tmp_path_factory.mktemp("lengths") / "plain",
        {"max_position_embeddings": REACH},
    )


def run_both(
    run_jobs: RunJobs,
    name: str,
    drafter: Path,
    prompts: list[list[int]],
    env: dict[str, str] | None = None,
    **arguments: Any,
) -> Run:
    engine = harness.engine_arguments(drafter=drafter, k=K, **arguments)
    job = {"engine": engine, "prompts": prompts, "max_tokens": MAX_TOKENS}
    return run_jobs(name, [job], env=env)


@scenario("lengths")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_where_the_rope_ends_one_request_stops(
    run_jobs: RunJobs, yarn_drafter: Path, two_prompts: list[list[int]], asynchronous: bool
) -> None:
    tokens, counts = expected(yarn_drafter, two_prompts, REACH, asynchronous)
    _, unlimited = expected(yarn_drafter, two_prompts, 10**6)
    assert 0 < counts[0].num_drafts < unlimited[0].num_drafts
    assert counts[1] == unlimited[1]
    assert counts[1].num_drafts > counts[0].num_drafts  # It goes on after the other has stopped.
    name = f"lengths {'async' if asynchronous else 'sync'}"
    run = run_both(run_jobs, name, yarn_drafter, two_prompts, async_scheduling=asynchronous)
    assert run.tokens == tokens
    assert run.counts == counted(counts)


@scenario("lengths: v2 runner")
def test_where_the_rope_ends_on_the_v2_runner(
    run_jobs: RunJobs, yarn_drafter: Path, two_prompts: list[list[int]]
) -> None:
    tokens, counts = expected(yarn_drafter, two_prompts, REACH, asynchronous=True)
    env = harness.V2_RUNNER
    run = run_both(
        run_jobs, "lengths v2", yarn_drafter, two_prompts, env=env, async_scheduling=True
    )
    assert run.tokens == tokens
    assert run.counts == counted(counts)


@scenario("lengths")
def test_where_the_rope_goes_on_no_request_stops(
    run_jobs: RunJobs, plain_drafter: Path, two_prompts: list[list[int]]
) -> None:
    tokens, counts = expected(plain_drafter, two_prompts, 10**6)
    run = run_both(run_jobs, "lengths plain", plain_drafter, two_prompts)
    assert run.tokens == tokens
    assert run.counts == counted(counts)


@scenario("lengths: stock")
def test_stock_stops_the_whole_batch(
    run_jobs: RunJobs, plain_drafter: Path, two_prompts: list[list[int]]
) -> None:
    """The fault: the short request has nothing accepted once the other is too long."""
    tokens, (_, short) = expected(plain_drafter, two_prompts, REACH)
    env = {"VLLM_KIMI_EAGLE3_DISABLE": "drafter-positions,drafter-length"}
    run = run_both(run_jobs, "lengths stock", plain_drafter, two_prompts, env=env)
    assert run.tokens == tokens
    assert run.counts["num_accepted_tokens"] < short.num_accepted_tokens
