# SPDX-License-Identifier: Apache-2.0
"""The command in a piece of a Kubernetes manifest or a compose file.

No YAML reader is needed for it, and none would take a piece with its indentation: ``command``,
``args`` and ``entrypoint`` hold a list of words or a text, in one of few spellings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_KEY = re.compile(
    r"^([ \t]*(?:- +)?)(command|args|entrypoint)[ \t]*:(?:[ \t]+(.*))?$", re.MULTILINE
)
_ITEM = re.compile(r"([ \t]*)-(?:[ \t]+(.*))?$")
_BLOCK = re.compile(r"[>|][+-]?\d?(?:\s+#.*)?")
_COMMENTS = re.compile(r"(?:\s|#[^\n]*(?:\n|\Z))*")
_COMMENT = re.compile(r"\s#[^'\"]*\Z")
_FLOW_ITEM = re.compile(
    r"(\"(?:[^\"\\]|\\.)*\"|'(?:[^']|'')*'|[^,\[\]'\"#\s][^,\[\]'\"\n]*)\s*(,|\]|\Z)", re.DOTALL
)
_VARIABLE = re.compile(
    r"^[ \t]*- +name:[ \t]*[\"']?([A-Z_][A-Z0-9_]*)[\"']?[ \t]*\n[ \t]*value:[ \t]*(.+)$|"
    r"^[ \t]*- +[\"']?([A-Z_][A-Z0-9_]*)=([^\"'\n]*)[\"']?[ \t]*$|"
    r"^[ \t]+(VLLM_[A-Z0-9_]*|CUDA_VISIBLE_DEVICES):[ \t]+(.+)$",
    re.MULTILINE,
)
_ORDER = ("entrypoint", "command", "args")


@dataclass
class Container:
    """What one container runs.

    Attributes:
        parts: by key, its words, or the text that they are written as.
        environ: the variables that the piece sets.
    """

    parts: dict[str, list[str] | str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def ordered(self) -> list[list[str] | str]:
        """The parts, as they stand behind each other in the command."""
        return [self.parts[key] for key in _ORDER if key in self.parts]


def is_yaml(text: str) -> bool:
    """True for a text that has such a key at the beginning of a line."""
    return _KEY.search(text) is not None


def containers(text: str) -> list[Container]:
    """The containers of a piece of YAML, in order. Never raises."""
    text = text.replace("\r\n", "\n")
    found: list[Container] = []
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        match = _KEY.fullmatch(lines[at])
        at += 1
        if match is None:
            continue
        key = match[2]
        if not found or key in found[-1].parts:
            found.append(Container())
        value, at = _value((match[3] or "").strip(), len(match[1].replace("-", " ")), lines, at)
        found[-1].parts[key] = value
    environ = {
        m[1] or m[3] or m[5]: _scalar(m[2] or m[4] or m[6] or "") for m in _VARIABLE.finditer(text)
    }
    for container in found:
        container.environ.update(environ)
    return found


def _value(first: str, indent: int, lines: list[str], at: int) -> tuple[list[str] | str, int]:
    """A value that begins with ``first`` behind its key, and the line behind it."""
    if _BLOCK.fullmatch(first):
        return _block(first, indent, lines, at)
    if first.startswith("["):
        flow = [first]
        while (
            not _COMMENT.sub("", flow[-1]).rstrip().endswith("]")
            and at < len(lines)
            and len(flow) < 500
        ):
            flow.append(lines[at])
            at += 1
        return list(_flow("\n".join(flow)[1:])), at
    if first and not first.startswith("#"):
        quoted = first[0] in "'\""
        while at < len(lines) and lines[at].strip() and _indent(lines[at]) > indent:
            first += " " + lines[at].strip()  # A text that goes on in the lines below.
            at += 1
        return _scalar(first) if quoted else first, at
    items: list[str] = []
    while at < len(lines):
        if not lines[at].strip() or lines[at].lstrip().startswith("#"):
            at += 1
            continue
        match = _ITEM.fullmatch(lines[at])
        if match is None or len(match[1]) < indent:
            break
        item, at = _value((match[2] or '""').strip(), len(match[1]), lines, at + 1)
        items.append(item if isinstance(item, str) else " ".join(item))
    return items, at


def _block(style: str, indent: int, lines: list[str], at: int) -> tuple[str, int]:
    inside: list[str] = []
    while at < len(lines) and (not lines[at].strip() or _indent(lines[at]) > indent):
        inside.append(lines[at])
        at += 1
    least = min((_indent(line) for line in inside if line.strip()), default=0)
    return (" " if style[0] == ">" else "\n").join(line[least:] for line in inside).strip(), at


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


def _flow(text: str) -> Iterator[str]:
    """The items of ``[...]``, without its first bracket."""
    at = 0
    while True:
        blanks = _COMMENTS.match(text, at)
        match = _FLOW_ITEM.match(text, at if blanks is None else blanks.end())
        if match is None:
            return
        yield _scalar(match[1])
        at = match.end()
        if match[2] != ",":
            return


def _scalar(text: str) -> str:
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] == '"':
        try:
            return str(json.loads(text, strict=False))
        except ValueError:
            return text[1:-1]
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    return re.sub(r"\s+#.*", "", text)
