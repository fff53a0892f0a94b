# SPDX-License-Identifier: Apache-2.0
"""Over HTTP: a real `vllm serve` with speculation, asked by the OpenAI client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from . import harness, images
from .conftest import expected_counts
from .harness import LLAMA_DRAFTER, Run
from .matrix import scenario
from .serving import Server, command_line

pytestmark = scenario("serve")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Server]:
    """The tiny pair; the plugin in strict mode and, where vLLM has it, the check of variables."""
    line = command_line(harness.engine_arguments(drafter=LLAMA_DRAFTER))
    if harness.at_least(0, 17):
        line.append("--fail-on-environ-validation")
    env = harness.environment(cache, VLLM_KIMI_EAGLE3_STRICT="1")
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    with Server([*line, "--served-model-name", "tiny"], env, log) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def complete(client: openai.OpenAI, prompt: Any, max_tokens: int) -> str:
    """Greedy text for a prompt, end of sequence ignored."""
    answer = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    return str(answer.choices[0].text)


def test_completions_and_counters(
    server: Server, client: openai.OpenAI, prompts: list[list[int]], expected: dict[str, Any]
) -> None:
    """First, on a fresh server: /metrics counts what the reference predicts."""
    texts = [complete(client, prompt, expected["max_tokens"]) for prompt in prompts]
    assert texts == expected["output_texts"]
    assert server.spec_decode() == expected_counts(LLAMA_DRAFTER)


def test_concurrent_requests(
    client: openai.OpenAI, prompts: list[list[int]], expected: dict[str, Any]
) -> None:
    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = pool.map(lambda p: complete(client, p, expected["max_tokens"]), prompts)
    assert list(texts) == expected["output_texts"]


@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
def test_chat(client: openai.OpenAI, without: Run, expected: dict[str, Any], image: bool) -> None:
    """The answer is that of the offline engine without speculation."""
    answer = client.chat.completions.create(
        model="tiny",
        messages=images.messages("What is this?" if image else "Name the licence.", image),
        max_tokens=expected["max_tokens"],
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].message.content == without.result["afterwards"][image]["text"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == without.result["afterwards"][image]["num_prompt_tokens"]


def test_streaming(
    client: openai.OpenAI, prompts: list[list[int]], expected: dict[str, Any]
) -> None:
    stream = client.completions.create(
        model="tiny",
        prompt=prompts[0],
        max_tokens=expected["max_tokens"],
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert len(pieces) > 1
    assert "".join(pieces) == expected["output_texts"][0]


@scenario("log line")
def test_every_process_says_what_the_plugin_did(server: Server) -> None:
    lines = [line for line in server.log().splitlines() if "vllm-kimi-eagle3 " in line]
    processes = [re.search(r"\((\w+?)(?:_DP0)? pid=\d+\)", line) for line in lines]
    assert sorted(match[1] for match in processes if match) == ["APIServer", "EngineCore"], lines
    assert all("applied image-token, target-interface" in line for line in lines)


def test_no_unknown_variable(server: Server) -> None:
    assert "Unknown vLLM environment variable" not in server.log()
