# SPDX-License-Identifier: Apache-2.0
"""Findings as the reports show them: lines for a person, with those of a field beside them, and
plain data for ``--json``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from . import Finding
from .kinds import Severity

# SGR codes of a terminal.
COLOURS = {
    Severity.FAILS: "1;31",
    Severity.WRONG: "31",
    Severity.SLOW: "33",
    Severity.NOTE: "36",
}
UNTOLD, UNTOLD_COLOUR = "untold", "35"
LABEL_WIDTH = 8


def printable(text: str) -> str:
    """``text`` with what a terminal would act on, and what cannot be encoded, escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def field_lines(name: str, value: str, width: int | None) -> list[str]:
    """A named value, wrapped to ``width`` columns; on one line for None."""
    first = f"  {name:<{LABEL_WIDTH}}"
    if width is None:
        return [printable(first + value)]
    return textwrap.wrap(
        printable(value),
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def finding_lines(finding: Finding, colour: bool, width: int | None) -> list[str]:
    """A finding: its id, the fact, what it rests on, the fix. A fix is never wrapped, so that it
    can be copied."""
    label = UNTOLD if finding.undecided else finding.severity.value
    painted = f"{label:<{LABEL_WIDTH}}"
    if colour:
        code = UNTOLD_COLOUR if finding.undecided else COLOURS[finding.severity]
        painted = f"\x1b[{code}m{painted}\x1b[0m"
    lines = [f"{painted}  {finding.id}", *field_lines("", finding.fact, width)]
    if evidence := str(finding.evidence):
        lines += field_lines("from", evidence, width)
    if finding.fix:
        lines += field_lines("fix", finding.fix, None)
    if finding.severity is not Severity.NOTE:
        lines += [f"  {'see':<{LABEL_WIDTH}}{link}" for link in finding.upstream]
    return lines


def findings_as_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Findings as plain data, in their order: the value of ``findings`` in every report."""
    return [
        {
            "id": finding.id,
            "severity": finding.severity.value,
            "undecided": finding.undecided,
            "fact": finding.fact,
            "fix": finding.fix,
            "evidence": asdict(finding.evidence),
            "upstream": list(finding.upstream),
        }
        for finding in findings
    ]
