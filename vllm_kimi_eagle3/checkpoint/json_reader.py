# SPDX-License-Identifier: Apache-2.0
"""JSON out of files that nobody vouches for, in bounded memory.

As Python objects JSON takes up to thirty times the bytes that it has in a file. A safetensors
header or an index, which may have tens of megabytes, is therefore read member by member
(:class:`JsonReader`); what is needed as a whole (config.json) is first held against a bound on what
it would become (:func:`parsed`).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from io import FileIO
from typing import Any, NoReturn

# One member of an object in a header or an index, and twice as much may pass. Those of a real
# checkpoint have some 200 bytes; "__metadata__" may hold a few pages of text.
_MAX_MEMBER = 1024 * 1024

# Bytes as CPython 3.10 to 3.14 allocates them, at most: a dict with a few members and with the
# pair list that it is made from; a list; and for each element its place in it with a number or the
# fixed part of a string.
_OBJECT_BYTES, _LIST_BYTES, _ELEMENT_BYTES = 400, 80, 100

# For a whole file that is parsed at once.
_MAX_PARSED_BYTES = 16 * 1024 * 1024

# No number in a config has as many digits. int() takes quadratic time over them on Python 3.10.
_MAX_DIGITS = 400

_SPACES = " \t\n\r"
_SPACE = re.compile(f"[{_SPACES}]*").match
# A name without escapes, and its colon.
_PLAIN_NAME = re.compile(rf'[{_SPACES}]*"([^"\\\x00-\x1f]*)"[{_SPACES}]*:').match
_NO_JSON = "holds no valid JSON: "
_OTHER_VALUES = '["-0123456789tfn'  # What begins one.
_TAIL = 16  # Longer than any token that is not a string: what is cut off inside it ends there.


class NotJsonError(ValueError):
    """The text is no JSON, or no object where there has to be one."""


class NotAnObjectError(NotJsonError):
    """The text is another kind of JSON value."""


class TooLargeError(ValueError):
    """The text may be JSON, and is larger than anything of its kind."""


class JsonObject(dict[str, Any]):
    """A JSON object that knows whether a name was repeated in it.

    Attributes:
        repeated: a name that was given more than once, of which the last counts; None if none was.
    """

    repeated: str | None = None


class JsonReader:
    """Reads an object from a file, one member at a time, in memory that its length does not change.

    :meth:`items` yields names and values; with :meth:`members` a value that is an object can be
    read by its own members.
    """

    def __init__(self, file: FileIO, length: int) -> None:
        """Read ``length`` bytes from where ``file`` stands."""
        self._file, self._left = file, length
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at = "", 0
        self._before = 0  # Characters before those in _text.

    def members(self) -> Iterator[str]:
        """The names in an object, in their order, repeated ones as often as they stand there.

        Before it goes on, the caller takes the value, with :meth:`value` or, where that is an
        object, with another :meth:`members` or :meth:`items`.

        Raises:
            NotAnObjectError: there is another value in its place.
            NotJsonError: it, or what follows, is no JSON.
            TooLargeError: a name is longer than 1 MiB.
            EOFError: the file has become shorter.
            OSError: it cannot be read.
        """
        more = self._opens()
        while more:
            yield self._name()
            more = self._goes_on()

    def items(self) -> Iterator[tuple[str, Any]]:
        """Names and values of an object, as :meth:`members` and :meth:`value` give them."""
        more = self._opens()
        while more:
            yield self._name(), self.value()
            more = self._goes_on()

    def value(self) -> Any:
        """The value that follows a name. Objects are :class:`JsonObject`.

        Raises: as :meth:`members`; TooLargeError also for a value of more than 1 MiB.
        """
        self._next()
        if self._left and len(self._text) - self._at < _MAX_MEMBER:
            self._make_room()
        try:
            value, self._at = _decode(self._text, self._at)
        except json.JSONDecodeError as error:
            self._cut_off_or_wrong(error)
        except RecursionError:
            raise NotJsonError("holds JSON that is nested too deep") from None
        except ValueError as error:  # A number of too many digits, a constant that JSON has not.
            self._fail(" ".join(str(error).split())[:100])
        return value

    def end(self) -> None:
        """Only white space is left.

        Raises: as :meth:`members`.
        """
        if self._next():
            self._fail("more follows the object")

    def _opens(self) -> bool:
        """Goes into an object; False if it is empty, and then behind it."""
        found = self._next()
        if found != "{":
            if found and found in _OTHER_VALUES:
                raise NotAnObjectError("holds JSON that is no object")
            self._fail("no object begins")
        self._at += 1
        if self._next() != "}":
            return True
        self._at += 1
        return False

    def _goes_on(self) -> bool:
        """Goes behind the comma after a member; False if it was the last, and then behind it."""
        found = self._next()
        if found not in (",", "}"):
            self._fail("a comma or a closing brace is missing")
        self._at += 1
        return found == ","

    def _name(self) -> str:
        if self._left and len(self._text) - self._at < _MAX_MEMBER:
            self._make_room()
        plain = _PLAIN_NAME(self._text, self._at)
        if plain is not None:
            self._at = plain.end()
            return plain[1]
        if self._next() != '"':
            self._fail("a name in double quotes is missing")
        self._make_room()
        try:
            name, self._at = _decode(self._text, self._at)
        except json.JSONDecodeError as error:
            self._cut_off_or_wrong(error)
        if self._next() != ":":
            self._fail("a colon is missing")
        self._at += 1
        return str(name)

    def _next(self) -> str:
        """Goes to the next character that is no white space; "" at the end."""
        while True:
            found = self._text[self._at : self._at + 1]
            if found not in _SPACES:
                return found
            if found:
                space = _SPACE(self._text, self._at)
                self._at = self._at if space is None else space.end()
            elif not self._read():
                return ""

    def _make_room(self) -> None:
        """As much of the text as one member may have is there."""
        while self._left and len(self._text) - self._at < _MAX_MEMBER:
            self._read()

    def _read(self) -> bool:
        if not self._left:
            return False
        chunk = self._file.read(min(self._left, _MAX_MEMBER))
        if not chunk:
            raise EOFError
        self._left -= len(chunk)
        try:
            more = self._decoder.decode(chunk, final=not self._left)
        except UnicodeDecodeError:
            raise NotJsonError(f"{_NO_JSON}it is not UTF-8") from None
        if not self._before and not self._text and more.startswith("\ufeff"):
            raise NotJsonError(f"{_NO_JSON}it begins with a byte order mark")
        self._before += self._at
        self._text, self._at = self._text[self._at :] + more, 0
        return True

    def _cut_off_or_wrong(self, error: json.JSONDecodeError) -> NoReturn:
        cut_off = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - _TAIL
        if self._left and cut_off:
            raise TooLargeError(f"has an entry of more than {_MAX_MEMBER // 1024**2} MiB")
        self._at = error.pos
        self._fail(error.msg)

    def _fail(self, what: str) -> NoReturn:
        raise NotJsonError(f"{_NO_JSON}{what}, at character {self._before + self._at}")


def parsed(data: bytes | bytearray) -> JsonObject:
    """The JSON object in a whole file, with ``NaN`` and ``Infinity``, which Python's own reader
    takes as well.

    Raises:
        NotJsonError: it is no JSON, or no object.
        TooLargeError: it would take more than 16 MiB as Python objects.
    """
    size = (
        _OBJECT_BYTES * data.count(b"{")
        + _LIST_BYTES * data.count(b"[")
        + _ELEMENT_BYTES * data.count(b",")
        + len(data)
    )
    if size > _MAX_PARSED_BYTES:
        raise TooLargeError(f"holds {data.count(b',') + 1} values in {len(data)} bytes")
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=json_object, parse_int=_bounded_int
        )
    except RecursionError:
        raise NotJsonError("holds JSON that is nested too deep") from None
    except UnicodeDecodeError:
        raise NotJsonError(f"{_NO_JSON}it is not UTF-8") from None
    except ValueError as error:
        if data.startswith(codecs.BOM_UTF8):
            raise NotJsonError(f"{_NO_JSON}it begins with a byte order mark") from None
        raise NotJsonError(f"{_NO_JSON}{' '.join(str(error).split())[:100]}") from None
    if not isinstance(value, JsonObject):
        raise NotAnObjectError("holds JSON that is no object")
    return value


def json_object(pairs: list[tuple[str, Any]]) -> JsonObject:
    """A :class:`JsonObject` of the pairs of one object, as ``json`` hands them over."""
    result = JsonObject(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                result.repeated = name
                break
            seen.add(name)
    return result


def _bounded_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_decode = json.JSONDecoder(object_pairs_hook=json_object, parse_constant=_no_constant).raw_decode
