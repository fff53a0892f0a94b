# SPDX-License-Identifier: Apache-2.0
"""Every kind of finding."""

from __future__ import annotations

from collections.abc import Mapping

from . import (
    command,
    diagnose,
    diagnose_offline,
    drafter,
    files,
    host,
    memory,
    plan,
    run,
    target,
)
from .kinds import Kind

KINDS: Mapping[str, Kind] = {
    kind.id: kind
    for area in (
        *(host, command, files, target, drafter, run, memory),
        *(diagnose, diagnose_offline, plan),
    )
    for kind in area.KINDS
}
"""Every kind by its id, in the order of the documentation."""
