# SPDX-License-Identifier: Apache-2.0
"""How every patch stands on the vLLM that is installed here, with that vLLM imported."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import __version__
from .contract import Sources
from .findings import Finding, Severity
from .host import Host, find_host
from .pair import met
from .patches import PATCHES, State, Status, apply, not_in_place
from .patches.base import Action, decide
from .plugin import why_not_loaded
from .settings import DISABLE, Settings

JSON_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class HostStatus:
    """The host and how every patch stands on it.

    Attributes:
        host: the vLLM that is installed here.
        runner: the model runner that serves Kimi, ``V1`` or ``V2``.
        not_loaded: why vLLM does not load the plugin; "" if it does.
        statuses: one per patch, in the order of application.
    """

    host: Host
    runner: str
    not_loaded: str
    statuses: tuple[Status, ...]

    @property
    def complete(self) -> bool:
        """True if everything that this vLLM needs is in place."""
        return all(status.satisfied for status in self.statuses)


def host_status(environ: Mapping[str, str] | None = None) -> HostStatus | None:
    """How every patch stands here, as in a server started in this environment.

    Imports the vLLM that is here and applies to it what a server's ``register()`` would, so it
    belongs into a process of its own. Loads no model. None if there is no vLLM.
    """
    environ = os.environ if environ is None else environ
    host = find_host()
    if host is None:
        return None
    not_loaded = "; ".join(filter(None, why_not_loaded(environ)))
    if not_loaded:
        sources = Sources(host.root)
        statuses = tuple(
            Status(patch, State.NOT_NEEDED, decision.reason)
            if decision.action is Action.NOT_NEEDED
            else Status(patch, State.NOT_LOADED, not_loaded)
            for patch, decision in ((p, decide(p, host, sources)) for p in PATCHES)
        )
    else:
        # vLLM logs to standard output while it is imported, and that is ours.
        with contextlib.redirect_stdout(sys.stderr):
            settings = Settings.from_environment(environ)
            apply(host, settings)
            met()  # As where a Kimi is served: what waits for one is put in place and read back.
            statuses = apply(host, settings)
    return HostStatus(host, host.runner(environ), not_loaded, statuses)


def as_json(status: HostStatus) -> dict[str, Any]:
    """``status`` as plain data, for ``--json``."""
    host = status.host
    return {
        "schema_version": JSON_SCHEMA_VERSION,
        "plugin": {
            "version": __version__,
            "loaded": not status.not_loaded,
            "reason": status.not_loaded,
        },
        "host": {
            "distributions": [{"name": n, "version": v} for n, v in host.distributions],
            "version": host.version_text,
            "supported": host.supported,
            "runner": status.runner,
            "path": str(host.root),
        },
        "complete": status.complete,
        "patches": [
            {
                "id": s.patch.id,
                "needed": s.state is not State.NOT_NEEDED,
                "state": s.state.value,
                "verified": s.verified,
                "reason": s.reason,
                "target": s.patch.target,
                "upstream": list(s.patch.upstream),
                "goes": s.patch.goes,
            }
            for s in status.statuses
        ],
    }


def as_text(status: HostStatus) -> str:
    """``status`` for a person to read."""
    host = status.host
    lines = [
        f"vllm-kimi-eagle3 {__version__} on {host.label}, {status.runner} runner",
        f"  {host.root}",
    ]
    if len(host.distributions) > 1:
        both = " and ".join(f"{name} {version}" for name, version in host.distributions)
        lines.append(
            f"  {both} are both installed and own the same files; uninstall both, then install one"
        )
    if host.version is None:
        lines.append("  its version is unknown; its source decides")
    elif not host.supported:
        lines.append(f"  vLLM {host.version_text} is not a tested release; its source decides")
    if status.not_loaded:
        lines.append(f"  vLLM does not load the plugin: {status.not_loaded}")
    width = max(len(s.patch.id) for s in status.statuses)
    lines.append("")
    for s in status.statuses:
        state = s.state.value + (" and verified" if s.verified else "")
        reason = "" if s.state is State.NOT_LOADED else f": {s.reason}"
        lines.append(f"  {s.patch.id:<{width}}  {state}{reason}")
        if s.state is not State.NOT_NEEDED:
            lines.append(f"  {'':<{width}}  {s.patch.upstream[-1]}; goes {s.patch.goes}")
    lines.append("")
    lines.append(
        "Everything that this vLLM needs for Kimi with EAGLE-3 is in place."
        if status.complete
        else "Not everything that this vLLM needs for Kimi with EAGLE-3 is in place."
    )
    return "\n".join(lines)


def not_in_effect(status: HostStatus) -> list[Finding]:
    """A finding for every patch that this vLLM needs and that did not take, for ``check``.

    None where the plugin is not loaded at all, which is a finding of its own; what the user
    switched off is a note, since it depends on the pair whether it is missed.
    """
    found = []
    for s in status.statuses:
        if s.satisfied or s.patch.convenience or s.state is State.NOT_LOADED:
            continue
        off = s.state is State.DISABLED
        found.append(
            not_in_place(
                s.patch,
                f"{s.state.value}: {s.reason}",
                fix=f"take {s.patch.id} out of {DISABLE}" if off else "",
                release=status.host.version_text or None,
                rated=Severity.NOTE if off else None,
            )
        )
    return found
