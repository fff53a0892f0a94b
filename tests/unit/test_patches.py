# SPDX-License-Identifier: Apache-2.0
"""Deciding and applying, with patches on a stand-in for upstream: a source tree made here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3 import contract, patches
from vllm_kimi_eagle3.contract import Sources, Symbol
from vllm_kimi_eagle3.host import SUPPORTED, Host
from vllm_kimi_eagle3.patches import State, apply, revert
from vllm_kimi_eagle3.patches.base import Action, NotNeededError, Patch, decide, set_attribute
from vllm_kimi_eagle3.settings import Settings

STOCK = "def gap(x):\n    return x\n"
FIXED = "def gap(x):\n    return x + 1  # fixed\n"
TARGET = "vllm.m:gap"


def host(root: Path, version: str, source: str | None = STOCK) -> Host:
    if source is not None:
        (root / "m.py").write_text(source)
    return Host(root=root, distributions=(("vllm", version),), version_text=version)


@pytest.fixture
def upstream() -> SimpleNamespace:
    return SimpleNamespace(value="stock")


@pytest.fixture
def patch(upstream: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Patch:
    """A patch for 0.15.1 to 0.17.1, whose known source is :data:`STOCK`."""
    (tmp_path / "m.py").write_text(STOCK)
    shape = Sources(tmp_path).shape(TARGET)
    assert shape is not None
    known = {r: ({TARGET: shape} if r < "0.18" else {}) for r in SUPPORTED}
    monkeypatch.setattr(patches.base, "known_shapes", lambda: known)
    monkeypatch.setattr(patches, "_undo", {})
    return Patch(
        id="first",
        gap="The gap.",
        target=TARGET,
        since="0.15.1",
        before="0.18",
        does="Closes it.",
        upstream=("https://example.org/pull/1",),
        goes="with 0.17",
        symbols=(Symbol(TARGET, "body"),),
        open_in=lambda sources: "fixed" not in (sources.module("vllm.m") or ("fixed",))[0],
        install=lambda: set_attribute(upstream, "value", "ours"),
        verify=lambda: upstream.value == "ours",
    )


def action(patch: Patch, host: Host) -> Action:
    return decide(patch, host, Sources(host.root)).action


@pytest.mark.parametrize(
    ("version", "source", "expected"),
    [
        ("0.15.1", STOCK, Action.APPLY),
        ("0.17.1+cu129", STOCK, Action.APPLY),
        ("0.18.1", STOCK, Action.NOT_NEEDED),  # By its number: the source is not read.
        ("0.17.1", STOCK.replace("x", "y"), Action.STAND_DOWN),
        ("0.17.1", FIXED, Action.NOT_NEEDED),
        ("0.17.1", None, Action.STAND_DOWN),
        ("0.17.2", STOCK, Action.APPLY),  # Not a tested release; its source is known.
        ("0.18.0.dev3+gabc", STOCK, Action.APPLY),
        ("0.18.0.dev3+gabc", FIXED, Action.NOT_NEEDED),
        ("0.34.0", STOCK.replace("x", "y"), Action.STAND_DOWN),
        ("0.1.dev1+gabc", STOCK, Action.APPLY),  # A shallow clone's version says nothing.
        ("dev", STOCK, Action.APPLY),
        ("", STOCK.replace("x", "y"), Action.STAND_DOWN),
        ("0.14.0", STOCK, Action.STAND_DOWN),
        ("0.9.2", STOCK, Action.STAND_DOWN),
    ],
)
def test_the_version_is_a_hint_and_the_source_decides(
    patch: Patch, tmp_path: Path, version: str, source: str | None, expected: Action
) -> None:
    (tmp_path / "m.py").unlink()
    if source is None:
        patch = replace(patch, open_in=lambda sources: True)
    assert action(patch, host(tmp_path, version, source)) is expected


def test_a_decision_names_version_and_symbol(patch: Patch, tmp_path: Path) -> None:
    changed = host(tmp_path, "0.17.1", STOCK.replace("x", "y"))
    reason = decide(patch, changed, Sources(tmp_path)).reason
    assert "vllm 0.17.1" in reason
    assert TARGET in reason
    untested = decide(patch, host(tmp_path, "0.17.9"), Sources(tmp_path)).reason
    assert "untested" in untested


def test_a_supported_release_without_the_gap_costs_no_reading(patch: Patch, tmp_path: Path) -> None:
    def fail(sources: Sources) -> bool:
        raise AssertionError("read")

    assert action(replace(patch, open_in=fail), host(tmp_path, "0.32.0")) is Action.NOT_NEEDED


@given(st.text(max_size=12))
def test_any_version_is_decided(version: str) -> None:
    some = Host(root=Path("nowhere"), distributions=(), version_text=version)
    for each in patches.PATCHES:
        decision = decide(each, some, Sources(some.root))
        assert decision.action is not Action.APPLY
        assert decision.reason


def test_apply_verify_revert(patch: Patch, tmp_path: Path, upstream: SimpleNamespace) -> None:
    here = host(tmp_path, "0.17.1")
    (status,) = apply(here, patches=[patch])
    assert (status.state, status.verified, upstream.value) == (State.APPLIED, True, "ours")
    revert([patch])
    assert upstream.value == "stock"
    revert([patch])
    assert upstream.value == "stock"


def test_apply_twice_installs_once(patch: Patch, tmp_path: Path, upstream: SimpleNamespace) -> None:
    count: list[int] = []

    def install() -> Any:
        count.append(1)
        return set_attribute(upstream, "value", "ours")

    counted = replace(patch, install=install)
    for _ in range(3):
        (status,) = apply(host(tmp_path, "0.17.1"), patches=[counted])
        assert status.state is State.APPLIED
    assert count == [1]


def test_what_is_not_in_place_is_reported_and_taken_back(
    patch: Patch, tmp_path: Path, upstream: SimpleNamespace
) -> None:
    (status,) = apply(host(tmp_path, "0.17.1"), patches=[replace(patch, verify=lambda: False)])
    assert (status.state, status.verified, upstream.value) == (State.FAILED, False, "stock")


def test_an_exception_is_a_status(patch: Patch, tmp_path: Path) -> None:
    def install() -> Any:
        raise ImportError("no such module\nhere")

    (status,) = apply(host(tmp_path, "0.17.1"), patches=[replace(patch, install=install)])
    assert status.state is State.FAILED
    assert "ImportError: no such module" in status.reason


@pytest.mark.parametrize("at", ["install", "verify"])
def test_what_somebody_else_has_taken_over_is_not_needed(
    patch: Patch, tmp_path: Path, upstream: SimpleNamespace, at: str
) -> None:
    def taken() -> Any:
        raise NotNeededError("another has it")

    taken_over = replace(patch, install=taken) if at == "install" else replace(patch, verify=taken)
    (status,) = apply(host(tmp_path, "0.17.1"), patches=[taken_over])
    assert (status.state, status.reason) == (State.NOT_NEEDED, "another has it")
    assert (status.verified, upstream.value) == (None, "stock")


def test_disabled(patch: Patch, tmp_path: Path, upstream: SimpleNamespace) -> None:
    for settings in (Settings(disable_all=True), Settings(disabled=frozenset({"first"}))):
        (status,) = apply(host(tmp_path, "0.17.1"), settings, [patch])
        assert (status.state, upstream.value) == (State.DISABLED, "stock")
    # What is not needed is not called disabled.
    (status,) = apply(host(tmp_path, "0.18.1"), Settings(disable_all=True), [patch])
    assert status.state is State.NOT_NEEDED


def test_a_patch_stands_down_without_those_it_needs(
    patch: Patch, tmp_path: Path, upstream: SimpleNamespace
) -> None:
    second = replace(patch, id="second", needs=("first",))
    statuses = apply(
        host(tmp_path, "0.17.1"), Settings(disabled=frozenset({"first"})), [patch, second]
    )
    assert [s.state for s in statuses] == [State.DISABLED, State.DISABLED]
    assert "needs first, which is disabled" in statuses[1].reason
    assert upstream.value == "stock"
    broken = replace(patch, verify=lambda: False)
    statuses = apply(host(tmp_path, "0.17.1"), patches=[broken, second])
    assert [s.state for s in statuses] == [State.FAILED, State.STOOD_DOWN]
    # Where upstream has closed the first gap, the second patch does not wait for it.
    elsewhere = replace(patch, since="0.15.1", before="0.16")
    statuses = apply(host(tmp_path, "0.17.1"), patches=[elsewhere, second])
    assert [s.state for s in statuses] == [State.NOT_NEEDED, State.APPLIED]


def test_revert_leaves_what_somebody_else_put_there() -> None:
    owner = SimpleNamespace(value=1)
    undo = set_attribute(owner, "value", 2)
    owner.value = 3
    undo()
    assert owner.value == 3
    undo = set_attribute(owner, "new", 1)
    undo()
    assert not hasattr(owner, "new")


def test_the_catalogue() -> None:
    ids = [patch.id for patch in patches.PATCHES]
    assert len(set(ids)) == len(ids)
    for index, patch in enumerate(patches.PATCHES):
        assert set(patch.needs) <= set(ids[:index]), "a patch comes after those it needs"
        assert patch.target in {symbol.target for symbol in patch.symbols}
        assert patch.releases
        assert all(link.startswith("https://github.com/") for link in patch.upstream)
        assert patch.gap
        assert patch.does
        assert patch.goes
    assert contract.known_shapes().keys() == set(SUPPORTED)
