# SPDX-License-Identifier: Apache-2.0
"""Fixtures: the host, the expected results, and engine runs that tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.assets import variants

from . import harness, images, matrix
from .harness import Run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--everything", action="store_true", help="also what takes minutes, as `make hosts` does"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "scenario(name): a row of tests/hosts/matrix.py")


def pytest_report_header() -> str:
    return f"host: vLLM {harness.host_release()}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("scenario"):
        row, host = matrix.SCENARIOS[marker.args[0]], harness.host_release()
        reason = row.absent_on(host)
        if reason is None and host in row.rarely and not item.config.getoption("everything", False):
            reason = "takes minutes: runs with --everything, as `make hosts` has it"
        if reason is not None:
            pytest.skip(f"{marker.args[0]}: {reason}")


@pytest.fixture(scope="session")
def host() -> str:
    """The vLLM release under test."""
    return harness.host_release()


@pytest.fixture(scope="session")
def expected() -> dict[str, Any]:
    """What the plain-torch reference does."""
    return variants.load_expected()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids of the prompts of `expected`."""
    return [prompt["token_ids"] for prompt in variants.load_prompts()]


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for this session, whichever of pytest-xdist's processes asks."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def cache(session_folder: Path) -> Path:
    """vLLM's and the compilers' caches: of this session only, so that nothing is stale."""
    return session_folder / "cache"


RunJobs = Callable[..., Run]
Offline = Callable[..., Run]


@pytest.fixture(scope="session")
def run_jobs(session_folder: Path, cache: Path) -> RunJobs:
    """Runs jobs of `offline.py` in one process, once per name: later calls share the run.

    `run_jobs(name, jobs, mla=False, env={...})`.
    """

    def run(
        name: str,
        jobs: list[dict[str, Any]],
        *,
        mla: bool = False,
        env: dict[str, str] | None = None,
    ) -> Run:
        ranks = max(job["engine"].get("tensor_parallel_size", 1) for job in jobs)
        environment = harness.environment(cache, mla=mla, tensor_parallel_size=ranks, **(env or {}))
        return harness.shared_run(
            jobs, environment, session_folder / "runs", name.replace(" ", "-")
        )

    return run


@pytest.fixture(scope="session")
def offline(run_jobs: RunJobs, prompts: list[list[int]], expected: dict[str, Any]) -> Offline:
    """Runs one engine over the prompts, once per name.

    `offline(name, mla=False, env={...}, probe=False, afterwards=[], **engine_arguments)`.
    """

    def run(
        name: str,
        *,
        mla: bool = False,
        env: dict[str, str] | None = None,
        probe: bool = False,
        afterwards: Sequence[dict[str, str]] = (),
        **arguments: Any,
    ) -> Run:
        job = {
            "engine": harness.engine_arguments(**arguments),
            "prompts": prompts,
            "max_tokens": expected["max_tokens"],
            "afterwards": list(afterwards),
            "probe": probe,
        }
        return run_jobs(name, [job], mla=mla, env=env)

    return run


@pytest.fixture(scope="session")
def without(offline: Offline) -> Run:
    """The engine without speculation; `afterwards` it answers `CHATS`."""
    return offline("without", afterwards=CHATS)


@pytest.fixture(scope="session")
def with_llama(offline: Offline) -> Run:
    """The engine with the Llama drafter, k=3; `afterwards` it answers `CHATS`."""
    return offline("llama", drafter=harness.LLAMA_DRAFTER, probe=True, afterwards=CHATS)


TEXT_CHAT, IMAGE_CHAT = CHATS = [
    {"text": images.rendered("Name the licence.")},
    {"text": images.rendered("What is this?", image=True), "png": images.PNG},
]


def expected_counts(
    drafter: Path, k: int = 3, aux_layer_ids: Sequence[int] = (2, 4, 5)
) -> dict[str, Any]:
    """The reference's counters for a drafter, k drafts a step, and aux layers."""
    row = variants.expected_run(drafter.name, k, aux_layer_ids)
    return {name: row[name] for name in harness.COUNTERS}
