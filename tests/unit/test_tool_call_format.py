# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kimi_eagle3.tool_parsers.kimi_k2_format import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    MARKERS,
    SECTION_BEGIN,
    SECTION_END,
    Reading,
    difference,
    read,
)

Called = list[tuple[str, str, str]]


def called(reading: Reading) -> Called:
    return [(call.id, call.name, call.arguments) for call in reading.calls]


def streamed(pieces: Iterable[str]) -> tuple[str, Called]:
    """Content and calls put together from deltas, as a client does it."""
    pieces = list(pieces)
    text, before, content = "", Reading(""), ""
    calls: list[list[str]] = []
    for number, piece in enumerate(pieces, 1):
        text += piece
        after = read(text, complete=number == len(pieces))
        new_content, deltas = difference(before, after)
        content += new_content
        for delta in deltas:
            if delta.id is not None and delta.name is not None:
                assert delta.index == len(calls)
                calls.append([delta.id, delta.name, ""])
            else:
                assert delta.arguments
            calls[delta.index][2] += delta.arguments
        before = after
    return content, [(call_id, name, arguments) for call_id, name, arguments in calls]


def cut(text: str, places: Iterable[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[i:j] for i, j in pairwise(bounds)]


def chunks(tokens: Sequence[str], size: int) -> list[str]:
    return ["".join(tokens[i : i + size]) for i in range(0, len(tokens), size)]


# ------------------------------------------------------------------------------------ well-formed

NAMES = ("get_weather", "functions.get_weather", "functions.f-2", "functions.ns.tool", "名")
SPACES = st.sampled_from(["", "", "", " ", "\n", " \n\t "])
BEGINNINGS = ["<", "<|", "<|tool", "<|tool_call", "<|tool_calls_section_begin|", "<|tool_call_end"]
# What looks like a marker and is none, and markers that are content there.
NOT_MARKERS = [*BEGINNINGS, "a < b", "{", "<think>", "😀 é\n", " ", CALL_BEGIN, CALL_END]
CONTENT = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(NOT_MARKERS)), max_size=5).map(
    "".join
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=10),
    # Within a string of the arguments.
    st.sampled_from([*BEGINNINGS, ARGUMENT_BEGIN, *SECTION_BEGIN, *SECTION_END, '"}', "{}"]),
)
JSON = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        SCALARS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=4,
)
ARGUMENTS = st.builds(
    json.dumps, JSON, ensure_ascii=st.booleans(), indent=st.sampled_from([None, 2])
)
# An index tells calls of the same function apart, and need not begin at 0.
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 12), ARGUMENTS), max_size=4)
PLACES = st.lists(st.integers(0, 10_000), max_size=40)


@st.composite
def messages(draw: st.DrawFn) -> tuple[str, str, Called]:
    """A message's text, and what is in it: content and calls."""
    content, calls = draw(CONTENT), draw(CALLS)
    if any(marker in content for marker in SECTION_BEGIN):
        content = ""
    if not calls and draw(st.booleans()):
        return content, content, []
    text = content + draw(st.sampled_from(SECTION_BEGIN))
    expected = []
    for name, index, arguments in calls:
        call_id = f"{name}:{index}"
        gap = [draw(SPACES) for _ in range(5)]
        text += f"{gap[0]}{CALL_BEGIN}{gap[1]}{call_id}{gap[2]}{ARGUMENT_BEGIN}{gap[3]}"
        text += f"{arguments}{gap[4]}{CALL_END}"
        expected.append((call_id, name.rpartition(".")[2], arguments))
    text += draw(st.sampled_from(["", *SECTION_END])) + draw(st.sampled_from(["", "\n", "After."]))
    return text, content, expected


@settings(max_examples=200)
@given(messages(), PLACES)
def test_any_chunking_gives_what_is_in_the_message(
    message: tuple[str, str, Called], places: list[int]
) -> None:
    text, content, expected = message
    whole = read(text, complete=True)
    assert (whole.content, called(whole)) == (content, expected)
    assert all(call.ended for call in whole.calls)
    assert streamed(cut(text, places)) == (content, expected)


@pytest.mark.parametrize("size", [1, 2, 4, 7, 100])
def test_tokens_at_a_time(size: int) -> None:
    tokens = [
        *("Let", " me", " see", ".", SECTION_BEGIN[0], CALL_BEGIN, "functions", ".f", ":", "0"),
        *(ARGUMENT_BEGIN, '{"', "a", '":', "1", "}", CALL_END, CALL_BEGIN, "functions", ".g", ":"),
        *("1", ARGUMENT_BEGIN, "{", "}", CALL_END, SECTION_END[0]),
    ]
    assert streamed(chunks(tokens, size)) == (
        "Let me see.",
        [("functions.f:0", "f", '{"a":1}'), ("functions.g:1", "g", "{}")],
    )


# ------------------------------------------------------------------------------------ anything

PIECES = [*MARKERS, *BEGINNINGS, "f:0", "functions.g:1", ":", " ", "\n", '{"a": 1}', "text"]
SOUP = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@settings(max_examples=200)
@given(SOUP, PLACES)
def test_nothing_is_taken_back(text: str, places: list[int]) -> None:
    """Whatever the text, and wherever it is cut: what was sent begins what is sent."""
    readings = [read(text[:end]) for end in range(len(text) + 1)]
    for earlier, later in pairwise(readings):
        assert later.content.startswith(earlier.content)
        assert len(later.calls) >= len(earlier.calls)
        for before, after in zip(earlier.calls, later.calls, strict=False):
            assert (after.id, after.name) == (before.id, before.name)
            assert after.arguments.startswith(before.arguments)
    whole = read(text, complete=True)
    assert streamed(cut(text, places)) == (whole.content, called(whole))
    assert not any(marker in whole.content for marker in SECTION_BEGIN)


@settings(max_examples=200)
@given(messages(), st.integers(0, 10_000), PLACES)
def test_a_message_that_breaks_off(
    message: tuple[str, str, Called], place: int, places: list[int]
) -> None:
    text, content, expected = message
    text = text[: place % (len(text) + 1)]
    got_content, got = streamed(cut(text, places))
    whole = read(text, complete=True)
    assert content.startswith(got_content) or got_content.startswith(content)
    if whole.in_section:
        assert got_content == content
    # All calls but the one that it breaks off in are there, and that one's arguments have begun.
    assert got[:-1] == expected[: max(len(got) - 1, 0)]
    if got:
        call_id, name, arguments = expected[len(got) - 1]
        assert got[-1][:2] == (call_id, name)
        assert arguments.startswith(got[-1][2])
        if got[-1][2] != arguments and not any(marker in arguments for marker in SECTION_END):
            assert not whole.calls[-1].ended


HEADER = f"{CALL_BEGIN}functions.f:0{ARGUMENT_BEGIN}"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("a <", "a <", []),
        ("<|tool_calls_section_begin", "<|tool_calls_section_begin", []),
        # A call without a section is text.
        (HEADER + "{}" + CALL_END, HEADER + "{}" + CALL_END, []),
        # No index, no id, no argument marker: no call, and the next one is found.
        (
            SECTION_BEGIN[0] + f"{CALL_BEGIN}f{ARGUMENT_BEGIN}{{}}{CALL_END}"
            f"{CALL_BEGIN}:0{ARGUMENT_BEGIN}{{}}{CALL_END}{CALL_BEGIN}f:0{CALL_END}"
            f"{HEADER}{{}}{CALL_END}",
            "",
            [("functions.f:0", "f", "{}")],
        ),
        # Without an end, the next call or the section's end is the end.
        (
            SECTION_BEGIN[0] + HEADER + '{"a": 1}' + HEADER + "{} " + SECTION_END[0] + " bye",
            "",
            [("functions.f:0", "f", '{"a": 1}'), ("functions.f:0", "f", "{}")],
        ),
        # A second section's calls count; text between the sections does not.
        (
            f"x{SECTION_BEGIN[0]}{HEADER}1{CALL_END}{SECTION_END[0]}y{SECTION_BEGIN[0]}{HEADER}2"
            f"{CALL_END}{SECTION_END[0]}",
            "x",
            [("functions.f:0", "f", "1"), ("functions.f:0", "f", "2")],
        ),
        (SECTION_BEGIN[0] + HEADER + CALL_END, "", [("functions.f:0", "f", "")]),
        ("x" + SECTION_BEGIN[1] + SECTION_END[1] + "y", "x", []),
    ],
)
def test_cases(text: str, content: str, calls: Called) -> None:
    whole = read(text, complete=True)
    assert (whole.content, called(whole)) == (content, calls)
    assert all(call.ended for call in whole.calls)
    assert streamed(text) == (content, calls)


def test_arguments_are_sent_as_they_come() -> None:
    """A call's id and name at once, and no character of the arguments later than it must be."""
    text = SECTION_BEGIN[0] + HEADER
    assert called(read(text)) == [("functions.f:0", "f", "")]
    for arguments, sent in [
        ('{"a": "', '{"a": "'),
        ('{"a": "b', '{"a": "b'),
        ('{"a": "b <', '{"a": "b'),
        ('{"a": "b <|tool_call_e', '{"a": "b'),
        ('{"a": "b <|tool_call_x', '{"a": "b <|tool_call_x'),
    ]:
        assert called(read(text + arguments)) == [("functions.f:0", "f", sent)]
        assert not read(text + arguments, complete=True).calls[0].ended
