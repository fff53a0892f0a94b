# SPDX-License-Identifier: Apache-2.0
"""JSON as people write it on a command line, and what is wrong with it where it is none."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_kimi_eagle3.checkpoint.errors import quoted

from .command_flags import count

_SUFFIX = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')
_GENERAL = 'write a JSON object in single quotes, with double quotes inside: \'{"key": "value"}\''
_LONGEST_FIX = 2000
_LONGEST_HUMAN = 20_000


@dataclass(frozen=True)
class Broken:
    """A text that is no JSON.

    Attributes:
        what: what is wrong and where, for a message.
        fix: what to write instead.
    """

    what: str
    fix: str


def read_json(text: str, *, human_numbers: bool = False) -> Any:
    """The value of a JSON text, or a :class:`Broken`. Never raises.

    Args:
        text: the text.
        human_numbers: ``80g`` outside strings stands for 80,000,000,000, as vLLM has it in some
            options (``_expand_json_human_readable_numbers``).
    """
    try:
        return json.loads(text)
    except RecursionError:
        return Broken("it nests too deep", "write it flat")
    except ValueError as error:
        if human_numbers and len(text) <= _LONGEST_HUMAN and _SUFFIX.search(text):
            parts = _STRING.split(text)
            parts[::2] = [_SUFFIX.sub(lambda m: str(count(m[0])), part) for part in parts[::2]]
            return read_json("".join(parts))
        what, place = str(error), ""
        if isinstance(error, json.JSONDecodeError):
            what = error.msg[:1].lower() + error.msg[1:]
            near = text[max(0, error.pos - 12) : error.pos + 12]
            place = f" at character {error.pos + 1}" + (f", near {quoted(near)}" if near else "")
        return Broken(what + place, repaired(text) or _GENERAL)


def as_argument(flag: str, value: object) -> str:
    """A flag with JSON, to be pasted into a shell; "" if it is too long to be of use."""
    text = json.dumps(value)
    return f"{flag} {shlex.quote(text)}" if len(text) <= _LONGEST_FIX else ""


def repaired(text: str) -> str:
    """How to write the object that ``text`` was probably meant to be; "" if that is not clear."""
    text = text.strip()
    for why, candidate in _repairs(text) if 1 < len(text) <= _LONGEST_FIX else ():
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and value:
            return f"{why}: {shlex.quote(json.dumps(value))}"
    return ""


def _repairs(text: str) -> Iterator[tuple[str, str]]:
    """What may be wrong with ``text``, and what it is without that; the likeliest first."""
    straight = re.sub("[\u201c\u201d\u201e]", '"', text)
    if straight != text:
        yield "use straight double quotes", straight
    comma = re.sub(r",(\s*[}\]])", r"\1", straight)
    yield "leave out the comma in front of the bracket", comma
    for closing in ("}", '"}', "]}"):
        yield "close what is open", straight + closing
    names = re.sub(r"\b(True|False|None)\b", lambda m: _JSON_NAMES[m[0]], comma)
    yield "JSON has true, false and null", names
    yield "JSON has double quotes inside", names.replace("'", '"')
    # What a shell leaves of JSON that is not quoted: it takes the double quotes away.
    inner = comma.removeprefix("{").removesuffix("}")
    bare = _BARE.sub(lambda m: m[1] + _with_quotes(m[2]), "{" + inner + "}")
    yield "put the whole into single quotes, or the shell takes the double ones away", bare


_JSON_NAMES = {"True": "true", "False": "false", "None": "null"}
_BARE = re.compile(r"([{\[,:]\s*)([A-Za-z_./~][^,{}\[\]:]*)")


def _with_quotes(word: str) -> str:
    word = word.strip()
    return word if word in ("true", "false", "null") else json.dumps(word)
