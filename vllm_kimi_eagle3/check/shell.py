# SPDX-License-Identifier: Apache-2.0
"""A command as it was pasted, taken apart as a POSIX shell would.

Not :mod:`shlex`: a pasted command has line continuations, comments, ``export`` lines in front, a
prompt, and a pipe to ``tee`` behind, and nothing in it may be run or expanded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from . import lookalikes
from .lookalikes import Lookalike

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{[A-Za-z_]|[A-Za-z_(])|`")
_NAMED = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)
# What begins a command that the shell may skip or repeat: values are not followed from there on.
_BRANCHES = frozenset(["if", "for", "while", "until", "case", "select", "function", "{", "("])
_LONGEST_VALUE = 64 * 1024
_MOST_LOOKALIKES = 200
_BLANKS_TO_THE_END = re.compile(r"[ \t\r]*(?:\n|\Z)")
_BLANK_LINES = re.compile(r"\n[ \t\r\n]*")
_REDIRECT = re.compile(r"[<>]+[&|]?[ \t]*[^\s;|&<>'\"]*")
MOST_WORDS = 10_000  # Of a command; no set of flags comes near.
_PROMPTS = ("$", "#", ">", "%")


@dataclass(frozen=True)
class Word:
    """One word of a command.

    Attributes:
        text: what the program would get.
        bare: it is JSON that was not quoted, and the shell took the JSON's own quotes away:
            ``{"a":1}`` became ``{a:1}``.
        expands: the shell would put a variable's value or a command's output into it.
        home: it begins with a ``~`` that the shell replaces.
        lookalikes: what was read as another character in it and at its ends.
    """

    text: str
    bare: bool = False
    expands: bool = False
    home: bool = False
    lookalikes: tuple[Lookalike, ...] = ()


@dataclass(frozen=True)
class Line:
    """One simple command.

    Attributes:
        words: the command and its arguments.
        environ: the assignments in front of it, and those that were exported before.
    """

    words: tuple[Word, ...]
    environ: tuple[tuple[str, str], ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """What the program would get."""
        return tuple(word.text for word in self.words)


class ShellError(ValueError):
    """A text that is no command.

    Attributes:
        fix: what to do about it.
        near: what stands where it is none.
    """

    def __init__(self, what: str, fix: str, near: str = "") -> None:
        super().__init__(what)
        self.fix = fix
        self.near = near


def lines_of(text: str) -> list[Line]:
    """The simple commands of ``text``, in order.

    Raises:
        ShellError: a quote is not closed, or there are too many words.
    """
    lines: list[Line] = []
    exported: list[tuple[str, str]] = []
    for words in _Scanner(text).commands():
        environ: list[tuple[str, str]] = []
        while words and words[0].text in _PROMPTS:
            words = words[1:]
        if words and words[0].text == "export":
            exported += [(m[1], m[2]) for w in words[1:] if (m := assignment(w.text))]
            continue
        while words and (match := assignment(words[0].text)):
            environ.append((match[1], match[2]))
            words = words[1:]
        if words:
            lines.append(Line(tuple(words), (*exported, *environ)))
    return lines


def has_variable(text: str) -> bool:
    """True if a shell would put something into ``text``."""
    return _VARIABLE.search(text) is not None


def assignment(word: str) -> re.Match[str] | None:
    """``NAME=value``: a match with name and value; None if the word is none."""
    return _ASSIGNMENT.fullmatch(word)


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._count = 0
        self._commands: list[list[Word]] = [[]]
        self._lookalikes: list[Lookalike] = []
        self._odd_ones = 0
        self._values: dict[str, str] = {}  # Of the variables that were set above.
        self._followed = True
        self._conditional = False  # The command runs only if the one before succeeds, or fails.
        self._filled_in = 0
        self._start()

    def _start(self) -> None:
        self._parts: list[str] = []
        self._open = False  # A word has begun; "" in quotes is one too.
        self._brace = self._bare = self._expands = self._home = False

    def _end_word(self) -> None:
        if self._open:
            self._count += 1
            if self._count > MOST_WORDS:
                raise ShellError(
                    f"the command has more than {MOST_WORDS} words, and was not read",
                    "give the command alone",
                )
            text = "".join(self._parts)
            odd, self._lookalikes = tuple(self._lookalikes), []
            self._commands[-1].append(Word(text, self._bare, self._expands, self._home, odd))
        self._start()

    def _end_command(self) -> None:
        self._end_word()
        if self._commands[-1]:
            self._assign(self._commands[-1])
            self._commands.append([])
        self._conditional = False

    def _assign(self, words: list[Word]) -> None:
        """Follow ``NAME=value``, on its own or behind ``export``; never what is computed."""
        while words and words[0].text in _PROMPTS:
            words = words[1:]
        if not words:
            return
        if words[0].text in _BRANCHES or words[0].text.endswith("()"):
            self._followed = False
            self._values.clear()
        if words[0].text == "export":
            words = words[1:]
        elif not all(assignment(word.text) for word in words):
            if (match := assignment(words[0].text)) and words[0].expands:
                self._values.pop(match[1], None)  # What a command puts out.
            return
        for word in words:
            if match := assignment(word.text):
                name, value = match[1], match[2]
                known = not (word.expands or word.home or value.startswith(("(", "~")))
                if known and self._followed and not self._conditional:
                    self._values[name] = value
                else:
                    self._values.pop(name, None)

    def _variable(self, *, quoted: bool) -> bool:
        """Put a variable's value in its place; False if it is not known."""
        match = _NAMED.match(self._text, self._at)
        value = None if match is None else self._values.get(match[1] or match[2])
        if match is None or value is None:
            return False
        self._filled_in += len(value)
        if self._filled_in > _LONGEST_VALUE:
            return False
        self._at = match.end()
        # The shell splits what is not in quotes at its blanks.
        fields = [value] if quoted else re.split(r"[ \t\n]+", value)
        for i, field in enumerate(fields):
            if i:
                self._end_word()
            if field or quoted:
                self._parts.append(field)
                self._open = True
        return True

    def commands(self) -> list[list[Word]]:
        text, size = self._text, len(self._text)
        while self._at < size:
            char = text[self._at]
            if char == "\\":
                self._escape()
            elif char in "'\"":
                self._quoted(char)
            elif self._taken_specially(char):
                continue
            elif char == "\n":
                self._newline()
            elif char in " \t\r":
                self._end_word()
                self._at += 1
            elif char == "#" and not self._open and self._commands[-1]:
                self._at = self._line_end()
            elif char in ";|&":
                self._operator(char)
            elif char in "<>":
                self._redirect()
            else:
                if char in "$`" and _VARIABLE.match(text, self._at):
                    self._expands = True
                self._brace = self._brace or char == "{"
                self._home = self._home or (char == "~" and not self._open)
                self._parts.append(char)
                self._open = True
                self._at += 1
        self._end_command()
        return [words for words in self._commands if words]

    def _taken_specially(self, char: str) -> bool:
        """Read what is no plain letter here, though it might be; False if it is one."""
        if char in "`^":
            return self._continues(char)
        if char == "$":
            return self._variable(quoted=False)
        return not char.isascii() and self._lookalike(char)

    def _continues(self, char: str) -> bool:
        """Skips the end of a line that PowerShell (`) or cmd (^) continues."""
        blanks = _BLANKS_TO_THE_END.match(self._text, self._at + 1)
        if blanks is None or (char == "`" and self._open):
            return False
        self._end_word()
        self._at = blanks.end()
        return True

    def _lookalike(self, char: str) -> bool:
        """Read a character as what it looks like; False if it is just a letter."""
        start = self._at
        if char in lookalikes.BLANKS:
            self._odd(start, "a blank")
            self._end_word()
        elif char in lookalikes.NOTHING:
            self._odd(start, "nothing")
        elif char in lookalikes.DASHES and len(self._parts) > 80:
            return False
        elif char in lookalikes.DASHES and not "".join(self._parts).strip("-"):
            # An en dash is what becomes of two dashes, or of one in front of a letter or two.
            name = re.match(r"[^\s=]*", self._text[start + 1 : start + 80])
            following = name[0] if name else ""
            double = lookalikes.DASHES[char] == "--" and not self._open
            double = double and len(following) > 3 and following[0] not in lookalikes.DASHES
            self._odd(start, "--" if double else "-")
            self._parts.append("--" if double else "-")
            self._open = True
        elif char in lookalikes.DASHES and self._parts and self._parts[0].startswith("-"):
            if "=" in self._parts:
                return False
            self._odd(start, "-")
            self._parts.append("-")
        elif char in lookalikes.STRAIGHT.values() or ord(char) not in lookalikes.STRAIGHT:
            return False
        else:
            return self._curly(char)
        self._at = start + 1
        return True

    def _curly(self, char: str) -> bool:
        """Read a text in curly quotes, as one in straight ones."""
        if self._open and self._parts[-1:] != ["="]:
            return False
        family = lookalikes.SINGLE if char in lookalikes.SINGLE else lookalikes.DOUBLE
        end = self._at + 1
        while end < len(self._text) and self._text[end] not in family:
            end += 1
        if end == len(self._text):
            return False
        self._odd(self._at, lookalikes.STRAIGHT[ord(char)])
        self._parts.append(self._text[self._at + 1 : end].translate(lookalikes.STRAIGHT))
        self._open = True
        self._at = end + 1
        return True

    def _odd(self, at: int, meant: str) -> None:
        self._odd_ones += 1
        if self._odd_ones > _MOST_LOOKALIKES:
            return
        line, column = self._place(at)
        place = f"at line {line}, column {column}"
        self._lookalikes.append(Lookalike(self._text[at], place, meant))

    def _place(self, at: int) -> tuple[int, int]:
        return self._text.count("\n", 0, at) + 1, at - self._text.rfind("\n", 0, at)

    def _line_end(self) -> int:
        end = self._text.find("\n", self._at)
        return len(self._text) if end < 0 else end

    def _escape(self) -> None:
        following = self._text[self._at + 1 : self._at + 3]
        if following.startswith("\n") or following == "\r\n":
            self._at += 1 + following.index("\n") + 1
        elif blanks := _BLANKS_TO_THE_END.match(self._text, self._at + 1):
            # A continuation with blanks behind it: not one to the shell, but meant as one.
            self._end_word()
            self._at = blanks.end()
        else:
            self._parts.append(following[:1])
            self._open = True
            self._at += 2

    def _quoted(self, quote: str) -> None:
        start = self._at
        self._at += 1
        self._bare = self._bare or self._brace
        self._open = True
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == quote:
                self._at += 1
                return
            following = self._text[self._at + 1 : self._at + 2]
            if quote == '"' and char == "\\" and following in ('"', "\\", "$", "`", "\n"):
                self._parts.append("" if following == "\n" else following)
                self._at += 2
                continue
            if quote == '"' and char == "$" and self._variable(quoted=True):
                continue
            if quote == '"' and char in "$`" and _VARIABLE.match(self._text, self._at):
                self._expands = True
            self._parts.append(char)
            self._at += 1
        line, column = self._place(start)
        name = "single" if quote == "'" else "double"
        raise ShellError(
            f"the {name} quote at line {line}, column {column} is never closed",
            "close it",
            self._text[start : start + 40],
        )

    def _newline(self) -> None:
        match = _BLANK_LINES.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        if self._text.startswith("-", self._at):
            self._end_word()  # A flag begins no command: a continuation got lost in the paste.
        else:
            self._end_command()

    def _operator(self, char: str) -> None:
        if char == "&" and self._text[self._at + 1 : self._at + 2] == ">":
            self._at += 1
            self._redirect()
            return
        self._end_command()
        self._conditional = self._text[self._at : self._at + 2] in ("&&", "||", "| ")
        self._at += 1 + (self._text[self._at : self._at + 2] in ("&&", "||"))

    def _redirect(self) -> None:
        """Skips ``2>&1``, ``> file`` and the like."""
        if len(self._parts) == 1 and self._parts[0].isdecimal():
            self._start()  # The number of a file.
        self._end_word()
        match = _REDIRECT.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
