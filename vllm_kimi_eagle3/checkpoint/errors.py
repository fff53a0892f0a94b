# SPDX-License-Identifier: Apache-2.0
"""What is raised where a checkpoint folder cannot be what it is given as."""

from __future__ import annotations

import reprlib
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint is broken or contradicts itself.

    The message is one line: what is wrong, where (file, and tensor or key), and the fix.
    """


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = 120
        self.maxlist, self.maxlevel = 8, 2

    def repr_instance(self, x: Any, level: int) -> str:
        return "{...}" if isinstance(x, dict) else super().repr_instance(x, level)


def quoted(value: Any) -> str:
    """``repr`` for a message, of whatever a file held: on one line, bounded in length and depth."""
    return _SHORT.repr(value)


_SHORT = _Short()
