# SPDX-License-Identifier: Apache-2.0
"""Which flag a word is, and what its value means: argparse's rules with vLLM's types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .facts import Facts, Flag

_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_LONGEST_NUMBER = 64
_LONGEST_NAME = 200


@dataclass(frozen=True)
class Match:
    """A flag that a word names.

    Attributes:
        flag: the flag.
        spelling: as vLLM spells it, in full.
        off: it is the spelling that switches it off.
        glued: the value that stands in the same word without a ``=``: ``fp8`` of ``-qfp8``.
    """

    flag: Flag
    spelling: str
    off: bool = False
    glued: str | None = None


class Flags:
    """The flags of a release by all their spellings."""

    def __init__(self, facts: Facts) -> None:
        self.by_name: Mapping[str, Flag] = facts.flags
        self.spellings: dict[str, Match] = {}
        for flag in facts.flags.values():
            given = [f"--{flag.name}", *flag.aliases]
            for spelling in given:
                self.spellings.setdefault(spelling, Match(flag, spelling))
            if flag.value == "switch":
                for spelling in _off(given, facts.pairs_enable_with_disable):
                    self.spellings.setdefault(spelling, Match(flag, spelling, off=True))
        self._found: dict[str, tuple[Match, ...]] = {}

    def find(self, name: str) -> tuple[Match, ...]:
        """What ``name`` may stand for: one, if it is a spelling or begins just one of them."""
        exact = self.spellings.get(name)
        if exact is not None:
            return (exact,)
        if len(name) > _LONGEST_NAME or len(name) < 2 or name[0] != "-" or name == "--":
            return ()
        if name not in self._found:
            self._found[name] = self._beginning_with(name)
        return self._found[name]

    def _beginning_with(self, name: str) -> tuple[Match, ...]:
        found = [match for s, match in self.spellings.items() if s.startswith(name)]
        if not name.startswith("--") and (short := self.spellings.get(name[:2])) is not None:
            found.append(Match(short.flag, short.spelling, short.off, glued=name[2:]))
        return tuple(found)

    def is_flag(self, word: str) -> bool:
        """As argparse's ``_parse_optional``: what is no flag is a value, or the model."""
        if not word.startswith("-") or word == "-":
            return False
        if self.find(word.partition("=")[0]):
            return True
        return not _NEGATIVE_NUMBER.fullmatch(word) and " " not in word


def _off(spellings: list[str], pairs: bool) -> list[str]:
    """The spellings that switch a flag off. ``pairs``: as vLLM's EnableDisableAction, from 0.33."""
    longs = [s for s in spellings if s.startswith("--")]
    off = [f"--no-{s[2:]}" for s in longs]
    if pairs:
        for one, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
            off += [other + s.removeprefix(one) for s in longs if s.startswith(one)]
    return off


def listed(words: Iterable[str], most: int) -> str:
    """Words for a message, and how many more there are."""
    words = list(words)
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def integer(text: str) -> int | None:
    try:
        return int(text) if len(text) <= _LONGEST_NUMBER else None
    except ValueError:
        return None


def number(text: str) -> float | None:
    try:
        return float(text) if len(text) <= _LONGEST_NUMBER else None
    except ValueError:
        return None


def count(text: str) -> int | None:
    """As vLLM's ``human_readable_int``: ``32k`` is 32,000 and ``32K`` is 32,768."""
    text = text.strip()
    match = _HUMAN.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if match is None:
        return integer(text)
    if match[2] in _DECIMAL:
        return int(float(match[1]) * _DECIMAL[match[2]])
    whole = integer(match[1])  # No 1.5K: vLLM refuses decimals there.
    return None if whole is None else whole * _BINARY[match[2]]


def length(text: str) -> int | None:
    """As vLLM's ``human_readable_int_or_auto``: -1 for ``auto``."""
    return -1 if text.strip().lower() in ("-1", "auto") else count(text)
