# SPDX-License-Identifier: Apache-2.0
"""However the command ends, nothing of the target's process is left: it would hold the GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_kimi_eagle3.diagnose.offline import process

PACKAGE = str(Path(__file__).parents[4])
# An "engine" that a target's process has started, and that does not end with it.
TARGET = """
import os, subprocess, sys, time
from vllm_kimi_eagle3.diagnose.offline.process import end_with_parent
end_with_parent()
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
file, stays = sys.argv[1:]
open(file + ".part", "w").write(str(engine.pid))
os.replace(file + ".part", file)
if stays == "stays":
    time.sleep(120)
sys.exit(3)
"""
# As a terminal starts it: a test run under `nohup`, or in a script's background, ignores signals.
COMMAND = """
import os, signal, sys
from vllm_kimi_eagle3.diagnose.offline import process
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with process.told_to_end():
    process.run([sys.executable, *sys.argv[1:]], os.environ)
"""


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody asks for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_until(true: object, seconds: float = 20.0) -> None:
    assert callable(true)
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_engine_ends_with_the_command(number: signal.Signals, tmp_path: Path) -> None:
    script, file = tmp_path / "target.py", tmp_path / "pid"
    script.write_text(TARGET)
    environ = {**os.environ, "PYTHONPATH": PACKAGE}
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(script), str(file), "stays"],
        env=environ,
        stderr=subprocess.DEVNULL,
    )
    wait_until(file.exists)
    engine = int(file.read_text())
    assert alive(engine)
    command.send_signal(number)
    command.wait(timeout=20)
    wait_until(lambda: not alive(engine))


def test_what_a_target_leaves_behind_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_REST", 0.3)
    script, file = tmp_path / "target.py", tmp_path / "pid"
    script.write_text(TARGET)
    environ = {**os.environ, "PYTHONPATH": PACKAGE}
    assert process.run([sys.executable, str(script), str(file), "goes"], environ) == 3
    wait_until(lambda: not alive(int(file.read_text())))


def test_the_target_finds_the_modules_that_the_command_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not those of the folder that the user is in, such as a checkout of vLLM."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit(77)")
    (tmp_path / "vllm_kimi_eagle3").mkdir()
    (tmp_path / "vllm_kimi_eagle3" / "__init__.py").write_text("raise SystemExit(78)")
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "job.json"
    job.write_text("{")
    assert process.run_capture(str(job), {}) == 1
    assert "JSONDecodeError" in capfd.readouterr().err


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    term = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with process.told_to_end():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGTERM, term)
