# SPDX-License-Identifier: Apache-2.0
"""The command ``diagnose --url`` against a stand-in for a server, well-behaved and not."""

from __future__ import annotations

import ast
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_kimi_eagle3 import cli
from vllm_kimi_eagle3.diagnose import drive, plot
from vllm_kimi_eagle3.diagnose.report import Report
from vllm_kimi_eagle3.diagnose.run import OptionError, diagnose, options_of
from vllm_kimi_eagle3.diagnose.server import Server, ServerError, base_url
from vllm_kimi_eagle3.findings import Severity
from vllm_kimi_eagle3.findings.diagnose import KINDS

from .fake import HEALTHY, Behaviour, Counters, FakeServer, exposition

MLA = "lightseekorg/kimi-k2.5-eagle3-mla"


def run(behaviour: Behaviour | None = None, *words: str) -> tuple[Report, FakeServer]:
    with FakeServer(behaviour) as server:
        return diagnose(options_of(["--url", server.url, *words])), server


def ids(report: Report) -> list[str]:
    return [finding.id for finding in report.findings]


# ------------------------------------------------------------------------------------------ healthy


def test_a_healthy_server() -> None:
    report, server = run(None, "--drafter", MLA)
    assert ids(report) == []
    assert report.exit_code == 0
    assert report.verdict == "Acceptance is as it should be."
    assert report.measured is not None
    assert report.measured.rates[0].value == pytest.approx(HEALTHY[0], abs=0.01)
    assert report.drafted_share == 1.0
    assert report.speed == pytest.approx(2.74 / 0.02, rel=0.01)
    assert set(report.kinds) == {"chat", "code", "math", "chinese", "long"}
    chats = [body for path, body in server.bodies if path == "/v1/chat/completions"]
    assert all(body["temperature"] == 0 for body in chats)
    text = report.as_text()
    assert "76.4% to 80.4%" in text
    assert "tokens a step" in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_long_prompts_go_up_to_what_was_asked_for() -> None:
    _, server = run(None, "--context", "9000")
    longest = max(
        len(body["messages"][0]["content"]) // 4
        for path, body in server.bodies
        if path == "/v1/chat/completions"
    )
    assert longest == pytest.approx(9000, rel=0.02)
    assert drive.lengths(4096, 32768, 256) == [512, 1024, 2048, 4096]
    assert drive.lengths(4096, 2048, 256) == [512, 1024, 1728]
    assert drive.lengths(4096, 512, 256) == []
    assert drive.lengths(0, 32768, 256) == []


def test_a_small_context_takes_shorter_answers() -> None:
    _, server = run(Behaviour(max_model_len=300))
    assert {body["max_tokens"] for path, body in server.bodies if "completions" in path} == {150}


def test_without_a_chat_template_prompts_are_completed() -> None:
    report, server = run(Behaviour(chat_template=False))
    assert report.exit_code == 0
    assert sum(path == "/v1/chat/completions" for path, _ in server.bodies) == 1


def test_your_own_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        'What is a tide?\n{"token_ids": [1, 2, 3], "kind": "ids", "ignore_eos": true}\n'
    )
    report, server = run(None, "--prompts", str(file))
    assert [path for path, _ in server.bodies] == ["/v1/chat/completions", "/v1/completions"]
    assert server.bodies[1][1]["prompt"] == [1, 2, 3]
    assert server.bodies[1][1]["ignore_eos"] is True
    assert "2 prompts of " in report.how


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no prompt"),
        ("[]", "has no prompt"),
        ('[{"text": 1}]', "entry 1 is neither a text nor an object"),
        ('["a", {"token_ids": [1, -1]}]', "entry 2 is neither"),
        ('{"prompt": "a"}', "entry 1 is neither"),
    ],
)
def test_prompts_that_are_none(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(content)
    with pytest.raises(OptionError, match=words):
        options_of(["--url", "localhost:1", "--prompts", str(file)])


# -------------------------------------------------------------------------------------- not healthy


@pytest.mark.parametrize(
    ("behaviour", "found"),
    [
        (Behaviour(rates=lambda length: (0.10, 0.02, 0.0)), "diagnose-features"),
        (Behaviour(rates=lambda length: (0.72, 0.15, 0.03)), "diagnose-recurrence"),
        (Behaviour(rates=lambda length: (0.0, 0.0, 0.0)), "diagnose-nothing-accepted"),
        (
            Behaviour(drafted=lambda length: 1.0 if length < 2000 else 0.05),
            "diagnose-drafting-stops",
        ),
        (
            Behaviour(rates=lambda length: HEALTHY if length < 2000 else (0.0, 0.0, 0.0)),
            "diagnose-placeholders",
        ),
        (
            Behaviour(rates=lambda length: HEALTHY if length < 2000 else (0.2, 0.05, 0.01)),
            "diagnose-dead-beyond-length",
        ),
        (Behaviour(drafted=lambda length: 0.0), "diagnose-no-drafts"),
    ],
)
def test_what_is_wrong_is_named(behaviour: Behaviour, found: str) -> None:
    report, _ = run(behaviour)
    assert ids(report) == [found]
    assert report.exit_code == 1
    assert found in report.verdict
    assert report.findings[0].fix
    assert str(report.findings[0].evidence)


@pytest.mark.parametrize(
    ("behaviour", "found"),
    [
        (Behaviour(speculates=False), "diagnose-no-speculation"),
        (Behaviour(text=lambda number: "and so on " * 80), "diagnose-repeats"),
        (
            Behaviour(foreign=2, rates=lambda length: (0.42, 0.2, 0.1)),
            "diagnose-mixed-traffic",
        ),
        (Behaviour(rates=lambda length: (0.42, 0.2, 0.1)), "diagnose-below-expected"),
        (Behaviour(paths={"/metrics": (404, "")}), "diagnose-no-answer"),
        (Behaviour(paths={"/metrics": (200, "go_goroutines 1\n")}), "diagnose-no-metrics"),
        (Behaviour(paths={"/metrics": (200, "<html>")}), "diagnose-no-metrics"),
        (Behaviour(paths={"/metrics": (200, "\0\udcff{\n" * 99)}), "diagnose-no-metrics"),
        (Behaviour(paths={"/v1/models": (200, "[]")}), "diagnose-no-answer"),
        (Behaviour(paths={"/v1/models": (200, '{"data": [{"id": 3}]}')}), "diagnose-no-answer"),
        (Behaviour(paths={"/v1/chat/completions": (500, "out of memory")}), "diagnose-no-answer"),
        (Behaviour(paths={"/v1/chat/completions": (200, "{}")}), "diagnose-no-answer"),
        (
            Behaviour(metrics=lambda text, n: text.replace("num_drafts", "num_proposals")),
            "diagnose-counters-missing",
        ),
        (
            Behaviour(metrics=lambda text, n: text.replace("accepted_tokens_per_pos", "x")),
            "diagnose-counters-missing",
        ),
        (
            Behaviour(metrics=lambda text, n: text.replace('position="0"} ', 'position="0"} 1e9')),
            "diagnose-counters-impossible",
        ),
        (
            Behaviour(
                metrics=lambda text, n: text.replace('"kimi"} ', '"kimi"} NaN #') if n > 3 else text
            ),
            "diagnose-counters-impossible",
        ),
    ],
)
def test_what_cannot_be_told_is_said(behaviour: Behaviour, found: str) -> None:
    report, _ = run(behaviour)
    assert found in ids(report)
    assert report.exit_code == 2
    assert "diagnose-stopped" not in ids(report)
    said = next(f for f in report.findings if f.id == found)
    assert said.fix
    assert said.undecided


def test_a_server_that_is_started_anew_meanwhile() -> None:
    """Its counters begin at zero again, in the middle of the prompts."""
    with FakeServer() as server:
        true = server.post

        def restarting(path: str, body: dict[str, Any]) -> tuple[int, str]:
            if len(server.bodies) == 9:
                server.counters["kimi", "0"] = Counters()
            return true(path, body)

        server.post = restarting  # type: ignore[method-assign]
        report = diagnose(options_of(["--url", server.url]))
    assert "diagnose-counters-reset" in ids(report)
    assert report.exit_code == 2


def test_two_models_on_one_server() -> None:
    second = exposition({("other", "0"): Counters(9, 27, [1, 0, 0])})
    behaviour = Behaviour(models=("kimi", "other"), metrics=lambda text, n: text + second)
    report, _ = run(behaviour)
    assert ids(report) == ["diagnose-several-models"]
    assert "--model kimi" in report.findings[0].fix
    report, _ = run(behaviour, "--model", "kimi")
    assert report.exit_code == 0
    assert report.measured is not None
    assert report.measured.rates[0].value > 0.7
    report, _ = run(behaviour, "--model", "third")
    assert ids(report) == ["diagnose-no-answer"]
    assert "it has kimi, other" in report.findings[0].fact


PLAIN = exposition({("plain", "0"): Counters(generated=100, requests=1, steps=90)}, False)


@pytest.mark.parametrize("words", [("--context", "0"), ("--watch", "1")])
def test_a_model_without_drafts_beside_one_with_them(words: tuple[str, ...]) -> None:
    behaviour = Behaviour(models=("kimi", "plain"), metrics=lambda text, n: text + PLAIN)
    report, _ = run(behaviour, "--model", "plain", *words)
    assert ids(report) == ["diagnose-no-speculation"]
    assert report.exit_code == 2


def test_an_engine_without_counters_of_drafts() -> None:
    """Beside one of the same model that has them, and accepts nothing."""
    second = 'vllm:generation_tokens_total{engine="1",model_name="kimi"} 500.0\n'
    behaviour = Behaviour(
        rates=lambda length: (0.0, 0.0, 0.0), metrics=lambda text, n: text + second
    )
    report, _ = run(behaviour, "--context", "0")
    assert "diagnose-counters-missing" in ids(report)
    assert report.exit_code == 2


@pytest.mark.parametrize("readings", [1, 2])
@pytest.mark.parametrize("words", [("--context", "0"), ("--watch", "2")])
def test_counters_of_drafts_that_go_away(readings: int, words: tuple[str, ...]) -> None:
    def gone(text: str, reading: int) -> str:
        return text if reading <= readings else without_lines(text, "spec_decode")

    report, _ = run(Behaviour(metrics=gone), *words)
    assert "diagnose-counters-missing" in ids(report)
    assert report.exit_code == 2


def test_counters_of_drafts_by_their_tokens_only() -> None:
    """Neither steps with drafts nor positions: it speculates all the same."""

    def old(text: str, reading: int) -> str:
        return without_lines(text, "num_drafts", "per_pos")

    report, _ = run(Behaviour(metrics=old), "--context", "0")
    assert "diagnose-counters-missing" in ids(report)
    assert "diagnose-no-speculation" not in ids(report)
    assert report.exit_code == 2


def without_lines(text: str, *words: str) -> str:
    """A page without the lines that have one of the words."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not any(word in line for word in words))


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize(
    ("rates", "found", "code"),
    [
        (HEALTHY, "diagnose-none-published", 2),
        ((0.0, 0.0, 0.0), "diagnose-nothing-accepted", 1),
    ],
)
def test_a_server_that_stops_meanwhile(
    watched: bool, rates: tuple[float, ...], found: str, code: int
) -> None:
    """What was counted until then is judged."""
    with FakeServer(Behaviour(rates=lambda length: rates)) as server:
        true = server.get

        def stopping(path: str) -> tuple[int, str]:
            if path == "/metrics":
                if watched and server.readings > 1:
                    server.post("/v1/completions", {"prompt": "a" * 400, "max_tokens": 400})
                if server.readings > 4:
                    return 503, "gone"
            return true(path)

        server.get = stopping  # type: ignore[method-assign]
        words = ["--watch", "4"] if watched else ["--context", "0"]
        report = diagnose(options_of(["--url", server.url, *words]))
    assert found in ids(report)
    assert "diagnose-no-answer" in ids(report)
    assert report.exit_code == code
    assert report.measured is not None
    assert report.measured.counts.drafts > 100
    assert report.prompts == "", "it is no measurement of all of them"
    if not watched:
        assert report.how.startswith("3 of 16 prompts")


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        report = diagnose(options_of(["--url", f"localhost:{port}"]))
    assert ids(report) == ["diagnose-no-answer"]
    assert "does not answer" in report.findings[0].fact
    assert report.exit_code == 2


def test_a_server_that_takes_too_long() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        server = Server(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)
        with pytest.raises(ServerError) as caught:
            server.chat("m", [])
    assert "did not answer within 0 s" in caught.value.fact
    assert "--timeout" in caught.value.fix


def test_a_key_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = run(Behaviour(paths={"/v1/models": (401, '{"error": "Unauthorized"}')}))
    assert "VLLM_API_KEY" in report.findings[0].fix
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    report, _ = run()
    assert "secret" not in json.dumps(report.as_json())


def test_some_prompts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is too long for the server is left out and said."""
    post = FakeServer.post

    def refusing(self: FakeServer, path: str, body: dict[str, Any]) -> tuple[int, str]:
        if path == "/v1/chat/completions" and len(body["messages"][0]["content"]) > 4000:
            return 400, '{"message": "maximum context length"}'
        return post(self, path, body)

    monkeypatch.setattr(FakeServer, "post", refusing)
    report, _ = run()
    assert "it refused 3 more" in report.how
    assert report.how.endswith("answers 400 Bad Request: maximum context length)")
    assert report.exit_code == 0


def test_a_defect_of_ours_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("x")

    monkeypatch.setattr(drive, "drive", broken)
    report, _ = run()
    assert ids(report) == ["diagnose-stopped"]
    assert report.exit_code == 2
    assert report.model == "kimi", "what was known stays"


# -------------------------------------------------------------------------------------- comparisons


def test_none_published_is_an_answer() -> None:
    report, _ = run(None, "--drafter", "nvidia/Kimi-K2.5-Thinking-Eagle3")
    assert ids(report) == ["diagnose-none-published"]
    assert report.exit_code == 0
    assert "none published" in report.as_text()


def test_against_a_good_day(tmp_path: Path) -> None:
    good, _ = run()
    file = tmp_path / "good.json"
    file.write_text(json.dumps(good.as_json()))
    same, _ = run(None, "--expect", str(file))
    assert ids(same) == []
    worse, _ = run(Behaviour(rates=lambda length: (0.68, 0.49, 0.35)), "--expect", str(file))
    assert ids(worse) == ["diagnose-features"]
    other, _ = run(
        Behaviour(rates=lambda length: (0.68, 0.49, 0.35)), "--expect", str(file), "--context", "0"
    )
    assert ids(other) == [], "of other prompts, so it may be a little lower"
    alone, _ = run(Behaviour(rates=lambda length: (0.68, 0.49, 0.35)))
    assert alone.exit_code == 0, "without that day nothing is odd about it"


def test_what_was_watched_is_no_measurement_of_the_same_text(tmp_path: Path) -> None:
    """A report of --watch says of no prompts, and is held against like a published figure."""
    good, _ = run()
    file = tmp_path / "watched.json"
    file.write_text(json.dumps({**good.as_json(), "prompts": ""}))
    report, _ = run(Behaviour(rates=lambda length: (0.68, 0.49, 0.35)), "--expect", str(file))
    assert ids(report) == []


@pytest.mark.parametrize(
    ("behaviour", "found"),
    [(None, "diagnose-expectation"), (Behaviour(drafted=lambda length: 0.0), "diagnose-no-drafts")],
)
def test_a_length_that_so_few_drafts_cannot_have(behaviour: Behaviour | None, found: str) -> None:
    report, _ = run(behaviour, "--expect", "5")
    assert ids(report) == [found]
    assert report.exit_code in (1, 2)
    report, _ = run(behaviour, "--expect", "4.8@6")
    assert "diagnose-expectation" not in ids(report)


def test_a_drafter_that_is_known_to_be_weak() -> None:
    report, _ = run(Behaviour(rates=lambda length: (0.31, 0.1, 0.03)), "--expect", "31,10,3")
    assert ids(report) == []
    report, _ = run(Behaviour(rates=lambda length: (0.2, 0.06, 0.02)), "--expect", "31,10,3")
    assert ids(report) == ["diagnose-features"]


def test_the_first_reading_counts_too() -> None:
    """A number that cannot be, in the page from which everything is counted."""
    name = 'num_drafts_total{engine="0",model_name="kimi"} '
    behaviour = Behaviour(metrics=lambda text, n: text.replace(name, f"{name}NaN #") if n < 3
                          else text)  # fmt: skip
    report, _ = run(behaviour)
    assert "diagnose-counters-impossible" in ids(report)
    assert report.exit_code == 2


def test_a_request_of_others_that_does_not_end() -> None:
    """It gets tokens all the while, and is never counted as ended."""
    with FakeServer(Behaviour(rates=lambda length: (0.42, 0.2, 0.1))) as server:
        true = server.post

        def shared(path: str, body: dict[str, Any]) -> tuple[int, str]:
            answer = true(path, body)
            server.counters["kimi", "0"].generated += 200
            return answer

        server.post = shared  # type: ignore[method-assign]
        report = diagnose(options_of(["--url", server.url]))
    assert "diagnose-mixed-traffic" in ids(report)
    assert report.speed is None, "the latencies are those of both"


def test_a_model_without_counters_of_its_own() -> None:
    """An adapter's drafts are among those of the models that have counters, and of which is not
    known."""
    second = exposition({("other", "0"): Counters(9, 27, [1, 0, 0])})
    behaviour = Behaviour(models=("kimi", "adapter"), metrics=lambda text, n: text + second)
    report, _ = run(behaviour, "--model", "adapter")
    assert ids(report) == ["diagnose-several-models"]


def test_prompts_from_a_pipe(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("\ufeffWhat is a tide?\n")
    with FakeServer() as server:
        options = options_of(["--url", server.url, "--prompts", str(file)])
        file.unlink()
        report = diagnose(options)
    assert "1 prompts of " in report.how
    assert server.bodies[0][1]["messages"][0]["content"] == "What is a tide?"


def test_files_without_end() -> None:
    for flag in ("--prompts", "--expect"):
        with pytest.raises(OptionError, match=f"{flag} /dev/zero is larger than"):
            options_of(["--url", "x", flag, "/dev/zero"])


def test_without_is_a_server_without_speculation() -> None:
    with FakeServer() as other:
        report, _ = run(None, "--without", other.url)
    assert sorted(ids(report)) == ["diagnose-no-answer", "diagnose-none-published"]
    assert report.speed_without is None
    assert any("speculates, too" in finding.fact for finding in report.findings)


def test_the_same_without_speculation() -> None:
    with FakeServer(Behaviour(step=0.01, speculates=False)) as other:
        report, _ = run(None, "--without", other.url)
        assert report.speed_without == pytest.approx(100, rel=0.01)
        assert report.exit_code == 0
        assert "1.37 times" in report.as_text()
        slow, _ = run(Behaviour(step=0.05), "--without", other.url)
    assert "diagnose-slower" in ids(slow)
    assert slow.exit_code == 0, "slow is not wrong"
    assert "it is slower with speculation" in slow.verdict


@pytest.mark.parametrize("step", [1e-320, 1e-9, 1e6])
def test_steps_that_no_server_takes(step: float) -> None:
    with FakeServer(Behaviour(step=step)) as server:
        report = diagnose(options_of(["--url", server.url, "--context", "0"]))
    assert report.speed is None
    json.dumps(report.as_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (Behaviour(), Behaviour(paths={"/metrics": (200, "go_x 1")}), "has no metrics of vLLM"),
        (Behaviour(), Behaviour(speculates=False, foreign=1), "requests of others ran"),
        (Behaviour(foreign=1), Behaviour(speculates=False), "requests of others ran"),
        (Behaviour(), Behaviour(speculates=False, step=0.0), "does not time its tokens"),
    ],
)
def test_speeds_that_cannot_be_compared(first: Behaviour, second: Behaviour, said: str) -> None:
    with FakeServer(second) as other:
        report, server = run(first, "--without", other.url, "--context", "0")
    found = next(f for f in report.findings if f.id == "diagnose-not-compared")
    assert said in found.fact
    assert (server.url if first.foreign else other.url) in found.fact
    assert report.exit_code == 2


def test_another_model_without_speculation_is_not_compared() -> None:
    with FakeServer(Behaviour(models=("llama-8b",), speculates=False)) as other:
        report, _ = run(None, "--without", other.url, "--context", "0")
        assert not other.bodies
    found = next(f for f in report.findings if f.id == "diagnose-not-compared")
    assert "has no model 'kimi'; it has llama-8b" in found.fact
    assert report.exit_code == 2


def test_the_same_model_by_another_name() -> None:
    data = '{"data": [{"id": "plain", "root": "kimi", "max_model_len": 9999}]}'
    behaviour = Behaviour(speculates=False, paths={"/v1/models": (200, data)})
    with FakeServer(behaviour) as other:
        report, _ = run(None, "--without", other.url, "--context", "0")
    assert {body["model"] for _, body in other.bodies} == {"plain"}
    assert report.speed_without is not None


def test_a_server_without_speculation_that_is_not_there() -> None:
    report, _ = run(None, "--without", "http://127.0.0.1:9", "--context", "0")
    found = next(f for f in report.findings if f.id == "diagnose-no-answer")
    assert "http://127.0.0.1:9" in str(found.evidence)
    assert "--without" in found.fix
    assert "--url" not in found.fix
    assert report.measured is not None


def test_watching() -> None:
    with FakeServer() as server:
        before = server.get

        def busy(path: str) -> tuple[int, str]:
            if path == "/metrics":
                server.counters["kimi", "0"].add(40, [31, 22, 16], 0, 0.02)
            return before(path)

        server.get = busy  # type: ignore[method-assign]
        record = drive.watch(Server(server.url), 20, interval=1, sleep=lambda seconds: None)
        assert record.total.counts is not None
        assert record.total.counts.drafts == 800
        assert len(record.parts) == 20
        report = diagnose(options_of(["--url", server.url, "--watch", "1"]))
    assert not any(path.startswith("/v1/") for path, _ in server.bodies), "nothing is sent"
    assert ids(report)[0] == "diagnose-too-few-drafts"
    assert report.how == "watched for 1 s"


# ------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--url is missing"),
        (["--url"], "expected one argument"),
        (["--url", "ftp://x"], "is no address"),
        (["--url", "http://x:notaport"], "is no address"),
        (["--url", "x", "--watch", "0"], "--watch takes 1 to 86400"),
        (["--url", "x", "--watch", "soon"], "invalid float"),
        (["--url", "x", "--watch", "9", "--prompts", "f"], "leave one out"),
        (["--url", "x", "--watch", "9", "--without", "y"], "leave out --watch"),
        (["--url", "x", "--temperature", "1"], "needs --watch"),
        (["--url", "x", "--watch", "9", "--context", "9000"], "--context is of what is sent"),
        (["--url", "x", "--watch", "9", "--tokens", "99"], "--tokens is of what is sent"),
        (["--url", "x", "--without", ""], "--without is empty"),
        (["--url", "x", "--expect", "0.5"], "acceptance length is 1 to 65"),
        (["--url", "x", "--expect", "76"], "acceptance length is 1 to 65"),
        (["--url", "x", "--expect", "2.8@0"], "of 1 to 64 drafts a step"),
        (["--url", "x", "--context", "3000000000"], "--context takes up to 10,000,000"),
        (["--url", "x", "--tokens", "1"], "--tokens takes 8"),
        (["--url", "x", "--speed"], "unrecognized arguments"),
    ],
)
def test_options_that_are_wrong(words: list[str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        options_of(words)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://h/vllm/metrics", "https://h/vllm"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(given: str, url: str) -> None:
    assert base_url(given) == url


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose"]) == 64
    assert cli.main(["diagnose", "--help"]) == 0
    assert "exit code: 0 acceptance is as it should be" in capsys.readouterr().out
    assert cli.main(["diagnose", "--url", "a b"]) in (2, 64)
    assert cli.main(["diagnose", "--watch", "9"]) == 64
    assert "--url is missing" in capsys.readouterr().err
    with FakeServer() as server:
        assert cli.main(["diagnose", "--url", server.url, "--json", "--context", "0"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert cli.main(["diagnose", "--url", server.url, "--context", "0"]) == 0
    assert found["schema_version"] == 1
    assert found["exit_code"] == 0
    assert len(found["positions"]) == 3
    assert found["vllm"] == "0.26.0"
    assert "Acceptance is as it should be." in capsys.readouterr().out


def test_an_interrupt_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(drive, "drive", interrupted)
    with FakeServer() as server:
        assert cli.main(["diagnose", "--url", server.url, "--json"]) == 130
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.strip() == "vllm-kimi-eagle3: interrupted"


def test_the_offline_mode_gets_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the other mode, which needs torch."""
    seen: list[list[str]] = []
    other = ModuleType("run")
    other.main = lambda words: seen.append(words) or 2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_kimi_eagle3.diagnose.offline.run", other)
    words = ["--speculative-config", '{"model": "a"}', "--tokens", "9"]
    assert cli.main(["diagnose", "--offline", "target", *words]) == 2
    assert seen == [["target", *words]]


def test_the_live_mode_imports_the_standard_library_only() -> None:
    code = (
        "import sys; from vllm_kimi_eagle3 import cli; cli.main(['diagnose', '--help']); "
        "cli.main(['plan', '--rows', 'none']); "
        "print(sorted({n.partition('.')[0] for n in sys.modules} - sys.stdlib_module_names), "
        "file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = set(ast.literal_eval(done.stderr.splitlines()[-1]))
    assert not names & {"torch", "vllm", "matplotlib", "numpy", "safetensors", "requests"}, names


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "report.png"
    with FakeServer() as server, FakeServer(Behaviour(speculates=False)) as other:
        words = ["diagnose", "--url", server.url, "--without", other.url, "--plot", str(file)]
        assert cli.main(words) == 0
        assert file.read_bytes().startswith(b"\x89PNG")
        assert cli.main([*words[:-1], str(tmp_path / "report.doc")]) == 64
        assert cli.main([*words[:-1], str(tmp_path / "no" / "report.png")]) == 64
    assert "there is no folder" in capsys.readouterr().err


def _many_drafts(text: str, reading: int) -> str:
    def hundredfold(match: re.Match[str]) -> str:
        return f"{match[1]} {float(match[2]) * 100}"

    return re.sub(r"(num_draft_tokens_total\{[^}]*\}) (\S+)", hundredfold, text)


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (Behaviour(metrics=_many_drafts), ()),
        (Behaviour(step=1e-12), ()),
        (Behaviour(), ("--drafter", "/m/$x_$")),
        (Behaviour(models=("a$b^$",)), ()),
    ],
)
def test_a_picture_of_anything(
    behaviour: Behaviour, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "report.png"
    with FakeServer(behaviour) as server:
        asked = ["diagnose", "--url", server.url, "--context", "0", "--plot", str(file), *words]
        assert cli.main(asked) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert "Acceptance is as it should be." in capsys.readouterr().out


def test_a_picture_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    with FakeServer() as server:
        words = ["diagnose", "--url", server.url, "--context", "0", "--plot"]
        assert cli.main([*words, str(tmp_path / "folder.png")]) == 74
        shown = capsys.readouterr()
        assert "cannot be written" in shown.err
        assert "Acceptance is as it should be." in shown.out

        def refused(*_: Any) -> None:
            raise ValueError("no such glyph")

        monkeypatch.setattr(plot, "_acceptance", refused)
        assert cli.main([*words, str(tmp_path / "report.png")]) == 74
        assert "no such glyph" in capsys.readouterr().err


def test_a_picture_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(plot.PlotError, match=r"pip install 'vllm-kimi-eagle3\[plot\]'"):
        plot.available(Path("a.png"))
    assert cli.main(["diagnose", "--url", "localhost:1", "--plot", "a.png"]) == 64
    assert "needs matplotlib" in capsys.readouterr().err


def test_every_kind_of_finding_is_shown_here() -> None:
    """In this file or beside it, by a case that has it; the near misses stand with them."""
    text = "".join(
        path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")
    )
    for kind in KINDS:
        assert f'"{kind.id}"' in text, kind.id
        assert kind.severity is not Severity.FAILS, "a server that runs has started"
