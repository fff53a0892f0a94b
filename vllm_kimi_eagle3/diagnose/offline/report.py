# SPDX-License-Identifier: Apache-2.0
"""What the offline mode found, as data, as JSON and as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_kimi_eagle3 import __version__
from vllm_kimi_eagle3.acceptance.model import LEVEL, Acceptance, acceptance, student
from vllm_kimi_eagle3.diagnose.report import EXIT_BAD, EXIT_FINE, EXIT_UNTOLD
from vllm_kimi_eagle3.findings import Finding, Severity
from vllm_kimi_eagle3.findings.lines import field_lines, finding_lines, findings_as_json, printable

from .hypotheses import Reading, described, rope_words

if TYPE_CHECKING:  # It imports torch, and the options and --help are there without it.
    from .score import Score

JSON_SCHEMA_VERSION = 1
_BAD = (Severity.FAILS, Severity.WRONG)
# Readings in the text; the JSON has all.
_SHOWN = 16
# Windows that a comparison needs, of 32 tokens each.
MIN_WINDOWS = 8


@dataclass(frozen=True)
class Gain:
    """How much faster a reading gets through the same answers than another one.

    Attributes:
        steps: the share of the other's steps that it saves, and its interval.
        low, high: of that share.
        windows: from how many observations.
    """

    steps: float
    low: float
    high: float
    windows: int

    @property
    def significant(self) -> bool:
        """It certainly saves steps."""
        return self.windows >= MIN_WINDOWS and self.low > 0


def gain(better: Score, other: Score, tried: int = 1) -> Gain:
    """Compares two readings, window by window of the same answers.

    Args:
        tried: how many readings the better one was picked from. The level of the interval is
            divided among them (Bonferroni), since the best of many looks good by chance.
    """
    pairs = list(zip(better.steps, other.steps, strict=True))
    windows, total = len(pairs), sum(steps for _, steps in pairs)
    if windows < 2 or not total:
        return Gain(0.0, -math.inf, math.inf, windows)
    saved = [b - a for a, b in pairs]
    mean = sum(saved) / windows
    variance = sum((s - mean) ** 2 for s in saved) / (windows - 1)
    quantile = student(windows - 1, 1 - (1 - LEVEL) / max(1, tried))
    half = quantile * math.sqrt(variance / windows)
    per = windows / total
    return Gain(mean * per, (mean - half) * per, (mean + half) * per, windows)


@dataclass(frozen=True)
class Row:
    """A reading with its acceptance.

    Attributes:
        told_apart: it is significantly worse than the best one.
    """

    score: Score
    accepted: Acceptance
    told_apart: bool

    @classmethod
    def of(cls, score: Score, told_apart: bool) -> Row:
        """With intervals from the scatter between the texts."""
        return cls(score, acceptance(score.texts), told_apart)


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        target, drafter: as the user named them.
        how: on what it was scored, in words.
        memory: what it took at most, in words.
        k: drafts a step.
        now: what the server uses; None where nothing was scored.
        best: the one to use; ``now`` where no other is significantly better.
        rows: every reading that was scored, the best first.
        gain: of ``best`` over ``now``.
        head: whether its head belongs to it, in words; "" where that was not looked at.
        next_best: what the best of the others saves over ``now``, where ``now`` is the best: as a
            rule less than nothing.
        flag: ``--additional-config`` for ``best``; "" where it needs none.
        written: the copy of the drafter that reads as ``best``, and what is in it.
        expected: the published rates, and their source in words.
        refused: the plugin refuses the pair as it is.
        findings: the worst first.
        release, runner: of the vLLM that ran the target.
        kinds: how many answers there are to each kind of prompt.
    """

    target: str
    drafter: str
    how: str = ""
    memory: str = ""
    k: int = 0
    now: Row | None = None
    best: Row | None = None
    rows: Sequence[Row] = ()
    gain: Gain | None = None
    head: str = ""
    next_best: Gain | None = None
    flag: str = ""
    written: str = ""
    expected: tuple[Sequence[float], str] | None = None
    refused: bool = False
    findings: Sequence[Finding] = ()
    release: str = ""
    runner: str = ""
    kinds: Mapping[str, int] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 the server reads it best, 1 something is wrong, 2 that could not be told."""
        if any(finding.severity in _BAD for finding in self.findings):
            return EXIT_BAD
        untold = self.best is None or any(f.undecided for f in self.findings)
        return EXIT_UNTOLD if untold else EXIT_FINE

    @property
    def verdict(self) -> str:
        """The last line: what it comes to."""
        bad = [f for f in self.findings if f.severity in _BAD]
        if bad:
            return f"Something is wrong: {bad[0].kind.title.lower()} [{bad[0].id}]."
        if self.best is None or self.now is None:
            first = next((f for f in self.findings if f.undecided), None)
            why = f": {first.kind.title.lower()} [{first.id}]" if first else ""
            return f"That could not be told{why}."
        untold = [f for f in self.findings if f.undecided]
        if untold:
            return f"That could not be told: {untold[0].kind.title.lower()} [{untold[0].id}]."
        said = "The server reads this drafter as it was trained: no other reading is better"
        if self.next_best is not None:
            more = round(-100 * self.next_best.steps)
            said += "; the next best one takes "
            said += f"{more}% more steps" if more > 0 else "as many steps"
        return f"{said}."

    def as_json(self) -> dict[str, Any]:
        """The report as plain data, for ``--json``. ``positions`` are those of the best reading, so
        that ``diagnose --url ... --expect FILE`` takes the report."""
        best = self.best
        return {
            "schema_version": JSON_SCHEMA_VERSION,
            "plugin": __version__,
            "vllm": self.release,
            "runner": self.runner,
            "target": self.target,
            "drafter": self.drafter,
            "how": self.how,
            "memory": self.memory,
            "num_speculative_tokens": self.k,
            "refused": self.refused,
            "drafts": best.accepted.counts.drafts if best else None,
            "accepted": list(best.accepted.counts.accepted) if best else None,
            "positions": _positions(best),
            "length": asdict(best.accepted.length) if best else None,
            "published": None
            if self.expected is None
            else {"rates": list(self.expected[0]), "source": self.expected[1]},
            "readings": [self._row_as_json(row) for row in self.rows],
            "head": self.head,
            "gain": None if self.gain is None else asdict(self.gain),
            "next_best": None if self.next_best is None else asdict(self.next_best),
            "additional_config": self.flag,
            "written": self.written,
            "exit_code": self.exit_code,
            "verdict": self.verdict,
            "findings": findings_as_json(self.findings),
        }

    def _row_as_json(self, row: Row) -> dict[str, Any]:
        counts = row.accepted.counts
        return {
            "reading": self._words(row),
            "now": row is self.now,
            "best": row is self.best,
            "told_apart": row.told_apart,
            "drafts": counts.drafts,
            "accepted": list(counts.accepted),
            "positions": _positions(row),
            "length": asdict(row.accepted.length),
            **_reading_as_json(row.score.reading),
        }

    def _words(self, row: Row) -> str:
        assert self.now is not None
        return described(row.score.reading, self.now.score.reading)

    def as_text(self, *, colour: bool = False, width: int | None = None) -> str:
        """The report for a person; arguments as of ``check``'s."""
        lines = [f"vllm-kimi-eagle3 {__version__} diagnose --offline"]
        for name, value in (
            ("target", self.target + (f", vLLM {self.release}" if self.release else "")),
            ("drafter", self.drafter),
            ("how", self.how),
            ("memory", self.memory),
            ("now", self._now_in_words()),
        ):
            if value:
                lines += field_lines(name, value, width)
        lines += self._table()
        if self.head:
            lines += ["", *field_lines("head", self.head, width)]
        for finding in self.findings:
            lines += ["", *finding_lines(finding, colour, width)]
        if self.written:
            lines += field_lines("copy", self.written, width)
        lines += ["", self.verdict]
        return "\n".join(lines)

    def _now_in_words(self) -> str:
        if self.now is None:
            return ""
        reading = self.now.score.reading
        aux = reading.aux
        parts = ["the final hidden state" if aux is None else f"aux layers {list(aux)}"]
        on = [n for n in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
              if getattr(reading, n)]  # fmt: skip
        parts += [f"{', '.join(on)} on" if on else "plain EAGLE-3"]
        parts += [f"rope {rope_words(reading.rope)}"]
        parts += [
            f"{part} {'the target' if owner == 'target' else 'its own'}".replace(
                "the target", "the target's"
            )
            for part, owner in (("embedding", reading.embedding), ("head", reading.head))
        ]
        return "; ".join(parts)

    def _table(self) -> list[str]:
        if not self.rows:
            return []
        names = "".join(f"{_ordinal(i + 1):>8}" for i in range(self.k))
        lines = ["", f"    {'tokens a step':<22}{names}   reading"]
        shown = [row for i, row in enumerate(self.rows) if i < _SHOWN or row is self.now]
        for row in shown:
            length = row.accepted.length
            rates = "".join(f"{rate.value:8.1%}" for rate in row.accepted.rates)
            mark = ">" if row is self.best else " " if row.told_apart else "~"
            words = self._words(row)
            interval = f"{length.value:.2f} ({length.low:.2f} to {length.high:.2f})"
            lines.append(printable(f"  {mark} {interval:<22}{rates}   {words}"))
        if len(self.rows) > len(shown):
            lines.append(f"    and {len(self.rows) - len(shown)} more that are worse")
        if any(row is not self.best and not row.told_apart for row in self.rows):
            lines.append("  ~ not told apart from the best one by these answers")
        if self.expected is not None:
            rates = "".join(f"{rate:8.0%}" for rate in self.expected[0])
            published = f"{1 + sum(self.expected[0]):.2f}"
            lines.append(printable(f"    {published:<22}{rates}   published: {self.expected[1]}"))
        return lines


def _ordinal(number: int) -> str:
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number, 'th') }"


def _positions(row: Row | None) -> list[dict[str, float]] | None:
    if row is None:
        return None
    rates, tried = row.accepted.rates, row.accepted.conditional
    return [{**asdict(r), "of_tried": t.value} for r, t in zip(rates, tried, strict=True)]


def _reading_as_json(reading: Reading) -> dict[str, Any]:
    return {
        "aux_hidden_state_layers": None if reading.aux is None else list(reading.aux),
        "fc_norm": reading.fc_norm,
        "norm_before_fc": reading.norm_before_fc,
        "norm_output": reading.norm_output,
        "norm_before_residual": reading.norm_before_residual,
        "rope": {
            "rope_theta": reading.rope.theta,
            "rope_type": reading.rope.kind,
            **reading.rope.scaling,
        },
        "rows": reading.rows,
        "embedding": reading.embedding,
        "head": reading.head,
    }
