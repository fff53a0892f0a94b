# SPDX-License-Identifier: Apache-2.0
"""A running vLLM over HTTP: what it serves, its counters, and completions.

Nothing of it is trusted: every answer has a limit of size and of time, and what cannot be read is a
:class:`ServerError` in words that name the address and what to do.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

API_KEY_VARIABLE = "VLLM_API_KEY"
"""Where the key of a server with ``--api-key`` is looked for, as vLLM itself does."""
MAX_BYTES = 64 << 20
MAX_TIMEOUT = 86_400.0
_QUICK = 15.0
_CHUNK = 1 << 16
_MOST_TOKENS = 10**9  # Of a request.


class ServerError(Exception):
    """A server did not answer as vLLM does.

    Attributes:
        fix: what to do about it.
        status: the HTTP status, if there was one.
    """

    def __init__(self, fact: str, fix: str, status: int | None = None) -> None:
        super().__init__(fact)
        self.fact = fact
        self.fix = fix
        self.status = status


@dataclass(frozen=True)
class Answer:
    """What a completion gave.

    Attributes:
        text: that was generated.
        prompt_tokens, tokens: of the prompt and of the text, as the server counted them.
    """

    text: str
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True)
class Model:
    """A model that is served.

    Attributes:
        name: by which requests name it.
        root: what it was loaded from; "" if the server does not say.
        max_model_len: most tokens of a request; 0 if the server does not say.
    """

    name: str
    root: str
    max_model_len: int


def base_url(url: str) -> str:
    """The address without a path of the API.

    Raises:
        ValueError: it is no address.
    """
    text = url.strip()
    if "://" not in text:
        text = f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is no address: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "an address with a user name in it is not taken (the report would show the password); "
            f"a key goes into the variable {API_KEY_VARIABLE}"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{url!r} is no address of a server, such as http://localhost:8000")
    try:
        host.encode("idna")
        parts.path.encode("ascii")
    except UnicodeError:
        raise ValueError(
            f"{url!r} is no address: the name of a host is too long or empty in part, or the path "
            "has letters that are to be written as %..."
        ) from None
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, "", ""))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """vLLM redirects nowhere, and the key is not for whoever an answer names."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Timed(io.RawIOBase):
    """What a socket gets, with one limit of time for all of it."""

    def __init__(self, got: io.RawIOBase, connection: socket.socket, deadline: float) -> None:
        super().__init__()
        self._got = got
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._got.readinto(buffer)

    def close(self) -> None:
        self._got.close()
        super().close()


def _timed(connection: http.client.HTTPConnection) -> None:
    """Limits an answer of a connection, its headers and an error's text included, to the
    connection's timeout."""
    deadline = time.monotonic() + (connection.timeout or MAX_TIMEOUT)

    def response(sock: socket.socket, **options: Any) -> http.client.HTTPResponse:
        answer = http.client.HTTPResponse(sock, **options)
        answer.fp = io.BufferedReader(_Timed(answer.fp.detach(), sock, deadline))
        return answer

    connection.response_class = response  # type: ignore[assignment]


class _Connection(http.client.HTTPConnection):
    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        _timed(self)


class _SecureConnection(http.client.HTTPSConnection):
    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        _timed(self)


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, request)


class Server:
    """A server by its address.

    Args:
        url: such as ``http://localhost:8000``, with or without ``/v1``.
        timeout: seconds that a completion may take.
        flag: by which the user gave the address.

    Raises:
        ValueError: the address is none.
    """

    def __init__(self, url: str, timeout: float = 600.0, flag: str = "--url") -> None:
        self.url = base_url(url)
        self._flag = flag
        self._timeout = timeout
        host = urllib.parse.urlsplit(self.url).hostname or ""
        local = host in ("localhost", "::1", "0.0.0.0", "::") or host.startswith("127.")
        # A proxy of the environment cannot reach what listens on this machine.
        handlers = [urllib.request.ProxyHandler({})] if local else []
        self._opener = urllib.request.build_opener(_NoRedirects(), _Http(), _Https(), *handlers)
        self._proxied = (
            not local
            and urllib.parse.urlsplit(self.url).scheme in urllib.request.getproxies()
            and not urllib.request.proxy_bypass(host)
        )

    def metrics(self) -> str:
        """The text of ``/metrics``."""
        return self._ask("/metrics", timeout=_QUICK).decode("utf-8", "replace")

    def models(self) -> list[Model]:
        """What is served."""
        answer = self._json("/v1/models", timeout=_QUICK)
        entries = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(entries, list):
            raise self._not_vllm("/v1/models")
        models = []
        for entry in entries:
            if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
                raise self._not_vllm("/v1/models")
            length, root = entry.get("max_model_len"), entry.get("root")
            models.append(
                Model(
                    entry["id"],
                    root if isinstance(root, str) else "",
                    length if isinstance(length, int) and length > 0 else 0,
                )
            )
        return models

    def release(self) -> str:
        """Its vLLM's version; "" if it does not say."""
        try:
            answer = self._json("/version", timeout=_QUICK)
        except ServerError:
            return ""
        version = answer.get("version") if isinstance(answer, dict) else None
        return version if isinstance(version, str) else ""

    def speculative_config(self) -> Mapping[str, Any]:
        """Its ``--speculative-config``, which a server with ``VLLM_SERVER_DEV_MODE=1`` says; empty
        otherwise."""
        try:
            answer = self._json("/server_info?config_format=json", timeout=_QUICK)
            config = answer["vllm_config"]["speculative_config"]
        except (ServerError, KeyError, TypeError):
            return {}
        return config if isinstance(config, dict) else {}

    def tokenize(self, model: str, text: str) -> list[int] | None:
        """The tokens of a text; None where the server does not say."""
        try:
            body = {"model": model, "prompt": text, "add_special_tokens": False}
            answer = self._json("/tokenize", body, timeout=_QUICK)
        except ServerError:
            return None
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            return None
        return tokens

    def complete(self, model: str, prompt: str | Sequence[int], **options: Any) -> Answer:
        """Completes a prompt, a text or token ids; ``options`` go into the request."""
        body = {"model": model, "prompt": prompt, **options}
        return self._answer("/v1/completions", body)

    def chat(self, model: str, messages: Sequence[Mapping[str, str]], **options: Any) -> Answer:
        """Answers a chat; ``options`` go into the request."""
        body = {"model": model, "messages": list(messages), **options}
        return self._answer("/v1/chat/completions", body)

    def _answer(self, path: str, body: Mapping[str, Any]) -> Answer:
        answer = self._json(path, body, timeout=self._timeout)
        try:
            choice, usage = answer["choices"][0], answer["usage"]
            message = choice.get("message")
            if message is None:
                text = choice["text"]
            else:
                reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
                text = f"{reasoning}{message.get('content') or ''}"
            prompt_tokens = int(usage["prompt_tokens"])
            tokens = int(usage["completion_tokens"] or 0)
            if not (0 <= prompt_tokens <= _MOST_TOKENS and 0 <= tokens <= _MOST_TOKENS):
                raise self._not_vllm(path)
            return Answer(text if isinstance(text, str) else "", prompt_tokens, tokens)
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError):
            raise self._not_vllm(path) from None

    def _json(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float) -> Any:
        data = self._ask(path, body, timeout=timeout)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise self._not_vllm(path) from None

    def _not_vllm(self, path: str) -> ServerError:
        return ServerError(
            f"{self.url}{path} answers, and not as vLLM does",
            f"give `{self._flag}` the address of the vLLM server itself, as in "
            "http://localhost:8000",
        )

    def _ask(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float) -> bytes:
        headers = {"User-Agent": "vllm-kimi-eagle3"}
        if key := os.environ.get(API_KEY_VARIABLE, "").strip():
            if not (key.isascii() and key.isprintable()):
                raise ServerError(
                    f"the variable {API_KEY_VARIABLE} holds what no key can: a line break, or "
                    "letters beyond ASCII",
                    f"put the server's `--api-key`, and nothing else, into {API_KEY_VARIABLE}",
                )
            headers["Authorization"] = f"Bearer {key}"
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                text = _read(answer)
        except urllib.error.HTTPError as error:
            raise self._refused(path, error) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(path, error, timeout) from None
        if len(text) > MAX_BYTES:
            raise ServerError(
                f"{self.url}{path} answers with more than {MAX_BYTES >> 20} MiB",
                f"give `{self._flag}` the address of the vLLM server itself",
            )
        return text

    def _refused(self, path: str, error: urllib.error.HTTPError) -> ServerError:
        fact = f"{self.url}{path} answers {error.code} {error.reason}"
        try:
            with error:
                said = _message(error.read(4000).decode("utf-8", "replace"))
        except (OSError, http.client.HTTPException):
            said = ""
        if said and error.code not in (401, 403, 404):
            fact += f": {said}"
        if error.code in (401, 403) and os.environ.get(API_KEY_VARIABLE, "").strip():
            fix = f"the key in {API_KEY_VARIABLE} is not the server's `--api-key`: put that there"
        elif error.code in (401, 403):
            fix = f"put the server's `--api-key` into the variable {API_KEY_VARIABLE}"
        elif 300 <= error.code < 400:
            to = error.headers.get("Location") or "another address"
            fact = f"{self.url}{path} answers {error.code} and sends on to {to[:200]}"
            fix = f"give `{self._flag}` the vLLM server itself, which sends nobody on"
        elif error.code == 404 and path == "/metrics":
            fix = (
                f"give `{self._flag}` the vLLM server itself: a router or gateway in front of it "
                "mostly does not pass /metrics on"
            )
        elif error.code == 404:
            fix = f"give `{self._flag}` the address of a vLLM server, as in http://localhost:8000"
        else:
            fix = "look into the server's log"
        if self._proxied and error.code >= 500:
            fix += f"; {self._around_the_proxy()}"
        return ServerError(fact, fix, error.code)

    def _no_answer(self, path: str, error: Exception, timeout: float) -> ServerError:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, TimeoutError):
            return ServerError(
                f"{self.url}{path} did not answer within {timeout:.0f} s",
                "look whether the server is still loading, or busy with long requests "
                "(`--timeout SECONDS` waits longer)",
            )
        said = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        fix = f"start the server, or give `{self._flag}` the address and port that it listens on"
        if isinstance(reason, ssl.SSLCertVerificationError):
            said = reason.verify_message or said
            fix = "name the file with the server's own certificate in the variable SSL_CERT_FILE"
        elif isinstance(reason, ssl.SSLError):
            fix = f"give `{self._flag}` an address with http:// if the server has no certificate"
        elif self._proxied:
            fix += f"; {self._around_the_proxy()}"
        return ServerError(f"{self.url}{path} does not answer: {said}", fix)

    def _around_the_proxy(self) -> str:
        host = urllib.parse.urlsplit(self.url).hostname
        return f"a proxy of the environment was asked: NO_PROXY={host} goes around it"


def _read(answer: Any) -> bytes:
    """An answer, up to a byte more than :data:`MAX_BYTES`; unpacked, where something on the way
    packed it.

    Raises:
        OSError: it is packed, and not as it says.
    """
    packed = answer.headers.get("Content-Encoding", "").strip().lower() in ("gzip", "deflate")
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32) if packed else None
    text = bytearray()
    while len(text) <= MAX_BYTES and (data := answer.read1(_CHUNK)):
        try:
            text += data if unpacker is None else unpacker.decompress(data, MAX_BYTES + 1)
        except zlib.error as error:
            raise OSError(f"what it sends cannot be unpacked ({error})") from None
    if len(text) <= MAX_BYTES and answer.length:
        raise http.client.IncompleteRead(b"", answer.length)
    return bytes(text)


def _message(body: str) -> str:
    """What an answer with an error says, in one line: vLLM's message, or the beginning of it."""
    try:
        found = json.loads(body)
        found = found.get("error", found)
        text = found if isinstance(found, str) else found["message"]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        text = body
    line = " ".join(str(text).split())
    return line if len(line) <= 200 else f"{line[:200]}..."
