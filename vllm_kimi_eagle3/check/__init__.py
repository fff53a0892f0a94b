# SPDX-License-Identifier: Apache-2.0
"""The pre-flight: what of a ``vllm serve`` command will fail, be wrong or be slow, in seconds.

``check(command)`` reads configs and safetensors headers, looks at the vLLM and the GPUs that are
here (or at those it is told of), and returns a :class:`Report`. It loads no weights, downloads
nothing, runs no remote code and does not import vLLM. One file per subject, each with a function
``findings(subject)``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from vllm_kimi_eagle3.checkpoint.errors import quoted
from vllm_kimi_eagle3.findings import Finding
from vllm_kimi_eagle3.host import Host, find_host

from . import (
    attention,
    cost,
    drafter,
    host,
    memory,
    path,
    plugin_drafting,
    run,
    spelling,
    target,
)
from .command import parse
from .facts import Facts, facts_for, facts_of
from .gpus import find_gpus
from .report import Report
from .subject import Check, Gpus, Subject

__all__ = ["Gpus", "Report", "check", "check_host"]

_T = TypeVar("_T")

# In this order, because later ones look at what earlier ones found.
CHECKS: tuple[Check, ...] = (
    spelling.findings,
    target.findings,
    drafter.findings,
    path.findings,
    run.findings,
    attention.findings,
    plugin_drafting.findings,
    memory.findings,
    cost.findings,
)


def check(
    command: str | Sequence[str],
    *,
    vllm: str | None = None,
    gpus: Gpus | None = None,
    environ: Mapping[str, str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """What is to be said of a ``vllm serve`` command before it is started.

    Args:
        command: the command line, as one string or as words, with ``vllm serve`` in front or not.
        vllm: the release that will run it, such as ``"0.26.0"``, if it is not the one installed
            here; the plugin is taken to be installed beside it.
        gpus: those that it will run on, if they are not the ones here.
        environ: the server's environment; this process's if not given. Assignments in front of
            the command win.
        progress: called with a line of text now and then where reading takes long.

    Returns:
        The report. Whatever the command or the files hold, it is a report and not an exception.

    Raises:
        ValueError: ``vllm`` is no supported release.
    """
    found: list[Finding] = []
    facts, installed = _vllm(vllm, found)
    environ = os.environ if environ is None else environ
    parsed = _guarded("the command", lambda: parse(command, facts), parse((), facts), found)
    environ = {**environ, **parsed.environ}
    subject = Subject(
        command=parsed,
        facts=facts,
        environ=environ,
        gpus=_gpus(environ, found) if gpus is None else gpus,
    )
    if progress is not None:
        subject.progress = progress
    found += _collect("host", subject, lambda s: host.findings(s, installed))
    found += parsed.problems
    for one in CHECKS:
        found += _collect(one.__module__.rpartition(".")[2], subject, one)
    # path.findings has reported what it could not tell.
    return Report.of(subject, found, _guarded("path", lambda: path.path(subject, found), None, []))


def check_host(
    *, vllm: str | None = None, environ: Mapping[str, str] | None = None, gpus: Gpus | None = None
) -> Report:
    """What is to be said of the vLLM that is here, whatever it will serve.

    Args and errors: as of :func:`check`.
    """
    found: list[Finding] = []
    facts, installed = _vllm(vllm, found)
    environ = os.environ if environ is None else environ
    gpus = _gpus(environ, found) if gpus is None else gpus
    subject = Subject(parse((), facts), facts, environ, gpus)
    found += _collect("host", subject, lambda s: host.findings(s, installed))
    return Report.of(subject, found, None)


def _vllm(release: str | None, found: list[Finding]) -> tuple[Facts | None, Host | None]:
    if release is not None:
        return facts_for(release), None
    installed = find_host()
    if installed is None:
        return None, None
    return _guarded("the installed vLLM", lambda: facts_of(installed), None, found), installed


def _gpus(environ: Mapping[str, str], found: list[Finding]) -> Gpus | None:
    return _guarded("the GPUs", lambda: find_gpus(environ), None, found)


def _guarded(name: str, act: Callable[[], _T], otherwise: _T, found: list[Finding]) -> _T:
    """``act()``; a defect of ours is a finding, so that it does not hide what the others find."""
    try:
        return act()
    except Exception as error:
        found.append(_stopped(name, error))
        return otherwise


def _collect(
    name: str, subject: Subject, findings: Callable[[Subject], Iterable[Finding]]
) -> list[Finding]:
    found: list[Finding] = []
    # What was found before a defect stays.
    _guarded(name, lambda: found.extend(findings(subject)), None, found)
    return found


def _stopped(name: str, error: Exception) -> Finding:
    what = f"{type(error).__name__}: {error}"
    return Finding(
        "host-check-stopped",
        f"the check of {name} stopped at {quoted(what)} and says nothing",
        "please report it",
    )
