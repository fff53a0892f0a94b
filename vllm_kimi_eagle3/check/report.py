# SPDX-License-Identifier: Apache-2.0
"""What a check found, as data, as JSON and as text."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm_kimi_eagle3 import __version__
from vllm_kimi_eagle3.findings import Finding, Kind, Severity
from vllm_kimi_eagle3.findings.catalogue import KINDS
from vllm_kimi_eagle3.findings.lines import UNTOLD, field_lines, finding_lines, findings_as_json

from .path import Path
from .runner import runner_of
from .subject import GIB, Subject

JSON_SCHEMA_VERSION = 1

# Exit codes: nothing against it; it will fail or be wrong; that could not be told.
EXIT_FINE, EXIT_BAD, EXIT_UNTOLD = 0, 1, 2

_ORDER = list(Severity)
_BAD = (Severity.FAILS, Severity.WRONG)
# For counts in the last line.
_WORDS = {
    Severity.FAILS: "{} failing",
    Severity.WRONG: "{} wrong",
    Severity.SLOW: "{} slow",
    Severity.NOTE: "{} to note",
}


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        vllm: the vLLM in words, ``vllm 0.26.0``; "" if there is none.
        release: its version; "" if unknown.
        runner: ``V1`` or ``V2``; "" without a vLLM.
        gpus: in words; "" if none are known.
        target: as the user named it; None if the command names none.
        drafter: likewise.
        path: by whose code the pair runs; None where that could not be told.
        findings: the worst first.
    """

    vllm: str
    release: str
    runner: str
    gpus: str
    target: str | None
    drafter: str | None
    path: Path | None
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, subject: Subject, findings: Iterable[Finding], path: Path | None) -> Report:
        """The report on ``subject``."""
        facts, gpus = subject.facts, subject.gpus
        gpus_text = ""
        if gpus is not None:
            memory = f", {gpus.memory / GIB:.0f} GiB each" if gpus.memory else ""
            count = f"{gpus.count} x " if gpus.count else ""
            gpus_text = f"{count}{gpus.name}{memory}"
        return cls(
            vllm="" if facts is None else facts.label,
            release="" if facts is None else facts.release,
            runner="" if facts is None else runner_of(subject.command, facts, subject.environ),
            gpus=gpus_text,
            target=None if subject.target is None else subject.target.model,
            drafter=None if subject.drafter is None else subject.drafter.model,
            path=path,
            findings=tuple(sorted(dict.fromkeys(findings), key=_rank)),
        )

    def including(self, findings: Iterable[Finding]) -> Report:
        """The report with more findings."""
        every = dict.fromkeys([*self.findings, *findings])
        return replace(self, findings=tuple(sorted(every, key=_rank)))

    @property
    def exit_code(self) -> int:
        """0 fine, 1 it will fail or be wrong, 2 it could not be told."""
        if any(finding.severity in _BAD for finding in self.findings):
            return EXIT_BAD
        return EXIT_UNTOLD if any(f.undecided for f in self.findings) else EXIT_FINE

    def as_json(self) -> dict[str, Any]:
        """The report as plain data, for ``--json``. The schema's version changes with its keys."""
        return {
            "schema_version": JSON_SCHEMA_VERSION,
            "plugin": __version__,
            "vllm": {"name": self.vllm, "release": self.release, "runner": self.runner},
            "gpus": self.gpus,
            "target": self.target,
            "drafter": self.drafter,
            "path": None if self.path is None else asdict(self.path),
            "exit_code": self.exit_code,
            "findings": findings_as_json(self.findings),
        }

    def as_text(self, *, colour: bool = False, width: int | None = None) -> str:
        """The report for a person.

        Args:
            colour: with a terminal's colours.
            width: columns to which sentences are wrapped; None for one line each. A fix is never
                wrapped, so that it can be copied.
        """
        lines = [f"vllm-kimi-eagle3 {__version__} check"]
        vllm = f"{self.vllm}, {self.runner} runner" if self.vllm else "no vLLM here"
        for name, value in (
            ("host", vllm),
            ("GPUs", self.gpus or "none here or named"),
            ("target", self.target),
            ("drafter", self.drafter),
            ("path", None if self.path is None else str(self.path)),
        ):
            if value is not None:
                lines += field_lines(name, value, width)
        for finding in self.findings:
            lines += ["", *finding_lines(finding, colour, width)]
        lines += ["", self.verdict]
        return "\n".join(lines)

    @property
    def verdict(self) -> str:
        """The last line: what it comes to."""
        count = {
            severity: sum(f.severity is severity and not f.undecided for f in self.findings)
            for severity in Severity
        }
        untold = sum(f.undecided for f in self.findings)
        if count[Severity.FAILS]:
            said = "This will fail"
        elif count[Severity.WRONG]:
            said = "This will start and be wrong"
        elif untold:
            said = "Nothing speaks against it, but not everything could be told"
        else:
            said = "This is fine"
        parts = [_WORDS[severity].format(n) for severity, n in count.items() if n]
        parts += [f"{untold} {UNTOLD}"] if untold else []
        return f"{said}: {', '.join(parts) or 'no findings'}."


def explain(kind: Kind) -> str:
    """The long form of a kind of finding, as ``check --explain`` prints it."""
    label = UNTOLD if kind.undecided else kind.severity.value
    return "\n\n".join(
        [
            f"{kind.id} ({label}): {kind.title}",
            *(textwrap.fill(p, 88, break_long_words=False) for p in kind.explanation.split("\n\n")),
            *(["\n".join(kind.upstream)] if kind.upstream else []),
        ]
    )


def similar_kinds(name: str) -> list[str]:
    """The ids that ``name`` may have been meant as, the likeliest first."""
    return difflib.get_close_matches(name, KINDS, n=3) or [k for k in KINDS if name in k]


def _rank(finding: Finding) -> tuple[int, bool, int]:
    areas = list(KINDS)
    return _ORDER.index(finding.severity), finding.undecided, areas.index(finding.id)
