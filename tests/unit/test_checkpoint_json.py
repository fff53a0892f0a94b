# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kimi_eagle3.checkpoint import json_reader as module
from vllm_kimi_eagle3.checkpoint.json_reader import (
    JsonReader,
    NotAnObjectError,
    NotJsonError,
    TooLargeError,
    parsed,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)  # fmt: skip


def read(path: Path, content: bytes) -> dict[str, Any]:
    path.write_bytes(content)
    with open(path, "rb", buffering=0) as file:
        reader = JsonReader(file, len(content))
        found: dict[str, Any] = dict(reader.items())
        reader.end()
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("json") / "x.json"


@given(st.dictionaries(st.text(max_size=8), JSON), st.integers(0, 3) | st.none(), st.booleans())
@settings(max_examples=120)
def test_members_are_those_that_json_reads(
    path: Path, value: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    content = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode(
        "utf-8", "surrogatepass" if ascii_only else "replace"
    )
    assert read(path, content) == json.loads(content)


@given(st.text(alphabet='{}[]",:0123456789.eE+-tfnulasr \n\t\\', max_size=40).map(str.encode))
@settings(max_examples=700)
def test_any_text_is_read_as_json_reads_it(path: Path, content: bytes) -> None:
    def strict(name: str) -> None:
        raise ValueError(name)

    try:
        expected = json.loads(content, parse_constant=strict)
    except ValueError:
        expected = None
    try:
        found = read(path, content)
    except NotJsonError:
        assert not isinstance(expected, dict)
    else:
        assert found == expected


@given(st.dictionaries(st.text(max_size=8), JSON, min_size=1), st.integers(300, 400))
@settings(max_examples=120)
def test_windows_do_not_show(path: Path, value: dict[str, Any], window: int) -> None:
    content = json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8", "replace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MAX_MEMBER", window)
        try:
            assert read(path, content) == json.loads(content)
        except TooLargeError:
            assert any(len(json.dumps(inner, indent=1)) + len(name) > window - 20
                       for name, inner in value.items())  # fmt: skip


def test_members_within_members(path: Path) -> None:
    content = b'{"a": {"b": 1, "c": {"d": []}}, "e": 2}'
    path.write_bytes(content)
    with open(path, "rb", buffering=0) as file:
        reader = JsonReader(file, len(content))
        names = []
        for name in reader.members():
            names.append((name, list(reader.items()) if name == "a" else reader.value()))
        reader.end()
    assert names == [("a", [("b", 1), ("c", {"d": []})]), ("e", 2)]


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (b"[]", NotAnObjectError, "no object"),
        (b"", NotJsonError, "no object begins"),
        (b"{", NotJsonError, "name in double quotes"),
        (b"{1: 2}", NotJsonError, "name in double quotes"),
        (b'{"a" 2}', NotJsonError, "colon"),
        (b'{"a": }', NotJsonError, "Expecting value"),
        (b'{"a": 2', NotJsonError, "comma or a closing brace"),
        (b'{"a": 2,}', NotJsonError, "name in double quotes"),
        (b'{"a": 2} x', NotJsonError, "more follows"),
        (b'{"a": NaN}', NotJsonError, "NaN is no JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", NotJsonError, "no valid JSON"),
        (b'{"\\x": 1}', NotJsonError, "escape"),
        (b'{"a": "\xff"}', NotJsonError, "not UTF-8"),
        (b'{"a": "\xe2\x82', NotJsonError, "not UTF-8"),
        (b"\xef\xbb\xbf{}", NotJsonError, "byte order mark"),
        (b'{"a": "' + b"x" * 3 * 2**20 + b'"}', TooLargeError, "1 MiB"),
        (b'{"' + b"x" * 3 * 2**20 + b'": 1}', TooLargeError, "1 MiB"),
        (b'{"a": [' + b"0," * 2**20 + b"0]}", TooLargeError, "1 MiB"),
        (b'{"a": [0 ' + b"0," * 2**20 + b"0]}", NotJsonError, "Expecting ','"),
    ],
)
def test_what_is_wrong_is_said(
    path: Path, content: bytes, error: type[ValueError], says: str
) -> None:
    with pytest.raises(error, match=says):
        read(path, content)


def test_where_it_is_wrong_is_said_beyond_the_first_window(path: Path) -> None:
    content = b'{"a": "' + b"x" * 1_000_000 + b'", "b": "' + b"y" * 1_000_000 + b'", !}'
    with pytest.raises(NotJsonError, match=f"at character {len(content) - 2}"):
        read(path, content)


def test_a_file_that_became_shorter(path: Path) -> None:
    path.write_bytes(b'{"a": 1}')
    with open(path, "rb", buffering=0) as file, pytest.raises(EOFError):
        list(JsonReader(file, 100).items())


@given(JSON)
def test_a_whole_file_is_read_as_json_reads_it(value: Any) -> None:
    content = json.dumps(value).encode()
    if isinstance(value, dict):
        assert parsed(content) == json.loads(content)
    else:
        with pytest.raises(NotAnObjectError):
            parsed(content)


def test_what_python_reads_is_read() -> None:
    assert parsed(b'{"a": 1' + b"0" * 300 + b"}")["a"] == 10**300
    with pytest.raises(NotJsonError, match="a number of 1001 digits"):
        parsed(b'{"a": 1' + b"0" * 1000 + b"}")
    assert parsed(b'{"a": [NaN, Infinity, -Infinity, 1e999]}')["a"][1:] == [
        float("inf"), -float("inf"), float("inf"),
    ]  # fmt: skip
    assert parsed(b'{"a": 1, "b": {"c": 2, "c": 3}, "a": 4}').repeated == "a"
    assert parsed(b'{"b": {"c": 2, "c": 3}}')["b"].repeated == "c"


@pytest.mark.parametrize(
    "element",
    [b"[]", b"{}", b"0", b"1.5", b"99999", b"[[]]", b'"ab"', b'{"a":1}', b'{"a":{}}', b'""',
     '"\N{GRINNING FACE}"'.encode(), '"\N{LATIN SMALL LETTER E WITH ACUTE}"'.encode(),
     b'{"a":1,"b":2}', b'{"a":1,"b":2,"c":3,"d":4,"e":5,"f":6}'],
)  # fmt: skip
def test_what_is_parsed_takes_no_more_than_its_bound(
    element: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 1024 * 1024
    monkeypatch.setattr(module, "_MAX_PARSED_BYTES", bound)

    def content(count: int) -> bytes:
        return b'{"a":[' + b",".join([element] * count) + b"]}"

    def fits(count: int) -> bool:
        try:
            parsed(content(count))
        except TooLargeError:
            return False
        return True

    low, high = 1, bound
    while high - low > low // 50 + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    largest = content(low)
    tracemalloc.start()
    parsed(largest)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * bound, f"{low} of {element!r}"
