# SPDX-License-Identifier: Apache-2.0
"""`diagnose --offline` where torch is not installed: in a process that cannot import it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WHERE = Path(__file__).parents[2]
CODE = (
    "import sys; sys.modules['torch'] = sys.modules['safetensors'] = None; "
    "from vllm_kimi_eagle3 import cli; "
    "sys.exit(cli.main(['diagnose', '--offline', *sys.argv[1:]]))"
)
PAIR = ("target", "--speculative-config", '{"method": "eagle3", "model": "drafter"}')


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--help"], 0, "usage: vllm-kimi-eagle3 diagnose --offline"),
        ([], 64, "usage: vllm-kimi-eagle3 diagnose --offline"),
        (["target"], 64, "name the drafter with --speculative-config"),
        ([*PAIR, "--tokens", "1"], 64, "--tokens takes 8 to 4096"),
        (PAIR, 64, "torch cannot be imported here"),
        ([*PAIR, "--json"], 64, "run it where vLLM is installed"),
    ],
)
def test_options_are_read_and_what_is_missing_is_said(
    words: list[str], code: int, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words], capture_output=True, text=True, check=False, cwd=WHERE
    )
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if words and code == 64:
        assert len(done.stderr.splitlines()) == 1
        assert not done.stdout
