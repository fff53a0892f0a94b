# SPDX-License-Identifier: Apache-2.0
"""What the plugin relies on upstream, and whether the vLLM here still looks like that.

A version number says what a release should be; its source says what it is. Each patch names the
upstream symbols it relies on, and this module reads those from the source files, by ``ast`` and
without importing vLLM. ``releases.json`` holds what the supported releases have there. It is
written by ``tools/contract.py`` from the wheels' sources, never by hand.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

from packaging.version import Version

Match = Literal["body", "signature", "present"]


@dataclass(frozen=True)
class Symbol:
    """An upstream symbol that a patch relies on.

    Attributes:
        target: ``"module:Qualified.name"``; a class, function, or module-level assignment.
        match: how much of it must be as known: its ``body`` (we repeat or edit it), its
            ``signature`` (we call or wrap it), or that it is ``present``.
        since: the first release that has it; None if all that the patch is for have it.
        before: the first release that no longer has it; None if all later ones have it.
    """

    target: str
    match: Match = "signature"
    since: str | None = None
    before: str | None = None

    def expected_in(self, version: Version | None) -> bool:
        """True if a vLLM of this version must have the symbol."""
        if self.since is None and self.before is None:
            return True
        if version is None:
            return False
        base = Version(version.base_version)
        return (self.since is None or base >= Version(self.since)) and (
            self.before is None or base < Version(self.before)
        )


@dataclass(frozen=True)
class Shape:
    """What a source tree has under a symbol's name.

    Attributes:
        signature: the parameters as written, without annotations; the bases of a class; "" for
            an assignment.
        digest: hash of the source's tokens and blocks; comments, blank lines and the width of
            the layout do not count.
    """

    signature: str
    digest: str

    def agrees(self, other: Shape, match: Match) -> bool:
        """True if ``other`` is as good as this one for a symbol matched by ``match``."""
        if match == "present":
            return True
        return self.signature == other.signature and (
            match == "signature" or self.digest == other.digest
        )


class Sources:
    """A vLLM source tree, read symbol by symbol.

    Args:
        root: the folder of the import package ``vllm``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, tuple[str, ast.Module] | None] = {}

    def module(self, name: str) -> tuple[str, ast.Module] | None:
        """Text and syntax tree of the module ``name``; None if missing or not Python."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> tuple[str, ast.Module] | None:
        base = self.root.joinpath(*name.split(".")[1:])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            try:
                text = path.read_text(encoding="utf-8")
                return text, ast.parse(text)
            except (OSError, SyntaxError, ValueError):
                continue
        return None

    def node(self, target: str) -> ast.stmt | None:
        """The statement that defines ``target``, or None."""
        module_name, _, qualname = target.partition(":")
        module = self.module(module_name)
        if module is None:
            return None
        scope: ast.Module | ast.stmt = module[1]
        for part in qualname.split("."):
            found = next((s for s in _statements(scope) if part in _defines(s)), None)
            if found is None:
                return None
            scope = found
        assert isinstance(scope, ast.stmt)
        return scope

    def shape(self, target: str) -> Shape | None:
        """The :class:`Shape` of ``target``, or None if the tree does not have it."""
        node = self.node(target)
        if node is None:
            return None
        module = self.module(target.partition(":")[0])
        assert module is not None
        lines = module[0].splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]
        return Shape(_signature(node), _digest("".join(lines)))


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a module or class body, those under if, try and with included, in order."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, (ast.If, ast.Try, ast.ExceptHandler, ast.With)):
            yield from _statements(child)
        elif isinstance(child, ast.stmt):
            yield child


def _defines(statement: ast.stmt) -> tuple[str, ...]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (statement.name,)
    if isinstance(statement, ast.Assign):
        return tuple(t.id for t in statement.targets if isinstance(t, ast.Name))
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return (statement.target.id,)
    return ()


def _signature(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef):
        return ", ".join(ast.unparse(base) for base in node.bases)
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ""
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    required = len(positional) - len(args.defaults)
    parts = [a.arg + ("" if i < required else "=") for i, a in enumerate(positional)]
    if args.posonlyargs:
        parts.insert(len(args.posonlyargs), "/")
    if args.vararg:
        parts.append("*" + args.vararg.arg)
    elif args.kwonlyargs:
        parts.append("*")
    parts += [
        a.arg + ("" if default is None else "=")
        for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        parts.append("**" + args.kwarg.arg)
    return f"({', '.join(parts)})"


# What a block's beginning and end and a statement's end count as: their own text is layout.
_STRUCTURE = {tokenize.NEWLINE: "<newline>", tokenize.INDENT: "<in>", tokenize.DEDENT: "<out>"}
_FSTRING_START = getattr(tokenize, "FSTRING_START", None)
_FSTRING_END = getattr(tokenize, "FSTRING_END", None)


def _digest(text: str) -> str:
    # Tokens and not the tree, since ast.dump differs between Python versions.
    text = _dedent(text)
    try:
        normal = "\0".join(_words(text))
    except (tokenize.TokenError, SyntaxError):
        normal = text
    return hashlib.sha256(normal.encode()).hexdigest()[:16]


def _words(text: str) -> Iterator[str]:
    """The tokens of ``text`` that count, an f-string as one, as before Python 3.12."""
    lines = text.splitlines(keepends=True)
    depth, start = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == _FSTRING_START:
            start = start if depth else token.start
            depth += 1
        elif token.type == _FSTRING_END:
            depth -= 1
            if not depth:
                yield _between(lines, start, token.end)
        elif not depth and token.type not in (tokenize.COMMENT, tokenize.NL):
            yield _STRUCTURE.get(token.type, token.string)


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    inner = lines[start[0] : end[0] - 1]
    return lines[start[0] - 1][start[1] :] + "".join(inner) + lines[end[0] - 1][: end[1]]


def _dedent(text: str) -> str:
    indent = len(text) - len(text.lstrip(" "))
    return "".join(
        line[indent:] if line[:indent].isspace() or indent == 0 else line.lstrip(" ")
        for line in text.splitlines(keepends=True)
    )


@cache
def known_shapes() -> dict[str, dict[str, Shape]]:
    """For each supported release the shape of each symbol of the contract that it has."""
    text = resources.files(__package__).joinpath("releases.json").read_text(encoding="utf-8")
    return {
        release: {target: Shape(*shape) for target, shape in shapes.items()}
        for release, shapes in json.loads(text).items()
    }
