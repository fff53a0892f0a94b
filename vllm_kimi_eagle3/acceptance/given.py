# SPDX-License-Identifier: Apache-2.0
"""Acceptance as a person gives it: rates, an acceptance length, or an earlier report."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from .model import geometric

_MAX_BYTES = 16 << 20
_FORMS = "rates by position (76,56,43), a length (2.75, or 2.75@3 for three drafts), or a FILE"


@dataclass(frozen=True)
class Given:
    """Acceptance that somebody gave.

    Attributes:
        rates: by position; empty if only a length was given.
        length: mean acceptance length; 0 if rates were given.
        k: drafts a step that the length is of; 0 if that was not said.
        source: in words.
        measured: it is from an earlier report of this program.
        prompts: the digest of what that sent; "" if it only watched, or does not say.
    """

    rates: tuple[float, ...]
    length: float
    k: int
    source: str
    measured: bool = False
    prompts: str = ""

    def for_positions(self, k: int) -> tuple[float, ...]:
        """The rates; from a length with ``k`` drafts if nothing else was said.

        Raises:
            ValueError: no ``k`` drafts give that length.
        """
        if self.rates:
            return self.rates
        return geometric(self.length, self.k or k)


def given(text: str, flag: str) -> Given:
    """Reads what stands behind a flag.

    Raises:
        ValueError: it is none of the forms; the message names the flag and what it takes.
    """
    words = text.strip()
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(?:@(\d+))?", words)
    if number and (number[2] or "," not in words):
        if number[2] and not (len(number[2]) <= 4 and 1 <= int(number[2]) <= 64):
            raise ValueError(f"{flag} {words}: it is of 1 to 64 drafts a step; one takes {_FORMS}")
        return _length(float(number[1]), int(number[2] or 0), words, flag)
    if re.fullmatch(r"[\d.,%\s]+", words):
        return _rates(words, flag)
    return _file(Path(words), flag)


def _length(length: float, k: int, words: str, flag: str) -> Given:
    if not 1.0 <= length <= (k or 64) + 1.0:
        most = f"{k} drafts a step give 1 to {k + 1}" if k else "an acceptance length is 1 to 65"
        raise ValueError(f"{flag} {words}: {most}; one takes {_FORMS}")
    return Given((), length, k, f"{flag} {words}")


def _rates(words: str, flag: str) -> Given:
    try:
        numbers = [float(word.strip().rstrip("%")) for word in words.split(",")]
    except ValueError:
        raise ValueError(f"{flag} {words}: one takes {_FORMS}") from None
    if any("%" in word for word in words) or max(numbers) > 1:
        numbers = [number / 100 for number in numbers]
    return Given(_checked(numbers, f"{flag} {words}"), 0.0, 0, f"{flag} {words}")


def _checked(numbers: list[float], what: str) -> tuple[float, ...]:
    bad = next((n for n in numbers if not (math.isfinite(n) and 0 <= n <= 1)), None)
    if bad is not None:
        raise ValueError(f"{what}: a rate of {bad:g} cannot be")
    for before, after in pairwise(numbers):
        if after > before:
            raise ValueError(
                f"{what}: the rates of later positions cannot be higher ({before:.0%}, {after:.0%}"
                "); they are parts of all steps"
            )
    return tuple(numbers)


def _file(path: Path, flag: str) -> Given:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ValueError(f"{flag} {path} is larger than {_MAX_BYTES >> 20} MiB")
        report: Any = json.loads(text)
    except OSError as error:
        raise ValueError(
            f"{flag} {path} cannot be read: {error.strerror}; one takes {_FORMS}"
        ) from None
    except (UnicodeError, RecursionError, json.JSONDecodeError, OverflowError):
        raise ValueError(f"{flag} {path} is no JSON, as `diagnose --json` writes it") from None
    positions = report.get("positions") if isinstance(report, dict) else None
    try:
        numbers = [float(position["value"]) for position in positions or ()]
    except (TypeError, KeyError, ValueError, OverflowError):
        numbers = []
    if not numbers:
        raise ValueError(f"{flag} {path} has no acceptance by position, as `diagnose --json` does")
    rates = _checked(numbers, f"{flag} {path}")
    prompts = report.get("prompts")
    return Given(
        rates,
        0.0,
        len(rates),
        f"measured before, {path}",
        measured=True,
        prompts=prompts if isinstance(prompts, str) else "",
    )
