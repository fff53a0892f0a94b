# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks on two GPUs: the verify back-end, the loop, the replicated drafter.

    TOGETHER=5 python -m pytest -s tests/gpu/test_two_ranks.py     # vLLM 0.21 to 0.28 on CUDA
    LOSSLESS=rows.jsonl DRAFTING=rows.jsonl ...                    # rows, as the two files below

Not part of CI, which has no GPU. Engines and judges are those of test_lossless.py and of
test_drafting.py; here the drafter is spread over two ranks, which look for the best of their
columns of the head each and exchange one key a request, or it is whole on both of them
("draft_tensor_parallel_size": 1). The float32 reference is one rank, and so is the engine whose
share of accepted drafts is the measure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.gpu import test_drafting as drafting
from tests.gpu import test_lossless as lossless
from tests.gpu.test_drafting import Engine
from tests.gpu.test_lossless import Run

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2 and not drafting.ON_CPU, reason="needs two GPUs"
)

WHOLE = (("draft_tensor_parallel_size", 1),)
# Drafts a step, over one rank's. Two runs differ where a near tie went the other way.
FEWEST, MOST = 0.95, 1.05

FORMS = [(drafter, whole) for drafter in ("llama", "mla") for whole in (False, True)]
EACH = pytest.mark.parametrize(
    ("drafter", "whole"), FORMS, ids=[f"{d}-{'whole' if w else 'spread'}" for d, w in FORMS]
)


def run_of(drafter: str, whole: bool) -> Run:
    return Run(drafter=drafter, drafting="on", ranks=2, replicated=whole)


def engine_of(drafter: str, whole: bool) -> Engine:
    return Engine(drafter, None, WHOLE if whole else (), ranks=2)


PLAIN = [Run(ours=ours, ranks=ranks) for ours in ("off", "on") for ranks in (1, 2)]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> lossless.Engines:
    two = [run_of(*form) for form in FORMS]
    one = [replace(run, ranks=1) for run in two if not run.replicated]
    return lossless.Engines(tmp_path_factory.mktemp("lossless"), [*two, *one, *PLAIN])


@pytest.fixture(scope="session")
def proposers(tmp_path_factory: pytest.TempPathFactory) -> drafting.Engines:
    wanted = [engine_of(*form) for form in FORMS]
    return drafting.Engines(tmp_path_factory.mktemp("drafting"), wanted)


@pytest.fixture(scope="session", autouse=True)
def started(engines: lossless.Engines, proposers: drafting.Engines) -> None:
    """Both kinds begin to start at once."""


@EACH
def test_tokens_are_the_references(engines: lossless.Engines, drafter: str, whole: bool) -> None:
    """As much as those of stock on two ranks without drafts."""
    lossless.assert_lossless(engines, run_of(drafter, whole), Run(ours="off", ranks=2))


def test_tokens_without_drafts(engines: lossless.Engines) -> None:
    """With the plugin's attention alone, and stock's two ranks as one."""
    lossless.assert_lossless(engines, Run(ranks=2), Run(ours="off", ranks=2))
    lossless.assert_lossless(engines, Run(ours="off", ranks=2), Run(ours="off"))


@EACH
def test_as_many_drafts_as_one_rank(engines: lossless.Engines, drafter: str, whole: bool) -> None:
    one = lossless.accepted(engines, replace(run_of(drafter, False), ranks=1))
    two = lossless.accepted(engines, run_of(drafter, whole))
    print(drafter, whole, "drafts a step", one, two)
    assert FEWEST * one <= two <= MOST * one


@EACH
def test_verify_steps_and_proposals_are_whole_graphs(
    engines: lossless.Engines, drafter: str, whole: bool
) -> None:
    lossless.assert_whole_graphs(engines.run(run_of(drafter, whole)), by_loop=True)


@EACH
def test_the_loop_serves(proposers: drafting.Engines, drafter: str, whole: bool) -> None:
    seen = proposers.run(engine_of(drafter, whole))
    assert drafting.SERVES.search(seen.log)
    acts = Counter(one["act"] for one in seen.proposals())
    assert acts["whole"] > 50, acts
    assert acts["tail"] > 5, acts
    assert acts["stock"] == 0, acts


@EACH
@pytest.mark.parametrize("wave", drafting.WAVES)
def test_drafts_are_stocks(
    proposers: drafting.Engines, drafter: str, whole: bool, wave: str
) -> None:
    """From the same inputs, by vLLM's own loop over the same drafter on the same two ranks."""
    drafting.assert_stocks(proposers.run(engine_of(drafter, whole)).proposals(wave))


@EACH
def test_ranks_draft_the_same(proposers: drafting.Engines, drafter: str, whole: bool) -> None:
    seen = proposers.run(engine_of(drafter, whole))
    assert {name: wave["parted"] for name, wave in seen.waves.items()} == dict.fromkeys(
        drafting.WAVES, 0
    )


@EACH
def test_counts_are_the_references(proposers: drafting.Engines, drafter: str, whole: bool) -> None:
    drafting.assert_counts(proposers, engine_of(drafter, whole))
