# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a vLLM server: its HTTP answers and counters, with the acceptance of one's choice.

A mock: a server with a given acceptance, or with broken metrics, cannot be had otherwise. The real
ones are in tests/hosts/test_diagnose.py.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

HEALTHY = (0.78, 0.56, 0.40)
WORDS = [
    "harbour", "clock", "tide", "ledger", "lamp", "rope", "winter", "copper", "engine", "letter",
    "garden", "signal", "market", "bridge", "paper", "window", "river", "stone", "number", "salt",
]  # fmt: skip


def text_of(seed: int, words: int = 120) -> str:
    """Words without a pattern."""
    state, chosen = seed * 2654435761 % 2**32 or 1, []
    for _ in range(words):
        state = (1103515245 * state + 12345) % 2**31
        chosen.append(WORDS[state >> 16 & 15] + str(state % 97))
    return " ".join(chosen)


@dataclass
class Counters:
    """One engine's counters."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    generated: int = 0
    requests: int = 0
    steps: int = 0
    seconds: float = 0.0

    def add(self, drafts: int, accepted: Sequence[int], plain: int, step: float) -> None:
        """A request: steps with drafts, what they accepted, steps without, seconds a step."""
        self.drafts += drafts
        self.draft_tokens += drafts * len(accepted)
        have = self.accepted or [0] * len(accepted)
        self.accepted = [a + b for a, b in zip(have, accepted, strict=True)]
        self.generated += 1 + drafts + sum(accepted) + plain
        self.requests += 1
        self.steps += drafts + plain
        self.seconds += step * (drafts + plain)


def exposition(
    engines: dict[tuple[str, str], Counters], speculates: bool = True, created: float = 1.7e9
) -> str:
    """The counters as vLLM's Prometheus text has them."""
    lines = ["# HELP process_cpu_seconds_total Total.", "process_cpu_seconds_total 12.5"]

    def counter(name: str, value: Callable[[Counters], float], extra: str = "") -> None:
        lines.append(f"# TYPE vllm:{name} counter")
        for (model, engine), counters in engines.items():
            labels = f'engine="{engine}",model_name="{model}"{extra}'
            lines.append(f"vllm:{name}_total{{{labels}}} {float(value(counters))}")
            lines.append(f"vllm:{name}_created{{{labels}}} {created}")

    counter("generation_tokens", lambda c: c.generated)
    counter("request_success", lambda c: c.requests, ',finished_reason="length"')
    for (model, engine), counters in engines.items():
        labels = f'{{engine="{engine}",model_name="{model}"}}'
        name = "vllm:inter_token_latency_seconds"
        lines.append(f'{name}_bucket{{engine="{engine}",le="0.1",model_name="{model}"}} 1')
        lines.append(f"{name}_count{labels} {float(counters.steps)}")
        lines.append(f"{name}_sum{labels} {counters.seconds}")
        lines.append(f"vllm:num_requests_running{labels} 0.0")
    if speculates:
        counter("spec_decode_num_drafts", lambda c: c.drafts)
        counter("spec_decode_num_draft_tokens", lambda c: c.draft_tokens)
        counter("spec_decode_num_accepted_tokens", lambda c: sum(c.accepted))
        for position in range(max((len(c.accepted) for c in engines.values()), default=3) or 3):

            def at(c: Counters, position: int = position) -> float:
                return c.accepted[position] if position < len(c.accepted) else 0

            counter("spec_decode_num_accepted_tokens_per_pos", at, f',position="{position}"')
    return "\n".join(lines) + "\n"


@dataclass
class Behaviour:
    """What a fake server does.

    Attributes:
        rates: of acceptance by position, of a request that ends at a length.
        drafted: the part of the steps that drafts, at a length.
        step: seconds of one.
        text: of an answer, by its number.
        metrics: turns the true text into the one that is served.
        paths: answers to paths, as status and body, instead of the usual ones.
    """

    rates: Callable[[int], Sequence[float]] = lambda length: HEALTHY
    drafted: Callable[[int], float] = lambda length: 1.0
    step: float = 0.02
    text: Callable[[int], str] = text_of
    models: Sequence[str] = ("kimi",)
    speculates: bool = True
    max_model_len: int = 32768
    release: str = "0.26.0"
    metrics: Callable[[str, int], str] = lambda text, reading: text
    paths: dict[str, tuple[int, str]] = field(default_factory=dict)
    foreign: int = 0
    chat_template: bool = True


class FakeServer:
    """As a context manager; ``url`` is its address."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.counters = {(self.behaviour.models[0], "0"): Counters()}
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.readings = 0
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer(*fake.get(self.path))

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                self._answer(*fake.post(self.path, json.loads(self.rfile.read(length))))

            def _answer(self, status: int, body: str) -> None:
                data = body.encode("utf-8", "surrogateescape")
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._http.server_close()

    def get(self, path: str) -> tuple[int, str]:
        if path in self.behaviour.paths:
            return self.behaviour.paths[path]
        if path == "/metrics":
            with self._lock:
                self.readings += 1
                text = exposition(self.counters, self.behaviour.speculates)
                return 200, self.behaviour.metrics(text, self.readings)
        if path == "/v1/models":
            data = [
                {"id": m, "root": m, "max_model_len": self.behaviour.max_model_len}
                for m in self.behaviour.models
            ]
            return 200, json.dumps({"object": "list", "data": data})
        if path == "/version":
            return 200, json.dumps({"version": self.behaviour.release})
        return 404, json.dumps({"detail": "Not Found"})

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        with self._lock:
            self.bodies.append((path, body))
        if path in self.behaviour.paths:
            return self.behaviour.paths[path]
        if path == "/tokenize":
            return 200, json.dumps({"tokens": list(range(len(body["prompt"]) // 4))})
        if path == "/v1/chat/completions":
            if not self.behaviour.chat_template:
                return 400, json.dumps({"error": {"message": "no chat template allowed"}})
            prompt = body["messages"][0]["content"]
            return self._complete(len(prompt) // 4, body["max_tokens"], chat=True)
        prompt = body["prompt"]
        tokens = len(prompt) // 4 if isinstance(prompt, str) else len(prompt)
        return self._complete(tokens, body["max_tokens"], chat=False)

    def _complete(self, prompt_tokens: int, tokens: int, chat: bool) -> tuple[int, str]:
        length = prompt_tokens + tokens
        rates = self.behaviour.rates(length)
        share = self.behaviour.drafted(length) if self.behaviour.speculates else 0.0
        step_yields = 1 + share * sum(rates)
        steps = max(1, round((tokens - 1) / step_yields))
        drafts = round(steps * share)
        accepted = [round(drafts * rate) for rate in rates]
        with self._lock:
            counters = next(iter(self.counters.values()))
            counters.add(drafts, accepted, steps - drafts, self.behaviour.step)
            for _ in range(self.behaviour.foreign):
                counters.add(3, [1] * len(rates), 0, self.behaviour.step)
            text = self.behaviour.text(counters.requests)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
        return 200, json.dumps({"choices": [choice], "usage": usage})
