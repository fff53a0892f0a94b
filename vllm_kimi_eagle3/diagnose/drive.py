# SPDX-License-Identifier: Apache-2.0
"""Sends prompts to a server one after another, or only watches it, and keeps what it counted.

One request at a time, greedily: what each adds to the counters is then known, and so is how much
one text differs from another. Between two requests the counters are read when the server has
counted the end of the first.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from .metrics import (
    MOST_SAID,
    REQUESTS,
    RUNNING,
    Delta,
    Difference,
    Key,
    Page,
    add,
    difference,
    read_page,
)
from .server import Answer, Server, ServerError
from .signature import Part

Progress = Callable[[str], None]

# A server counts the end of a request within a step of its answer; one without that counter is
# waited for as long.
_SETTLES, _POLL = 3.0, 0.05
# Of a context: the lengths that are tried, each twice the one before.
SHORTEST = 512
_HEADINGS = "Notes of the year {year}."
_SPARE = 64  # Tokens of a chat template, at most.
_MAX_BYTES = 64 << 20  # Of a file of prompts.
# A character is never fewer tokens, whatever a server says that it tokenizes.
_SPARSEST = 0.02
# Seconds of a token, in the mean: what lies beyond was not counted by a clock.
_QUICKEST, _SLOWEST = 1e-6, 1e4
# Tokens of others: more than so many, and than this part of one's own, beyond one's own.
_STRAY_TOKENS, _STRAY_SHARE = 16, 0.1


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        kind: chat, code, math, chinese, long, or what a file calls it.
        text: asked as a chat, where the server has a chat template.
        token_ids: completed as they are, instead of a text.
        ignore_eos: the answer goes on to its limit.
    """

    kind: str = ""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass
class Record:
    """What was counted while it was driven or watched.

    Attributes:
        parts: by request, or by slice of time.
        engines: by engine, all of it.
        foreign_requests: of others, that ended meanwhile or got tokens.
        resets, impossible, missing: as of the pages' differences.
        refused: requests that the server refused, and how it said so.
        pages: that were read.
        stopped: why it ended early; None if it did not.
    """

    parts: list[Part] = field(default_factory=list)
    engines: dict[Key, Delta] = field(default_factory=dict)
    foreign_requests: int = 0
    resets: list[Key] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    refused: list[ServerError] = field(default_factory=list)
    pages: int = 0
    stopped: ServerError | None = None

    def take(self, found: Difference, page: Page) -> None:
        """Keeps what was counted between two pages, of which ``page`` is the later one."""
        self.pages += 1
        for key, delta in found.engines.items():
            have = self.engines.get(key)
            self.engines[key] = delta if have is None else add([have, delta])
        self.resets += [key for key in found.resets if key not in self.resets]
        for said in (*page.impossible, *found.impossible):
            if said not in self.impossible and len(self.impossible) < MOST_SAID:
                self.impossible.append(said)
        self.missing = sorted({*self.missing, *found.missing})

    @property
    def total(self) -> Delta:
        """All engines together."""
        return add(self.engines.values())


# ----------------------------------------------------------------------------------------- prompts


@lru_cache(maxsize=1)
def _shipped() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("prompts.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def shipped_prompts() -> list[Prompt]:
    """The fixed set that comes with the package: chat, code, math and Chinese."""
    return [Prompt(entry["kind"], entry["text"]) for entry in _shipped()["prompts"]]


def lengths(context: int, max_model_len: int, tokens: int) -> list[int]:
    """The prompt lengths to try up to a context, that with an answer of ``tokens`` fit."""
    most = min(context, (max_model_len or context + tokens + _SPARE) - tokens - _SPARE)
    tried, length = [], SHORTEST
    while length < most:
        tried.append(length)
        length *= 2
    return [*tried, most] if most >= SHORTEST else []


def long_prompt(tokens: int, tokens_per_character: float) -> Prompt:
    """A prompt of about so many tokens: the text that is shipped, as often as it takes, each time
    from another of its months on."""
    long = _shipped()["long"]
    months = long["text"].split("\n\n")
    wanted = int(tokens / tokens_per_character) - len(long["question"])
    text, year = "", 1961
    while len(text) < wanted:
        start = (year - 1961) * 5 % len(months)
        rotated = months[start:] + months[:start]
        text += "\n\n".join([_HEADINGS.format(year=year), *rotated]) + "\n\n"
        year += 1
    return Prompt("long", text[: max(wanted, 0)] + long["question"])


def tokens_per_character(server: Server, model: str) -> float:
    """Of the shipped text on this model; a fourth where the server does not tokenize."""
    text = _shipped()["long"]["text"]
    tokens = server.tokenize(model, text)
    return max(len(tokens) / len(text), _SPARSEST) if tokens else 0.25


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file: a JSON list or a line each, of texts or of objects with ``text`` or
    ``token_ids``, and ``kind`` and ``ignore_eos`` if wanted.

    Raises:
        ValueError: it has none; the message names the file and what is wrong.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"--prompts {path} is larger than {_MAX_BYTES >> 20} MiB")
        content = data.decode("utf-8-sig")
    except (OSError, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ValueError(f"--prompts {path} cannot be read: {said}") from None
    entries: list[Any]
    try:
        loaded = json.loads(content)
        entries = loaded if isinstance(loaded, list) else [loaded]
    except (ValueError, RecursionError):
        entries = [_line(line) for line in content.splitlines() if line.strip()]
    prompts = [_prompt(entry, number, path) for number, entry in enumerate(entries, 1)]
    if not prompts:
        raise ValueError(f"--prompts {path} has no prompt")
    return prompts


def digest(prompts: Sequence[Prompt], tokens: int) -> str:
    """Tells one set of prompts, and the answers' limit, from another."""
    text = json.dumps([[p.text, p.token_ids, p.ignore_eos] for p in prompts] + [tokens])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _line(line: str) -> Any:
    try:
        return json.loads(line) if line.lstrip().startswith("{") else line
    except (ValueError, RecursionError):
        return line


def _prompt(entry: Any, number: int, path: Path) -> Prompt:
    if isinstance(entry, str) and entry.strip():
        return Prompt(text=entry)
    if isinstance(entry, dict):
        text, ids = entry.get("text", ""), entry.get("token_ids", [])
        are_ids = isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)
        if isinstance(text, str) and are_ids and (ids or text.strip()):
            kind = entry.get("kind", "")
            return Prompt(
                kind if isinstance(kind, str) else "",
                "" if ids else text,
                tuple(ids),
                entry.get("ignore_eos") is True,
            )
    raise ValueError(
        f'--prompts {path}: entry {number} is neither a text nor an object with "text" or '
        '"token_ids"'
    )


# ----------------------------------------------------------------------------------------- driving


def drive(
    server: Server,
    model: str,
    prompts: Sequence[Prompt],
    *,
    tokens: int,
    counted_as: str | None = None,
    progress: Progress | None = None,
) -> Record:
    """Sends every prompt, greedily, one at a time.

    Args:
        tokens: most tokens of an answer.
        counted_as: the model's name in the metrics; None for all that is there.
        progress: called with a line of text before each.

    Raises:
        ServerError: nothing was counted: the server does not answer, or refused every prompt.
    """
    page = read_page(server.metrics())
    record = Record(pages=1, impossible=[*page.impossible])
    talk = _Talk(server, model, tokens)
    for number, prompt in enumerate(prompts, 1):
        if progress is not None:
            kind = f" ({prompt.kind})" if prompt.kind else ""
            said = f"prompt {number} of {len(prompts)}{kind}"
            progress(f"{bar(number - 1, len(prompts))} {said}")
        started = time.monotonic()
        try:
            answer = talk.ask(prompt)
        except ServerError as error:
            if error.status is None or error.status in (401, 403, 404):
                record.stopped = error
                break
            record.refused.append(error)
            continue
        wall = time.monotonic() - started
        try:
            after = settled(server, page, counted_as)
        except ServerError as error:
            record.stopped = error
            break
        found = difference(page, after, counted_as)
        record.take(found, after)
        one = found.total
        others = max(0, one.requests - 1)
        if has_stray_tokens(one, answer.tokens):
            others = max(others, 1)  # One that has not ended yet.
        record.foreign_requests += others
        record.parts.append(
            Part(one, prompt.kind, answer.prompt_tokens, answer.text, wall, answer.tokens)
        )
        page = after
    if record.parts or not prompts:
        return record
    raise record.stopped or record.refused[0]


class _Talk:
    """Asks as a chat, until the server has no chat template."""

    def __init__(self, server: Server, model: str, tokens: int) -> None:
        self._server = server
        self._model = model
        self._tokens = tokens
        self._chats = True

    def ask(self, prompt: Prompt) -> Answer:
        options: dict[str, Any] = {"temperature": 0, "max_tokens": self._tokens}
        if prompt.ignore_eos:
            options["ignore_eos"] = True
        if prompt.token_ids:
            return self._server.complete(self._model, prompt.token_ids, **options)
        if self._chats:
            messages = [{"role": "user", "content": prompt.text}]
            try:
                return self._server.chat(self._model, messages, **options)
            except ServerError as error:
                if error.status is None or "template" not in error.fact.lower():
                    raise
                self._chats = False
        return self._server.complete(self._model, prompt.text, **options)


def bar(done: int, of: int) -> str:
    """A bar of 20 places, for a line of progress."""
    filled = round(20 * done / of)
    return f"[{'#' * filled}{'.' * (20 - filled)}]"


def has_stray_tokens(counted: Delta, own: int) -> bool:
    """Whether others got tokens too, beside the ``own`` of whoever sent the requests."""
    return counted.generated > own * (1 + _STRAY_SHARE) + _STRAY_TOKENS


def settled(server: Server, before: Page, model: str | None, requests: int = 1) -> Page:
    """The counters once the ends of so many requests are among them."""
    deadline = time.monotonic() + _SETTLES
    while True:
        page = read_page(server.metrics())
        ended = difference(before, page, model).total.requests
        running = sum(e.values.get(RUNNING, 0.0) for e in page.of_model(model).values())
        counts_requests = any(REQUESTS in e.values for e in page.of_model(model).values())
        if (ended >= requests and not running) or time.monotonic() > deadline:
            return page
        if not counts_requests and not running and deadline - time.monotonic() < _SETTLES - 1:
            return page
        time.sleep(_POLL)


def watch(
    server: Server,
    seconds: float,
    *,
    counted_as: str | None = None,
    interval: float | None = None,
    progress: Progress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Record:
    """Reads the counters now and then, and sends nothing.

    Args:
        seconds: how long.
        interval: between two readings; a twentieth of it, and at least a second, if not given.

    Raises:
        ServerError: nothing was counted: the server does not answer.
    """
    interval = max(1.0, seconds / 20) if interval is None else interval
    page = read_page(server.metrics())
    record = Record(pages=1, impossible=[*page.impossible])
    slices = max(1, round(seconds / interval))
    for number in range(slices):
        if progress is not None:
            left = seconds - number * seconds / slices
            progress(f"{bar(number, slices)} watching, {left:.0f} s left")
        sleep(seconds / slices)
        try:
            after = read_page(server.metrics())
        except ServerError as error:
            if not record.parts:
                raise
            record.stopped = error
            break
        found = difference(page, after, counted_as)
        record.take(found, after)
        record.parts.append(Part(found.total, wall=seconds / slices))
        page = after
    return record


def speed(parts: Sequence[Part]) -> float | None:
    """Tokens a second of one request, without its prefill; None where it is not known."""
    generated = sum(max(0, part.answered - 1) for part in parts if part.delta.seconds > 0)
    seconds = sum(part.delta.seconds for part in parts)
    if not generated or not _QUICKEST <= seconds / generated <= _SLOWEST:
        return None
    return generated / seconds


def by_kind(parts: Sequence[Part]) -> Mapping[str, list[Part]]:
    """The parts of each kind of text."""
    kinds: dict[str, list[Part]] = {}
    for part in parts:
        if part.kind:
            kinds.setdefault(part.kind, []).append(part)
    return kinds
