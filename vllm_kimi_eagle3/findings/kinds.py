# SPDX-License-Identifier: Apache-2.0
"""A kind of finding: what the documentation and ``check --explain`` know of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    """What a finding means for the run."""

    FAILS = "fails"  # It does not start, or ends at a request.
    WRONG = "wrong"  # It runs and is not what it should be, in silence.
    SLOW = "slow"  # It is right and costs more than it needs to.
    NOTE = "note"  # Worth knowing.


@dataclass(frozen=True)
class Kind:
    """A kind of finding.

    Attributes:
        id: its stable name, which begins with its area: ``drafter-fc-width``.
        severity: how bad it is, unless a finding says otherwise.
        title: what it is, in a few words.
        explanation: the long form for ``--explain`` and the documentation: how it comes about, on
            which releases, what is seen of it, what to do. Paragraphs, separated by a blank line.
        upstream: links to reports and fixes.
        undecided: it says that something could not be told.
    """

    id: str
    severity: Severity
    title: str
    explanation: str
    upstream: tuple[str, ...] = ()
    undecided: bool = False

    @property
    def area(self) -> str:
        """What it is about: the first word of its id."""
        return self.id.partition("-")[0]
