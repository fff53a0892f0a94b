# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` process: started on a free port, waited for, asked, and always ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

HOST = "127.0.0.1"
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class ServerError(RuntimeError):
    """The server ended, or was not ready in time; the message has the end of its log."""


class Server:
    """`vllm serve` as a context manager; leaving it ends the server and all its children.

    Args:
        arguments: after `vllm serve`: the model and flags, without host and port.
        env: the server's environment.
        log_path: where its output goes.
        timeout: how long it may take to be ready, in seconds.
        on_wait: called about once a second while it starts, with the seconds so far.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        timeout: float = 420.0,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.log_path = log_path
        self.seconds_to_ready = 0.0
        self._timeout = timeout
        self._on_wait = on_wait or (lambda seconds: None)
        self._env = dict(env)
        self._command = [
            *(*vllm_program(), "serve", *arguments),
            *("--host", HOST, "--port", str(self.port)),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self.log_path.parent,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        started = time.monotonic()
        while True:
            self.seconds_to_ready = time.monotonic() - started
            if (code := self._process.poll()) is not None:
                raise ServerError(f"vllm serve ended with exit code {code}:\n{self.tail()}")
            if self.seconds_to_ready > self._timeout:
                raise ServerError(
                    f"vllm serve was not ready after {self._timeout:.0f} s:\n{self.tail()}"
                )
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                self._on_wait(self.seconds_to_ready)
                time.sleep(1)

    def stop(self) -> None:
        """End the server: politely, and after 20 s not; then whatever else it had started."""
        process = self._process
        if process is None:
            return
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        finally:  # A second Ctrl-C while it shuts down included.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._process = None

    def log(self) -> str:
        """Everything the server has printed so far."""
        return self.log_path.read_text(errors="replace")

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.log().splitlines()[-lines:])

    def get(self, path: str) -> str:
        """The body of a GET."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to a JSON POST."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def spec_decode(self) -> dict[str, Any]:
        """The `vllm:spec_decode_*` counters of /metrics, in `expected.json`'s names."""
        return spec_decode_counters(self.get("/metrics"))


def vllm_program() -> list[str]:
    """How to run vLLM's program here; the shim's `program.py` says why not always by its name."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm_cpu_spec_shim.program"]
    return [str(Path(sys.executable).with_name("vllm"))]


def free_port() -> int:
    """A TCP port that nothing listens on, below those that the system gives to whoever asks.

    The server binds it only after its imports, up to 20 s later; one of the system's own may by
    then belong to a socket of an engine beside it.

    Raises:
        ServerError: a hundred ports in a row are taken.
    """
    end = first_ephemeral_port()
    for port in random.SystemRandom().sample(range(10_000, end), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise ServerError(f"no free port between 10000 and {end} on {HOST}")


def first_ephemeral_port() -> int:
    """Where the system's own ports begin; IANA's 49152 if it does not say, or leaves no room."""
    with contextlib.suppress(OSError):
        first = int(EPHEMERAL_PORTS.read_text().split()[0])
        if first > 11_000:
            return first
    return 49_152


def spec_decode_counters(exposition: str) -> dict[str, Any]:
    """The speculation counters in a Prometheus text, in `expected.json`'s names."""
    sample = re.compile(r"^vllm:spec_decode_(num_\w+?)_total\{(.*)\} (\S+)$", re.MULTILINE)
    counters: dict[str, Any] = {}
    per_position: dict[int, int] = {}
    for name, labels, value in sample.findall(exposition):
        if position := re.search(r'position="(\d+)"', labels):
            per_position[int(position[1])] = int(float(value))
        else:
            counters[name] = int(float(value))
    if per_position:
        counters["num_accepted_tokens_per_pos"] = [per_position[i] for i in sorted(per_position)]
    return counters


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """`vllm.LLM` keyword arguments as `vllm serve` arguments."""
    arguments = dict(arguments)
    line = [str(arguments.pop("model"))]
    arguments.pop("disable_log_stats", None)
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            line.append(flag)
        elif isinstance(value, dict):
            line += [flag, json.dumps(value)]
        else:
            line += [flag, str(value)]
    return line
