# SPDX-License-Identifier: Apache-2.0
"""What can be said of a Kimi target with an EAGLE-3 drafter: one vocabulary for all who say it.

``check`` reports findings before a start; ``register()`` and vLLM's own start refuse or warn with
the same ones. A :class:`Kind` is what the documentation and ``check --explain`` know, a
:class:`Finding` is one met. One file per area, and ``catalogue.py`` has them all. Standard library
only, and the explanations are not imported until one is asked for: every process of a server
imports this package.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .kinds import Kind, Severity

__all__ = ["Evidence", "Finding", "Kind", "Severity"]


@dataclass(frozen=True)
class Evidence:
    """What a finding rests on; any part may be None.

    Attributes:
        file: the file that was read.
        key: the key, tensor, flag or variable in it.
        value: what stands there, in short.
        release: the vLLM that it was held against.
    """

    file: str | None = None
    key: str | None = None
    value: str | None = None
    release: str | None = None

    def __str__(self) -> str:
        said = self.key or ""
        if self.value is not None:
            said = f"{said} = {self.value}" if said else self.value
        where = ", ".join(p for p in (self.file, self.release and f"vLLM {self.release}") if p)
        return ": ".join(p for p in (where, said) if p)


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        id: of its :class:`Kind`.
        fact: one sentence, without a full stop.
        fix: what to do about it, in the user's own spelling of flags and keys; "" where there is
            nothing to do.
        evidence: what it rests on.
        rated: how bad it is here, where that differs from its kind.
        links: upstream links, where they differ from its kind's.
    """

    id: str
    fact: str
    fix: str = ""
    evidence: Evidence = field(default_factory=Evidence)
    rated: Severity | None = None
    links: tuple[str, ...] | None = None

    @property
    def kind(self) -> Kind:
        from .catalogue import KINDS

        return KINDS[self.id]

    @property
    def severity(self) -> Severity:
        return self.rated or self.kind.severity

    @property
    def undecided(self) -> bool:
        """It says that something could not be told, and nothing worse."""
        return self.kind.undecided and self.severity is Severity.NOTE

    @property
    def upstream(self) -> tuple[str, ...]:
        return self.kind.upstream if self.links is None else self.links

    @property
    def text(self) -> str:
        """One line for a log: the fact, the fix, and the id that ``check --explain`` takes."""
        return f"{'; '.join(p for p in (self.fact, self.fix) if p)} [{self.id}]"
