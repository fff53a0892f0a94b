# SPDX-License-Identifier: Apache-2.0
"""A drafter folder that cannot be one: one line names the folder and the flag."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.assets import variants

from . import harness
from .conftest import RunJobs
from .harness import LLAMA_DRAFTER, Run
from .matrix import scenario

pytestmark = scenario("bad input")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind."""
    root = tmp_path_factory.mktemp("drafters")
    (root / "empty").mkdir()
    variants.copy_drafter(LLAMA_DRAFTER, root / "broken")
    (root / "broken" / "config.json").write_text("{")
    variants.copy_drafter(
        LLAMA_DRAFTER,
        root / "other-method",
        {"architectures": ["EagleLlamaForCausalLM"]},
        remove=("draft_vocab_size", "eagle_config"),
    )
    folders = {name: root / name for name in ("missing", "empty", "broken", "other-method")}
    return {**folders, "target": harness.TARGET}


@pytest.fixture(scope="module")
def refusals(folders: dict[str, Path], run_jobs: RunJobs) -> Run:
    """One process that tries them all."""
    jobs = [
        {"engine": harness.engine_arguments(drafter=folder), "prompts": [], "max_tokens": 1}
        for folder in folders.values()
    ]
    return run_jobs("bad drafters", jobs)


@pytest.mark.parametrize(
    ("case", "fact"),
    [
        ("missing", "does not exist"),
        ("empty", "holds no config.json"),
        ("broken", "holds no valid JSON"),
        ("other-method", "is not the config of an EAGLE-3 drafter"),
        ("target", "is not the config of an EAGLE-3 drafter"),
    ],
)
def test_one_clear_line(refusals: Run, folders: dict[str, Path], case: str, fact: str) -> None:
    at = list(folders).index(case)
    assert len(refusals.results) == len(folders), refusals.tail()
    message = refusals.results[at]["error"]["message"]
    (line,) = [line for line in message.splitlines() if "speculative-config" in line]
    assert str(folders[case]) in line
    assert fact in line
