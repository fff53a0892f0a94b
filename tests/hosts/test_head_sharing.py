# SPDX-License-Identifier: Apache-2.0
"""Whose embedding and head a drafter uses is the same on every rank.

The proposer's own method runs on stand-ins for two ranks, whose shards of the head are equal on the
first and not on the second: what stock compares, each rank for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .matrix import scenario

pytestmark = scenario("heads")


@pytest.fixture
def patched() -> Iterator[None]:
    from vllm_kimi_eagle3.patches import head_sharing

    undo = head_sharing._install_both()
    assert head_sharing._both_in_place()
    yield
    undo()


def rank(own: torch.Tensor, decisions: dict[str, str] | None) -> tuple[Any, Any]:
    """A rank's drafter with a head of its own, and its target."""
    config = SimpleNamespace() if decisions is None else SimpleNamespace(kimi_eagle3=decisions)
    drafter = SimpleNamespace(
        config=config,
        has_own_lm_head=True,
        lm_head=SimpleNamespace(weight=own),
        model=SimpleNamespace(layers=[]),
    )
    head = SimpleNamespace(weight=torch.ones(4, 2))
    return drafter, SimpleNamespace(lm_head=head, model=SimpleNamespace())


def shared_on_v1(own: torch.Tensor, decisions: dict[str, str] | None) -> bool:
    from vllm_kimi_eagle3.patches.head_sharing import _v1_class

    drafter, target = rank(own, decisions)
    proposer = SimpleNamespace(
        model=drafter,
        use_local_argmax_reduction=False,
        vllm_config=SimpleNamespace(speculative_config=None),
    )
    _v1_class()._maybe_share_lm_head(proposer, target)
    return drafter.lm_head is target.lm_head


RANKS = (torch.ones(4, 2), torch.zeros(4, 2))


def test_stock_lets_each_rank_decide() -> None:
    assert [shared_on_v1(own, None) for own in RANKS] == [True, False]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(
    ("decisions", "shared"),
    [({"head": "own"}, False), ({"head": "target"}, True), ({}, False)],
    ids=str,
)
def test_every_rank_follows_the_decision(decisions: dict[str, str], shared: bool) -> None:
    """Without a decision, because the weights were not here, what was loaded is kept."""
    assert [shared_on_v1(own, decisions) for own in RANKS] == [shared, shared]


@pytest.mark.usefixtures("patched")
def test_another_models_drafter_is_compared_as_before() -> None:
    assert [shared_on_v1(own, None) for own in RANKS] == [True, False]


@scenario("heads: V2 runner")
@pytest.mark.usefixtures("patched")
def test_the_v2_runner_follows_it_too() -> None:
    from vllm.v1.worker.gpu.spec_decode.eagle import utils

    for decisions, expected in (({"head": "own"}, [False] * 2), ({"head": "target"}, [True] * 2)):
        found = []
        for own in RANKS:
            drafter, target = rank(own, decisions)
            found.append(
                utils._should_share(drafter, "has_own_lm_head", drafter.lm_head, target.lm_head)
            )
        assert found == expected
