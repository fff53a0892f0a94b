# SPDX-License-Identifier: Apache-2.0
"""Characters that only look like those of a command: what chats, web pages and word processors
put in place of blanks, dashes and quotes. To the shell and to vLLM they are letters.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

BLANKS = frozenset(
    "\u00a0\u1680\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
)
NOTHING = frozenset("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff")
# What each stands for in front of a word of several letters.
DASHES = {
    "\u2010": "-",
    "\u2011": "-",
    "\u2012": "-",
    "\u2212": "-",
    "\u2013": "--",
    "\u2014": "--",
    "\u2015": "--",
}
DOUBLE = frozenset("\u201c\u201d\u201e\u201f\u00ab\u00bb")
SINGLE = frozenset("\u2018\u2019\u201a\u201b")
STRAIGHT = {ord(c): '"' for c in DOUBLE} | {ord(c): "'" for c in SINGLE}
_ALL = "".join(sorted(BLANKS | NOTHING | DASHES.keys() | DOUBLE | SINGLE))
_ANY = re.compile(f"[{_ALL}]")
_IN_FRONT_OF_A_FLAG = re.compile(f"[{''.join(BLANKS)}][{re.escape('-' + ''.join(DASHES))}]")
_QUOTE = re.compile("['\"]")
_PLAIN = re.compile(r"[^\s'\"\\$`;|&<>#~^]+", re.ASCII)


@dataclass(frozen=True)
class Lookalike:
    """One that stands in a command.

    Attributes:
        character: it.
        place: where, in words; "" if that is not known.
        meant: what it looks like.
    """

    character: str
    place: str
    meant: str

    @property
    def name(self) -> str:
        """``U+00A0 (no-break space)``."""
        name = unicodedata.name(self.character, "").lower()
        return f"U+{ord(self.character):04X}" + (f" ({name})" if name else "")


def rejoined(words: Sequence[str]) -> str | None:
    """Words that a shell has passed on, as one text again; None if they have no look-alikes where
    those matter. Within a text that has any, such as a template, they are left alone."""
    if not any(_matters(word) for word in words):
        return None
    return " ".join(_unquoted(word) for word in words)


def _matters(word: str) -> bool:
    """In front of a word, in a flag, in front of a flag, or at the end: in no text, that is."""
    word = _QUOTE.split(word, 1)[0]
    if _ANY.match(word) or (word.startswith("-") and _ANY.search(word)):
        return True
    return word[-1:] in BLANKS | NOTHING or _IN_FRONT_OF_A_FLAG.search(word) is not None


def _unquoted(word: str) -> str:
    return word if _PLAIN.fullmatch(word) else shlex.quote(word)
