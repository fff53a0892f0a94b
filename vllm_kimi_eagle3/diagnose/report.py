# SPDX-License-Identifier: Apache-2.0
"""What ``diagnose`` measured and found, as data, as JSON and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_kimi_eagle3 import __version__
from vllm_kimi_eagle3.acceptance.model import Acceptance, Estimate, acceptance
from vllm_kimi_eagle3.findings import Finding, Severity
from vllm_kimi_eagle3.findings.catalogue import KINDS
from vllm_kimi_eagle3.findings.lines import field_lines, finding_lines, findings_as_json, printable

from .signature import Expected, LengthBin

JSON_SCHEMA_VERSION = 1

# Exit codes, as those of ``check``: acceptance is as it should be; something is wrong; that could
# not be told.
EXIT_FINE, EXIT_BAD, EXIT_UNTOLD = 0, 1, 2

_BAD = (Severity.FAILS, Severity.WRONG)
_ORDER = list(Severity)


@dataclass(frozen=True)
class Report:
    """What was measured and found.

    Attributes:
        url: of the server.
        release: of its vLLM; "" if it does not say.
        model: that was asked, or watched.
        drafter: as the user or the server named it; "" if nobody did.
        how: how it was measured, in words.
        prompts: the digest of what was sent; "" if nothing was.
        measured: None where there are no counts by position.
        expected: None where nothing is known.
        published: what was published of the drafter, in words; "" without a drafter.
        drafted_share: the part of the steps that verified drafts.
        kinds: acceptance of each kind of text.
        bins: of each length.
        engines: of each data-parallel rank, if there are some.
        context: tokens of a request, prompt and half of the answer, in the mean.
        speed, speed_without: tokens a second of one request, with and without speculation.
        findings: the worst first.
    """

    url: str
    release: str = ""
    model: str = ""
    drafter: str = ""
    how: str = ""
    prompts: str = ""
    measured: Acceptance | None = None
    length: float | None = None
    expected: Expected | None = None
    published: str = ""
    drafted_share: float | None = None
    kinds: Mapping[str, Acceptance] = field(default_factory=dict)
    bins: Sequence[LengthBin] = ()
    engines: Mapping[str, Acceptance] = field(default_factory=dict)
    context: float | None = None
    speed: float | None = None
    speed_without: float | None = None
    findings: Sequence[Finding] = ()

    @property
    def exit_code(self) -> int:
        """0 as it should be, 1 something is wrong, 2 that could not be told."""
        if any(finding.severity in _BAD for finding in self.findings):
            return EXIT_BAD
        return EXIT_UNTOLD if any(f.undecided for f in self.findings) else EXIT_FINE

    @property
    def verdict(self) -> str:
        """The last line: what it comes to."""
        bad = [f for f in self.findings if f.severity in _BAD]
        untold = [f for f in self.findings if f.undecided]
        slow = [f for f in self.findings if f.severity is Severity.SLOW]
        if bad:
            return f"Something is wrong: {bad[0].kind.title.lower()} [{bad[0].id}]."
        if untold:
            return f"That could not be told: {untold[0].kind.title.lower()} [{untold[0].id}]."
        if slow:
            return f"Acceptance is right, and yet: {slow[0].kind.title.lower()} [{slow[0].id}]."
        return "Acceptance is as it should be."

    def as_json(self) -> dict[str, Any]:
        """The report as plain data, for ``--json``. The schema's version changes with its keys."""
        measured = self.measured
        expected = None
        if self.expected is not None:
            k = measured.counts.positions if measured else len(self.expected.rates)
            expected = asdict(self.expected.for_positions(k))
        return {
            "schema_version": JSON_SCHEMA_VERSION,
            "plugin": __version__,
            "url": self.url,
            "vllm": self.release,
            "model": self.model,
            "drafter": self.drafter,
            "how": self.how,
            "prompts": self.prompts,
            "drafts": measured.counts.drafts if measured else None,
            "accepted": list(measured.counts.accepted) if measured else None,
            "positions": _positions(measured),
            "length": asdict(measured.length) if measured else _plain(self.length),
            "expected": expected,
            "published": self.published,
            "drafted_share": self.drafted_share,
            "kinds": {
                kind: {**asdict(one.length), "drafts": one.counts.drafts}
                for kind, one in self.kinds.items()
            },
            "lengths": [
                {
                    "shortest": b.shortest,
                    "longest": b.longest,
                    "drafts": b.counts.drafts,
                    "accepted": list(b.counts.accepted),
                    "drafted_share": b.drafted,
                }
                for b in self.bins
            ],
            "engines": {
                name: {**asdict(one.length), "drafts": one.counts.drafts}
                for name, one in self.engines.items()
            },
            "tokens_per_second": self.speed,
            "tokens_per_second_without": self.speed_without,
            "exit_code": self.exit_code,
            "verdict": self.verdict,
            "findings": findings_as_json(self.findings),
        }

    def as_text(self, *, colour: bool = False, width: int | None = None) -> str:
        """The report for a person; arguments as of ``check``'s."""
        lines = [f"vllm-kimi-eagle3 {__version__} diagnose"]
        server = self.url + (f", vLLM {self.release}" if self.release else "")
        for name, value in (
            ("server", server),
            ("model", self.model),
            ("drafter", self.drafter),
            ("how", self.how),
            ("known", self.published),
        ):
            if value:
                lines += field_lines(name, value, width)
        lines += self._table()
        for finding in self.findings:
            lines += ["", *finding_lines(finding, colour, width)]
        lines += ["", self.verdict]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        lines: list[str] = []
        measured = self.measured
        if measured is not None and measured.counts.drafts:
            k = measured.counts.positions
            expected = None if self.expected is None else self.expected.for_positions(k).rates
            lines += ["", "  draft   accepted in           of those tried   expected"]
            for position in range(k):
                rate, tried = measured.rates[position], measured.conditional[position]
                should = f"{expected[position]:9.0%}" if expected else "        -"
                interval = f"({rate.low:.1%} to {rate.high:.1%})"
                lines.append(
                    f"  {position + 1:>5}   {rate.value:6.1%} {interval:<17}{tried.value:13.1%}"
                    f"{should:>12}"
                )
            length = measured.length
            should = f", expected {1 + sum(expected):.2f}" if expected else ""
            lines += [
                "",
                f"  {length.value:.2f} tokens a step ({length.low:.2f} to {length.high:.2f}"
                f"){should}; {measured.counts.rate:.1%} of "
                f"{measured.counts.draft_tokens:,} drafts in {measured.counts.drafts:,} steps",
            ]
        elif self.length is not None:
            lines += ["", f"  {self.length:.2f} tokens a step"]
        if self.expected is not None and lines:
            lines.append(f"  expected: {printable(self.expected.source)}")
        if self.drafted_share is not None:
            lines.append(f"  {self.drafted_share:.0%} of the steps verified drafts")
        if len(self.kinds) > 1:
            said = ", ".join(f"{k} {a.length.value:.2f}" for k, a in self.kinds.items())
            lines.append(f"  by text: {printable(said)}")
        if len(self.bins) > 1:
            said = ", ".join(
                f"{b.longest:,} tokens {b.counts.length:.2f}" for b in self.bins if b.counts.drafts
            )
            lines.append(f"  by length, up to: {said}")
        if len(self.engines) > 1:
            said = ", ".join(f"{k} {a.length.value:.2f}" for k, a in self.engines.items())
            lines.append(f"  by rank: {printable(said)}")
        if self.speed is not None:
            said = f"  {self.speed:.1f} tokens a second for one request"
            if self.speed_without:
                said += (
                    f", {self.speed_without:.1f} without speculation: "
                    f"{self.speed / self.speed_without:.2f} times"
                )
            lines.append(said)
        return lines


def sort(found: Sequence[Finding]) -> list[Finding]:
    """Findings, the worst first, each once."""
    ids = list(KINDS)
    return sorted(
        dict.fromkeys(found),
        key=lambda f: (_ORDER.index(f.severity), not f.undecided, ids.index(f.id)),
    )


def stopped(id: str, error: Exception) -> Finding:
    """A defect of ours in a command, as a finding: it does not hide what was found before.

    Args:
        id: the command's name and ``-stopped``.
    """
    return Finding(
        id,
        f"{id.removesuffix('-stopped')} stopped at {type(error).__name__}: {str(error)[:300]}",
        "please report it",
    )


def measured_of(parts: Sequence[Any]) -> Acceptance:
    """Acceptance of some parts."""
    return acceptance([part.delta.counts for part in parts if part.delta.counts is not None])


def _positions(measured: Acceptance | None) -> list[dict[str, float]] | None:
    if measured is None:
        return None
    return [
        {**asdict(rate), "of_tried": tried.value}
        for rate, tried in zip(measured.rates, measured.conditional, strict=True)
    ]


def _plain(length: float | None) -> dict[str, float] | None:
    return None if length is None else asdict(Estimate(length, length, length))
