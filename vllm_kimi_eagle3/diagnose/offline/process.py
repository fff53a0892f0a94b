# SPDX-License-Identifier: Apache-2.0
"""The target's process, which ends with everything that it has started, however this one ends.

vLLM starts an engine and workers, and they hold the GPUs. They outlive a parent that is killed, so
all of them are in a session of their own, which is ended as a whole: when the target's process is
done, when this one is interrupted or told to end, and, since the target's process reads a pipe that
this one holds open, when this one is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

# An engine that is told to end has so many seconds, one that has ended so many until it is gone.
_GRACE, _REST = 15.0, 5.0
_POLL = 0.1

# The child finds the modules that we have found: `-m` would put the folder that the user is in,
# such as a checkout of vLLM, in front of them.
_BEGIN = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from vllm_kimi_eagle3.diagnose.offline import capture, process
process.end_with_parent()
sys.exit(capture.main(sys.argv[2]))
"""


def run_capture(job: str, environ: Mapping[str, str]) -> int:
    """Runs ``capture.py`` on a job.

    Args:
        job: the file.
        environ: variables beside our own.

    Returns:
        Its exit code; less than zero where a signal has ended it.
    """
    command = [sys.executable, "-c", _BEGIN, json.dumps(sys.path), job]
    return run(command, {**os.environ, **environ})


def run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a command to its end, and ends what it leaves behind.

    What it says goes to our standard error: a load of half an hour says how far it is, and our
    output is the report.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL if sys.stderr is None else 2,
        env=dict(environ),
        start_new_session=True,
    )
    try:
        code = process.wait()
    except BaseException:
        _signal(process.pid, signal.SIGTERM)
        try:
            _wait_for(process, _GRACE)
        finally:
            _signal(process.pid, signal.SIGKILL)
        raise
    finally:
        assert process.stdin is not None
        process.stdin.close()
    _wait_for(process, _REST)
    _signal(process.pid, signal.SIGKILL)
    return code


def end_with_parent() -> None:
    """Ends this process and its group as soon as nobody holds the other end of its standard
    input."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        os.killpg(os.getpgrp(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def told_to_end() -> Iterator[None]:
    """SIGTERM and SIGHUP are exceptions in here, as SIGINT is: what has to be tidied up, is. One
    that is ignored, as under ``nohup``, stays so."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(group: int, number: int) -> bool:
    """Sends a signal to a process group. False if nobody is there."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _wait_for(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Waits until nobody is left in a process's group, for so long at most."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        process.poll()
        if not _signal(process.pid, 0):
            return
        time.sleep(_POLL)
