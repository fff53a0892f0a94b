# SPDX-License-Identifier: Apache-2.0
"""``register()`` where there is no vLLM; the hosts' tests run it where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

import pytest

from vllm_kimi_eagle3.plugin import ENTRY_POINT, ENTRY_POINT_GROUP


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} | environ
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.mark.parametrize("module", ["vllm_kimi_eagle3", "vllm_kimi_eagle3.plugin"])
def test_importing_it_imports_the_standard_library_only(module: str) -> None:
    code = (
        f"import sys; before = set(sys.modules); import {module}\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    result = run(code)
    assert result.stdout.strip() == "['vllm_kimi_eagle3']", result.stderr


def test_the_entry_point_is_installed() -> None:
    (entry,) = [e for e in metadata.entry_points(group=ENTRY_POINT_GROUP) if e.name == ENTRY_POINT]
    assert entry.value == "vllm_kimi_eagle3.plugin:register"
    from vllm_kimi_eagle3.plugin import register

    assert entry.load() is register


@pytest.mark.parametrize("times", [1, 3])
def test_register_raises_nothing(times: int) -> None:
    code = "from vllm_kimi_eagle3.plugin import register\n" + "register()\n" * times
    assert run(code).returncode == 0


def test_strict_raises() -> None:
    code = "from vllm_kimi_eagle3.plugin import register; register()"
    assert run(code, VLLM_KIMI_EAGLE3_STRICT="1").returncode != 0


def test_the_version_is_the_distributions() -> None:
    import vllm_kimi_eagle3

    assert vllm_kimi_eagle3.__version__ == metadata.version("vllm-kimi-eagle3")
