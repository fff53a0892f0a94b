# SPDX-License-Identifier: Apache-2.0
"""Every patch against every supported release, from the snapshots of their sources.

``tools/contract.py`` takes the snapshots. A new release shows here what moved: add it to
``SUPPORTED``, run the tool, and read which of these tests fail.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version

from vllm_kimi_eagle3.contract import Shape, known_shapes
from vllm_kimi_eagle3.host import SUPPORTED
from vllm_kimi_eagle3.patches import PATCHES
from vllm_kimi_eagle3.patches.base import Patch

HERE = Path(__file__).parent
ON_EVERY_RELEASE = pytest.mark.parametrize("release", SUPPORTED)
EVERY_PATCH = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)


def snapshot(release: str) -> dict[str, Any]:
    return json.loads((HERE / "snapshots" / f"{release}.json").read_text())


def tool() -> ModuleType:
    path = HERE.parents[1] / "tools" / "contract.py"
    spec = importlib.util.spec_from_file_location("contract_tool", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["contract_tool"] = module
    spec.loader.exec_module(module)
    return module


def test_there_is_a_snapshot_of_each_supported_release_and_of_no_other() -> None:
    assert {path.stem for path in (HERE / "snapshots").glob("*.json")} == set(SUPPORTED)


@ON_EVERY_RELEASE
def test_a_snapshot_has_every_symbol_that_a_patch_relies_on(release: str) -> None:
    taken = snapshot(release)
    assert taken["release"] == release
    assert set(taken["symbols"]) == {s.target for patch in PATCHES for s in patch.symbols}
    assert set(taken["gaps"]) == {patch.id for patch in PATCHES}


@EVERY_PATCH
@ON_EVERY_RELEASE
def test_a_patch_is_for_the_releases_that_have_its_gap(patch: Patch, release: str) -> None:
    assert snapshot(release)["gaps"][patch.id] == (release in patch.releases)


@pytest.mark.parametrize(
    ("patch", "release"),
    [(patch, release) for patch in PATCHES for release in patch.releases],
    ids=lambda value: getattr(value, "id", value),
)
def test_the_contract_holds_on_the_patchs_releases(patch: Patch, release: str) -> None:
    """Every symbol is there, and the package knows it as the release has it."""
    symbols = snapshot(release)["symbols"]
    for symbol in patch.symbols:
        taken = symbols[symbol.target]
        if not symbol.expected_in(Version(release)):
            assert taken is None, symbol.target
            continue
        assert taken is not None, symbol.target
        known = known_shapes()[release][symbol.target]
        assert known == Shape(taken["signature"], taken["digest"])


def test_what_the_package_knows_is_what_the_snapshots_say() -> None:
    expected = tool().known_shapes([snapshot(release) for release in SUPPORTED])
    written = json.loads((HERE.parents[1] / "vllm_kimi_eagle3" / "releases.json").read_text())
    assert written == expected, "run tools/contract.py"
