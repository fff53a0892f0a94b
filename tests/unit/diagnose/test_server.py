# SPDX-License-Identifier: Apache-2.0
"""Answers that are none of vLLM's: packed, cut off, without end, or sending on.

Against a socket that writes what a case says: no real server answers so at will.
"""

from __future__ import annotations

import gzip
import socket
import ssl
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from vllm_kimi_eagle3.diagnose import server as module
from vllm_kimi_eagle3.diagnose.run import OptionError, diagnose, options_of
from vllm_kimi_eagle3.diagnose.server import Server, ServerError, base_url

Write = Callable[[bytes], None]


@contextmanager
def answering(answer: Callable[[Write], None]) -> Iterator[tuple[str, list[bytes]]]:
    """A server, with what it was asked; ``answer`` writes to each connection."""
    asked: list[bytes] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    asked.append(connection.recv(65536))
                    try:
                        answer(connection.sendall)
                    except OSError:
                        continue

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked


def whole(body: bytes, *headers: str, status: str = "200 OK") -> Callable[[Write], None]:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return lambda write: write("\r\n".join([*lines, "", ""]).encode() + body)


def test_a_packed_answer_is_unpacked() -> None:
    with answering(whole(gzip.compress(b"vllm:x 1\n"), "Content-Encoding: gzip")) as (url, _):
        assert Server(url).metrics() == "vllm:x 1\n"


def test_a_packed_answer_that_is_none() -> None:
    with (
        answering(whole(b"vllm:x 1\n", "Content-Encoding: gzip")) as (url, _),
        pytest.raises(ServerError, match="cannot be unpacked"),
    ):
        Server(url).metrics()


def test_a_packed_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 20)
    bomb = gzip.compress(bytes(1 << 26))
    with (
        answering(whole(bomb, "Content-Encoding: gzip")) as (url, _),
        pytest.raises(ServerError, match="more than 1 MiB"),
    ):
        Server(url).metrics()


def test_chunks() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with answering(lambda write: write(head + b"4\r\nvllm\r\n5\r\n:x 1\n\r\n0\r\n\r\n")) as (
        url,
        _,
    ):
        assert Server(url).metrics() == "vllm:x 1\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nvllm:x 1\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n63\r\nvllm:x 1\n",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 99\r\n\r\nhalf",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
    ],
)
def test_an_answer_that_is_cut_off(answer: bytes) -> None:
    with answering(lambda write: write(answer)) as (url, _), pytest.raises(ServerError) as caught:
        Server(url).metrics()
    assert caught.value.fix


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", "did not answer within"),
        (b"HTTP/1.1 200 OK\r\nX: ", "did not answer within"),
        (b"HTTP/1.1 ", "did not answer within"),
        (b"HTTP/1.1 500 Oops\r\n\r\n", "answers 500 Oops"),
    ],
)
def test_an_answer_that_trickles(head: bytes, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is in time, and the answer never is."""
    monkeypatch.setattr(module, "_QUICK", 0.5)

    def trickle(write: Write) -> None:
        write(head)
        for _ in range(30):
            write(b"#")
            time.sleep(0.1)

    started = time.monotonic()
    with answering(trickle) as (url, _), pytest.raises(ServerError, match=said):
        Server(url).metrics()
    assert time.monotonic() - started < 1.5


def test_the_key_does_not_follow_a_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with answering(whole(b"")) as (other, asked):
        sends_on = whole(b"", f"Location: {other}/metrics", status="302 Found")
        with answering(sends_on) as (url, _), pytest.raises(ServerError) as caught:
            Server(url).metrics()
    assert not asked
    assert f"sends on to {other}/metrics" in caught.value.fact


def test_a_key_from_a_file_ends_with_a_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret\n")
    with answering(whole(b"vllm:x 1\n")) as (url, asked):
        Server(url).metrics()
    assert b"Authorization: Bearer secret\r\n" in asked[0]


@pytest.mark.parametrize("key", ["sec\nret", "sécret"])
def test_a_key_that_is_none(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    report = diagnose(options_of(["--url", "localhost:1"]))
    assert [finding.id for finding in report.findings] == ["diagnose-no-answer"]
    assert "VLLM_API_KEY" in report.findings[0].fact
    assert key[-3:] not in report.as_text()


def test_a_key_that_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "old")
    with (
        answering(whole(b"{}", status="401 Unauthorized")) as (url, _),
        pytest.raises(ServerError) as caught,
    ):
        Server(url).models()
    assert "is not the server's" in caught.value.fix


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://user:password@localhost:8000", "user name"),
        ("http://" + "a" * 70, "too long"),
        ("http://a..b", "empty in part"),
        ("http://localhost/ü", "written as %"),
    ],
)
def test_addresses_that_are_none(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        base_url(url)
    assert "password" not in str(caught.value).replace("show the password", "")


def test_a_proxy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(whole(b"", status="502 Bad Gateway")) as (proxy, _):
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with pytest.raises(ServerError) as caught:
            Server("http://gpu-node.invalid:8000").metrics()
    assert "NO_PROXY=gpu-node.invalid" in caught.value.fix


def test_a_certificate_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error as the library raises it, since a test has no certificate."""
    server = Server("https://localhost:1")

    def failing(*_: Any, **__: Any) -> None:
        error = ssl.SSLCertVerificationError(1, "x")
        error.verify_message = "self-signed certificate"
        raise urllib.error.URLError(error)

    monkeypatch.setattr(server._opener, "open", failing)
    with pytest.raises(ServerError, match="self-signed") as caught:
        server.metrics()
    assert "SSL_CERT_FILE" in caught.value.fix


@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
@pytest.mark.parametrize("number", ["1e999", "-50", "1" + "0" * 320, "1000000001"])
def test_tokens_that_cannot_be_counted(name: str, number: str) -> None:
    usage = {"prompt_tokens": "1", "completion_tokens": "1", name: number}
    said = ", ".join(f'"{key}": {value}' for key, value in usage.items())
    body = f'{{"choices": [{{"text": "a"}}], "usage": {{{said}}}}}'.encode()
    with answering(whole(body)) as (url, _), pytest.raises(ServerError, match="not as vLLM does"):
        Server(url).complete("m", "a")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e12"])
def test_times_that_cannot_be(seconds: str) -> None:
    with pytest.raises(OptionError, match="--timeout takes up to"):
        options_of(["--url", "x", "--timeout", seconds])
