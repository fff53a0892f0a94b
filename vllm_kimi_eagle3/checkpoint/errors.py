# SPDX-License-Identifier: Apache-2.0
"""What is raised where a checkpoint folder cannot be what it is given as."""

from __future__ import annotations

import os
import reprlib
from typing import Any

from vllm_kimi_eagle3.findings import Evidence, Finding


class CheckpointError(ValueError):
    """A checkpoint is broken or contradicts itself.

    As text it is one line: what is wrong and where (file, and tensor or key), then the fix.

    Attributes:
        finding: the same with its id and evidence; ``finding.text`` is the line for a log.
    """

    def __init__(
        self,
        id: str,
        fact: str,
        fix: str = "",
        *,
        file: str | os.PathLike[str] | None = None,
        key: str | None = None,
        value: Any = None,
    ) -> None:
        """Make the error of one finding.

        Args:
            id: of its :class:`~vllm_kimi_eagle3.findings.Kind`.
            fact: what is wrong and where, without a full stop; names and values out of files are
                in it :func:`quoted`.
            fix: what to do about it.
            file: the file that was read.
            key: the key or tensor in it, as it was read.
            value: what stands there, as it was read: it is quoted here. None: not stated.
        """
        super().__init__(id, fact, fix)
        self.finding = Finding(
            id,
            fact,
            fix,
            Evidence(
                file=None if file is None else plain(os.fspath(file)),
                key=None if key is None else plain(key),
                value=None if value is None else quoted(value),
            ),
        )

    def __str__(self) -> str:
        return "; ".join(part for part in (self.finding.fact, self.finding.fix) if part)


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = 120
        self.maxlist, self.maxlevel = 8, 2

    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"  # As it stands in a JSON file.

    def repr_NoneType(self, x: None, level: int) -> str:  # noqa: N802
        return "null"

    def repr_instance(self, x: Any, level: int) -> str:
        return "{...}" if isinstance(x, dict) else super().repr_instance(x, level)


def quoted(value: Any) -> str:
    """``repr`` for a message, of whatever a file held: on one line, bounded in length and depth."""
    return _SHORT.repr(value)


def plain(text: str) -> str:
    """``text`` without quotation marks for a message: what cannot be printed is escaped, and what
    is longer than any path is shortened in the middle."""
    if len(text) > _MAX_PLAIN:
        text = f"{text[: _MAX_PLAIN // 2]}...{text[-_MAX_PLAIN // 2 :]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


_SHORT = _Short()
_MAX_PLAIN = 1000
