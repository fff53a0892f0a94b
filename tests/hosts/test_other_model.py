# SPDX-License-Identifier: Apache-2.0
"""A model that is no Kimi: a tiny Llama with its own EAGLE-3 drafter, with and without the plugin.

Nothing may differ: tokens, counters, classes, registry, lines in the log, and every part of the key
under which vLLM caches compiled code (the config's hash, and the environment's factors, which
include every variable name that vLLM knows).
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.assets import variants

from . import harness
from .conftest import Offline
from .harness import Run
from .matrix import BACKPORT, scenario

pytestmark = scenario("other model")


@pytest.fixture(scope="module")
def pair(offline: Offline, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The runs without and with the plugin."""
    target, drafter = variants.write_llama_pair(tmp_path_factory.mktemp("llama"))
    engine: dict[str, Any] = {"target": target, "drafter": drafter, "probe": True}
    without = offline("llama pair without", env={"VLLM_PLUGINS": harness.SHIM_PLUGINS}, **engine)
    with_plugin = f"{harness.SHIM_PLUGINS},{harness.PLUGIN}"
    return without, offline("llama pair with", env={"VLLM_PLUGINS": with_plugin}, **engine)


def test_plugin_was_loaded_in_one_of_them(pair: tuple[Run, Run]) -> None:
    without, with_plugin = pair
    assert without.worker["plugin_modules"] == []
    assert "vllm_kimi_eagle3.patches" in with_plugin.worker["plugin_modules"]


def test_same_tokens_and_counters(pair: tuple[Run, Run]) -> None:
    without, with_plugin = pair
    assert with_plugin.tokens == without.tokens
    assert with_plugin.counts == without.counts
    assert without.counts["num_drafts"] > 0


@pytest.mark.parametrize("what", ["target", "drafter", "runner"])
def test_same_classes(pair: tuple[Run, Run], what: str) -> None:
    without, with_plugin = pair
    assert with_plugin.worker[what] == without.worker[what]


def test_registry_has_stocks_entries_and_names_that_stock_lacks(pair: tuple[Run, Run]) -> None:
    stock, ours = (run.worker["registered"] for run in pair)
    assert {name: ours.get(name) for name in stock} == stock
    added = {"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"}
    assert set(ours) - set(stock) == (added if harness.host_release() in BACKPORT else set())


@pytest.mark.parametrize("what", ["config_hash", "compile_factors"])
def test_same_compile_cache_key(pair: tuple[Run, Run], what: str) -> None:
    without, with_plugin = (run.worker[what] for run in pair)
    if what == "compile_factors":
        # Differs by what this test sets, and nothing else.
        without.pop("VLLM_PLUGINS", None), with_plugin.pop("VLLM_PLUGINS", None)
    assert with_plugin == without


def test_no_line_of_ours(pair: tuple[Run, Run]) -> None:
    _, with_plugin = pair
    ours = [line for line in with_plugin.log.splitlines() if re.search("kimi.eagle3", line, re.I)]
    # vLLM itself may print the list of plugins that it loads.
    assert [line for line in ours if "[__init__.py" not in line] == []


def test_no_model_class_imported(pair: tuple[Run, Run]) -> None:
    _, with_plugin = pair
    for process, modules in with_plugin.imports.items():
        assert [m for m in modules if ".models." in m] == [], process
