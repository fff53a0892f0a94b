# SPDX-License-Identifier: Apache-2.0
"""A drafter that is whole on each of two real ranks (gloo): `"draft_tensor_parallel_size": 1`.

Tokens, drafts and accepted tokens are the reference's, which is one rank, and no method of the
drafter asks the target's group for a collective. Stock accepts the key and splits the drafter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import harness
from .conftest import expected_counts
from .harness import LLAMA_DRAFTER, MLA_DRAFTER
from .matrix import scenario

PROBE = harness.HERE / "replicated_probe.py"
TIMEOUT = 3 * harness.START_TIMEOUT
PATCH = "replicated-drafter"


def job(
    prompts: list[list[int]], expected: dict[str, Any], drafter: Path, disable: str = ""
) -> dict[str, Any]:
    """Two ranks and a drafter that is to be on one."""
    engine = harness.engine_arguments(drafter=drafter, tensor_parallel_size=2)
    engine["speculative_config"]["draft_tensor_parallel_size"] = 1
    return {
        "engine": engine,
        "prompts": prompts,
        "max_tokens": expected["max_tokens"],
        "disable": disable,
    }


def assert_replicated(found: dict[str, Any], expected: dict[str, Any], drafter: Path) -> None:
    """The tokens and counters of one rank, from two that each have all of the drafter."""
    assert "error" not in found, found
    assert found["tokens"] == expected["output_token_ids"]
    counts = expected_counts(drafter)
    assert {name: found["counts"][name] for name in counts} == counts
    assert len(found["workers"]) == 2
    for worker in found["workers"]:
        assert worker["tp"] == 1
        assert worker["collectives"]["calls"] > 0
        assert worker["collectives"]["drafter"] == 0
        # Its metadata is built by itself, and for all of its heads.
        assert len(worker["layers"]) == 1
        assert worker["builder"] in (None, worker["heads"])
    first, second = (worker["shapes"] for worker in found["workers"])
    assert first == second


@pytest.fixture(scope="module")
def llama(
    prompts: list[list[int]],
    expected: dict[str, Any],
    cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """With the patch and without, on the V1 runner."""
    jobs = {
        "replicated": job(prompts, expected, LLAMA_DRAFTER),
        "stock": job(prompts, expected, LLAMA_DRAFTER, disable=PATCH),
    }
    folder = tmp_path_factory.mktemp("replicated")
    return harness.run_probe(PROBE, jobs, folder, cache, TIMEOUT, tensor_parallel_size=2)


@scenario("replicated drafter")
def test_stock_accepts_the_key_and_splits_the_drafter(llama: dict[str, Any]) -> None:
    found = llama["stock"]
    assert "error" not in found, found
    for worker in found["workers"]:
        assert worker["tp"] == 2
        assert worker["collectives"]["drafter"] > 0
        assert worker["heads"] * 2 == llama["replicated"]["workers"][0]["heads"]
    whole, part = (llama[name]["workers"][0]["shapes"] for name in ("replicated", "stock"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert whole[name][0] == 2 * part[name][0]


@scenario("replicated drafter")
def test_a_llama_drafter(llama: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_replicated(llama["replicated"], expected, LLAMA_DRAFTER)
    assert llama["replicated"]["workers"][0]["kv_heads"] == 2


@scenario("replicated drafter: V2 runner")
def test_on_the_v2_runner(
    prompts: list[list[int]], expected: dict[str, Any], cache: Path, tmp_path: Path
) -> None:
    jobs = {"replicated": job(prompts, expected, LLAMA_DRAFTER)}
    found = harness.run_probe(
        PROBE, jobs, tmp_path / "run", cache, TIMEOUT, tensor_parallel_size=2, **harness.V2_RUNNER
    )
    assert_replicated(found["replicated"], expected, LLAMA_DRAFTER)


@scenario("replicated drafter: MLA")
def test_an_mla_drafter(
    prompts: list[list[int]], expected: dict[str, Any], cache: Path, tmp_path: Path
) -> None:
    """All heads on each rank, beside a target that has half of its own there."""
    jobs = {"replicated": job(prompts, expected, MLA_DRAFTER)}
    found = harness.run_probe(
        PROBE, jobs, tmp_path / "run", cache, TIMEOUT, mla=True, tensor_parallel_size=2
    )
    assert_replicated(found["replicated"], expected, MLA_DRAFTER)
