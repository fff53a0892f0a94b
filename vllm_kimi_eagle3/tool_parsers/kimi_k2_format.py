# SPDX-License-Identifier: Apache-2.0
"""Kimi-K2's tool-call format, as a function of the text alone.

::

    content<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0
    <|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>

:func:`read` says what is certain of a text that may go on, and never takes anything back: what it
says of a text begins what it says of every continuation. So a stream is the difference between two
readings (:func:`difference`), whatever the deltas were. Imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# The singular spelling is one that models also write.
SECTION_BEGIN = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
SECTION_END = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
CALL_BEGIN = "<|tool_call_begin|>"
ARGUMENT_BEGIN = "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
MARKERS = (*SECTION_BEGIN, *SECTION_END, CALL_BEGIN, ARGUMENT_BEGIN, CALL_END)


@dataclass(frozen=True)
class Call:
    """A tool call.

    Attributes:
        id: as the model wrote it, ``functions.NAME:INDEX``.
        name: the function's name.
        arguments: the JSON text as the model wrote it, without the white space around it; its
            beginning, while the call is not ended.
        ended: whether the arguments are complete.
    """

    id: str
    name: str
    arguments: str
    ended: bool


@dataclass(frozen=True)
class Reading:
    """What is certain of a text.

    Attributes:
        content: what precedes the section of tool calls.
        calls: the tool calls whose id is known, in order.
        in_section: whether a section of tool calls has begun.
    """

    content: str
    calls: tuple[Call, ...] = ()
    in_section: bool = False


@dataclass(frozen=True)
class CallDelta:
    """What is new of a tool call.

    Attributes:
        index: the call's place in the message, from 0.
        arguments: the new part of the arguments' text; may be empty.
        id: the call's id, in its first delta only.
        name: the function's name, in the call's first delta only.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


def read(text: str, *, complete: bool = False) -> Reading:
    """What is certain of ``text``.

    Content ends where the first section begins; all that follows is tool calls, and what is
    neither (text between calls and after the section, a call without an id) is left out. A call
    ends at ``<|tool_call_end|>``, before which any other marker but the begin of the next call is
    part of the arguments. Without one, the call ends where its section or the next call shows that
    it has.

    Args:
        text: a message from its beginning.
        complete: whether nothing follows. Otherwise an end that may be the first half of a marker
            is not content yet.
    """
    section, marker = _first(text, SECTION_BEGIN)
    if not marker:
        return Reading(text if complete else text[: _possible_marker(text, SECTION_BEGIN)])
    return Reading(text[:section], tuple(_calls(text, section + len(marker))), True)


def difference(before: Reading, after: Reading) -> tuple[str, tuple[CallDelta, ...]]:
    """What ``after`` has that ``before`` has not: content, and tool calls.

    Args:
        before: a reading of the beginning of a text.
        after: a reading of more of that text.
    """
    deltas = []
    for index, call in enumerate(after.calls):
        if index >= len(before.calls):
            deltas.append(CallDelta(index, call.arguments, call.id, call.name))
        elif new := call.arguments[len(before.calls[index].arguments) :]:
            deltas.append(CallDelta(index, new))
    return after.content[len(before.content) :], tuple(deltas)


def _calls(text: str, position: int) -> Iterator[Call]:
    while (begin := text.find(CALL_BEGIN, position)) >= 0:
        position = begin + len(CALL_BEGIN)
        header_end = text.find("<", position)
        if header_end < 0:
            return
        call_id = text[position:header_end].strip()
        name, _, index = call_id.rpartition(":")
        if not (text.startswith(ARGUMENT_BEGIN, header_end) and name and index.isdecimal()):
            continue
        arguments, ended, position = _arguments(text, header_end + len(ARGUMENT_BEGIN))
        yield Call(call_id, name.split(":")[0].split(".")[-1], arguments, ended)


def _arguments(text: str, start: int) -> tuple[str, bool, int]:
    """The arguments from ``start`` on, whether they are complete, and where to read on."""
    end, marker = _first(text, (CALL_END, CALL_BEGIN), start)
    if marker == CALL_END:
        return text[start:end].strip(), True, end + len(marker)
    section_end, section_marker = _first(text, SECTION_END, start, end)
    if section_marker:
        return text[start:section_end].strip(), True, end
    if marker:
        return text[start:end].strip(), True, end
    open_end = _possible_marker(text, (CALL_END, CALL_BEGIN, *SECTION_END), start)
    return text[start:open_end].strip(), False, end


def _first(
    text: str, markers: tuple[str, ...], start: int = 0, end: int | None = None
) -> tuple[int, str]:
    """Where the first of ``markers`` is, and which; the end and "" if there is none."""
    end = len(text) if end is None else end
    found = ((text.find(marker, start, end), marker) for marker in markers)
    return min(((at, marker) for at, marker in found if at >= 0), default=(end, ""))


def _possible_marker(text: str, markers: tuple[str, ...], start: int = 0) -> int:
    """Where the end of ``text`` may be the beginning of one of ``markers``; else its length."""
    # Markers have "<" at their beginning only.
    at = text.rfind("<", start)
    if at >= 0 and any(marker.startswith(text[at:]) for marker in markers):
        return at
    return len(text)
