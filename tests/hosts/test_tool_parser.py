# SPDX-License-Identifier: Apache-2.0
"""Tool calls in a streamed answer: vLLM's own `kimi_k2` parser, and the plugin's under that name.

The parsers are asked as the server asks them: by vLLM's `ToolParserManager`, and by the server's
own generator of a streamed answer, which gets the engine's outputs from the test. The tokenizer is
the tiny target's with Kimi's markers added, each one token, as in the published tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kimi_eagle3.patches.tool_parser import NAME, PATCH
from vllm_kimi_eagle3.tool_parsers.kimi_k2_format import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    SECTION_BEGIN,
    SECTION_END,
)

from . import harness
from .matrix import scenario

pytestmark = scenario("tool calls")

MESSAGE_END = "<|im_end|>"
SIZES = (1, 2, 3, 4, 8, 1000)  # the last: everything in one delta


def call(name: str, index: int, arguments: str) -> str:
    return f"{CALL_BEGIN}functions.{name}:{index}{ARGUMENT_BEGIN}{arguments}{CALL_END}"


def section(*calls: str) -> str:
    return SECTION_BEGIN[0] + "".join(calls) + SECTION_END[0]


# Written by hand and not by json.dumps, so that nobody who writes it anew gets the same text.
ONE = section(call("f", 0, '{"a":1}'))
TWO = "Let me look.\n" + section(
    call("weather", 0, '{ "city":"Zürich","days" : [1, 2],"note": "a < b"}'),
    call("files.read", 1, '{"path":"/tmp/x", "range":{"from":0,"to": 10}, "what":"}\\"}{"}'),
)


EXPECTED = {
    ONE: ("", [["functions.f:0", "f", '{"a":1}']]),
    TWO: (
        "Let me look.\n",
        [
            [
                "functions.weather:0",
                "weather",
                '{ "city":"Zürich","days" : [1, 2],"note": "a < b"}',
            ],
            [
                "functions.files.read:1",
                "read",
                '{"path":"/tmp/x", "range":{"from":0,"to": 10}, "what":"}\\"}{"}',
            ],
        ],
    ),
}


@dataclass
class Answer:
    """An answer, as a client puts it together."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: dict[str, Any]) -> None:
        """Take a chunk's delta."""
        self.content += delta.get("content") or ""
        for part in delta.get("tool_calls") or []:
            while len(self.calls) <= part["index"]:
                self.calls.append(["", "", ""])
            function = part.get("function") or {}
            new = (part.get("id"), function.get("name"), function.get("arguments"))
            for place, text in enumerate(new):
                self.calls[part["index"]][place] += text or ""

    @property
    def said(self) -> tuple[str, list[list[str]]]:
        return self.content, self.calls


@dataclass(frozen=True)
class Delta:
    """What the engine hands to the server at once."""

    text: str
    token_ids: list[int]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(harness.TARGET))
    tokenizer.add_tokens([SECTION_BEGIN[0], SECTION_END[0], CALL_BEGIN, ARGUMENT_BEGIN, CALL_END])
    return tokenizer


def deltas(tokenizer: Any, text: str, size: int) -> list[Delta]:
    """`text`, and the end of the message, in deltas of `size` tokens.

    With the decoder that vLLM's detokenizer uses.
    """
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = [stream.step(tokenizer._tokenizer, token_id) or "" for token_id in token_ids]
    # The stop token has no text.
    token_ids.append(tokenizer.convert_tokens_to_ids(MESSAGE_END))
    pieces.append("")
    return [
        Delta("".join(pieces[i : i + size]), token_ids[i : i + size])
        for i in range(0, len(token_ids), size)
    ]


@pytest.fixture
def plugin() -> Iterator[None]:
    """The plugin's parser registered, and afterwards no longer."""
    undo = PATCH.install()
    assert PATCH.verify()
    yield
    undo()


def parser_class() -> Any:
    """The class that a server with `--tool-call-parser kimi_k2` gets."""
    from vllm.tool_parsers import ToolParserManager

    return ToolParserManager.get_tool_parser(NAME)


def stock_class() -> Any:
    from vllm.tool_parsers.kimi_k2_tool_parser import KimiK2ToolParser

    return KimiK2ToolParser


def request(**values: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    return ChatCompletionRequest(
        model="tiny",
        messages=[{"role": "user", "content": "Do something."}],
        **{"tools": [tool], "stream": True, **values},
    )


def parsed(cls: Any, tokenizer: Any, pieces: Sequence[Delta]) -> Answer:
    """What a parser makes of deltas."""
    parser, answer, asked = cls(tokenizer), Answer(), request()
    text, token_ids = "", []
    for piece in pieces:
        message = parser.extract_tool_calls_streaming(
            previous_text=text,
            current_text=text + piece.text,
            delta_text=piece.text,
            previous_token_ids=token_ids,
            current_token_ids=token_ids + piece.token_ids,
            delta_token_ids=piece.token_ids,
            request=asked,
        )
        if message is not None:
            answer.add(message.model_dump(exclude_unset=True))
        text, token_ids = text + piece.text, token_ids + piece.token_ids
    return answer


def served(
    cls: Any, tokenizer: Any, choices: Sequence[Sequence[Delta]], finish_reason: str = "stop"
) -> list[Answer]:
    """What a client gets of the engine's deltas for the choices of a request.

    The server's generator with just the attributes that it reads; nothing else of it is built.
    """
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.engine.protocol import RequestResponseMetadata
    from vllm.outputs import CompletionOutput, RequestOutput

    server = object.__new__(OpenAIServingChat)
    vars(server).update(
        tool_parser=cls,
        enable_auto_tools=True,
        use_harmony=False,
        tool_call_id_type="random",
        response_role="assistant",
        # The name on 0.15, and what it is there: no reasoning parser.
        reasoning_parser=None,
        enable_force_include_usage=False,
        enable_prompt_tokens_details=False,
        enable_log_outputs=False,
        enable_log_deltas=False,
        request_logger=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="kimi_k25")),
    )

    async def outputs() -> AsyncIterator[Any]:
        for step in range(max(len(pieces) for pieces in choices)):
            for index, pieces in enumerate(choices):
                if step < len(pieces):
                    last = step == len(pieces) - 1
                    output = CompletionOutput(
                        index=index,
                        text=pieces[step].text,
                        token_ids=pieces[step].token_ids,
                        cumulative_logprob=None,
                        logprobs=None,
                        finish_reason=finish_reason if last else None,
                    )
                    yield RequestOutput("id", None, [1], None, [output], finished=False)

    async def collect() -> list[Answer]:
        answers = [Answer() for _ in choices]
        async for line in server.chat_completion_stream_generator(
            request(n=len(choices)),
            outputs(),
            "id",
            "tiny",
            [],
            tokenizer,
            RequestResponseMetadata(request_id="id"),
        ):
            data = line.removeprefix("data: ").strip()
            if data == "[DONE]":
                continue
            chunk = json.loads(data)
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                answer = answers[choice["index"]]
                answer.add(choice["delta"])
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        return answers

    return asyncio.run(collect())


# ------------------------------------------------------------------------------------- the fault


def test_stock_loses_what_several_tokens_bring(tokenizer: Any) -> None:
    """With one token in a delta it is right, so the rest is the tokens' number and nothing else."""
    right = {}
    for name, text in (("one call", ONE), ("text and two calls", TWO)):
        for size in SIZES:
            pieces = deltas(tokenizer, text, size)
            alone = parsed(stock_class(), tokenizer, pieces)
            (answer,) = served(stock_class(), tokenizer, [pieces])
            assert answer.said == alone.said
            right[name, size] = answer.said == EXPECTED[text]
    assert right == {
        **{("one call", size): size < 4 for size in SIZES},
        **{("text and two calls", size): size < 2 for size in SIZES},
    }


# --------------------------------------------------------------------------------------- the cure


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("text", [ONE, TWO], ids=["one call", "text and two calls"])
def test_the_plugin_loses_nothing(tokenizer: Any, text: str, size: int) -> None:
    pieces = deltas(tokenizer, text, size)
    assert parsed(parser_class(), tokenizer, pieces).said == EXPECTED[text]
    (answer,) = served(parser_class(), tokenizer, [pieces])
    assert answer.said == EXPECTED[text]
    assert answer.finish_reason == "tool_calls"


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("last", range(1, 30))
def test_whatever_the_last_delta_holds(tokenizer: Any, last: int) -> None:
    """The server has a rule of its own for arguments in the last delta: it sends them again."""
    tokens = deltas(tokenizer, TWO, 1)
    final = Delta(
        "".join(piece.text for piece in tokens[-last:]),
        [piece.token_ids[0] for piece in tokens[-last:]],
    )
    (answer,) = served(parser_class(), tokenizer, [[*tokens[:-last], final]])
    assert answer.said == EXPECTED[TWO]


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("size", SIZES)
def test_several_choices(tokenizer: Any, size: int) -> None:
    """The server has one parser for all choices of a request."""
    texts = [TWO, "Nothing to call.", ONE]
    answers = served(parser_class(), tokenizer, [deltas(tokenizer, t, size) for t in texts])
    assert [answer.said for answer in answers] == [EXPECTED[TWO], (texts[1], []), EXPECTED[ONE]]
    assert [a.finish_reason for a in answers] == ["tool_calls", "stop", "tool_calls"]


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("text", ["a < b", "The sign is <", "Write <|tool_call_begin|>.", "<|tool"])
def test_text_alone(tokenizer: Any, text: str, size: int) -> None:
    (answer,) = served(parser_class(), tokenizer, [deltas(tokenizer, text, size)])
    assert answer.said == (text, [])
    assert answer.finish_reason == "stop"


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("size", SIZES)
def test_an_answer_that_breaks_off(tokenizer: Any, size: int) -> None:
    pieces = deltas(tokenizer, TWO.partition(', "range"')[0], size)
    pieces[-1].token_ids.pop()  # No end of the message.
    (answer,) = served(parser_class(), tokenizer, [pieces], finish_reason="length")
    content, (first, second) = EXPECTED[TWO]
    assert answer.said == (content, [first, [*second[:2], '{"path":"/tmp/x"']])
    # Not streamed, such a call is left out, by stock and by the plugin.
    text = "".join(piece.text for piece in pieces)
    for cls in (stock_class(), parser_class()):
        whole = cls(tokenizer).extract_tool_calls(text, request())
        assert [c.id for c in whole.tool_calls] == [first[0]]


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("size", SIZES)
def test_the_attributes_are_what_was_sent(tokenizer: Any, size: int) -> None:
    """A server may read them after any delta."""
    parser, answer, text = parser_class()(tokenizer), Answer(), ""
    for piece in deltas(tokenizer, TWO, size):
        message = parser.extract_tool_calls_streaming(
            text, text + piece.text, piece.text, [], [], piece.token_ids, request()
        )
        text += piece.text
        answer.add(message.model_dump(exclude_unset=True) if message is not None else {})
        keys = ("id", "name", "arguments")
        assert [[call[key] for key in keys] for call in parser.prev_tool_call_arr] == answer.calls
        assert parser.streamed_args_for_tool == [call[2] for call in answer.calls]
        assert parser.current_tool_id == len(answer.calls) - 1
        assert parser.current_tool_name_sent is (answer.calls != [])


SPELLED = st.tuples(
    st.sampled_from(["f", "get_weather", "files.read"]),
    st.integers(0, 20),
    st.dictionaries(
        st.text(max_size=4),
        st.one_of(st.text(max_size=8), st.integers(), st.just("<|")),
        max_size=3,
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    st.text(max_size=10),
    st.lists(SPELLED, max_size=3),
    st.sampled_from(["", " ", "\n"]),
    st.lists(st.integers(0, 2000), max_size=30),
)
def test_streamed_as_stock_has_it_whole(
    tokenizer: Any, content: str, calls: list[Any], gap: str, places: list[int]
) -> None:
    """Whatever the deltas: what stock's parser finds in the whole text, which is right."""
    from vllm_kimi_eagle3.tool_parsers.kimi_k2_streaming import KimiK2StreamingToolParser

    text = content + section(
        *(
            f"{gap}{CALL_BEGIN}{gap}functions.{name}:{index}{gap}{ARGUMENT_BEGIN}{gap}"
            f"{json.dumps(arguments, ensure_ascii=False)}{gap}{CALL_END}"
            for name, index, arguments in calls
        )
    )
    stock = stock_class()(tokenizer).extract_tool_calls(text, request())
    whole = KimiK2StreamingToolParser(tokenizer).extract_tool_calls(text, request())
    assert whole == stock
    bounds = sorted({0, len(text), *(place % len(text) for place in places)})
    pieces = [Delta(text[i:j], [0]) for i, j in pairwise(bounds)]
    assert parsed(KimiK2StreamingToolParser, tokenizer, pieces).said == (
        stock.content or "",
        [[c.id, c.function.name, c.function.arguments] for c in stock.tool_calls],
    )


def test_the_singular_spelling(tokenizer: Any) -> None:
    from vllm_kimi_eagle3.tool_parsers.kimi_k2_streaming import KimiK2StreamingToolParser

    text = TWO.replace(SECTION_BEGIN[0], SECTION_BEGIN[1]).replace(SECTION_END[0], SECTION_END[1])
    assert text != TWO
    whole = KimiK2StreamingToolParser(tokenizer).extract_tool_calls(text, request())
    calls = [[c.id, c.function.name, c.function.arguments] for c in whole.tool_calls]
    assert (whole.content, calls) == EXPECTED[TWO]
    for size in SIZES:
        pieces = deltas(tokenizer, text, size)
        assert parsed(KimiK2StreamingToolParser, tokenizer, pieces).said == EXPECTED[TWO]


@pytest.mark.usefixtures("plugin")
def test_the_markers_are_asked_for(tokenizer: Any) -> None:
    parser = parser_class()(tokenizer)
    assert not parser.adjust_request(request()).skip_special_tokens
    assert parser.adjust_request(request(tool_choice="none")).skip_special_tokens
    assert parser.adjust_request(request(tools=None)).skip_special_tokens
    named = {"type": "function", "function": {"name": "f"}}
    assert parser.adjust_request(request(tool_choice=named)).structured_outputs is not None


# ------------------------------------------------------------------------------- the registration

LOADS_PLUGINS = """
import json, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.tool_parsers import ToolParserManager
said = {"imported": "vllm_kimi_eagle3.tool_parsers.kimi_k2_streaming" in sys.modules}
said["parser"] = ToolParserManager.get_tool_parser("kimi_k2").__name__
from vllm_kimi_eagle3.patches import revert
revert()
said["reverted"] = ToolParserManager.get_tool_parser("kimi_k2").__name__
print(json.dumps(said))
"""


def test_a_server_that_loads_plugins_gets_it(cache: Path) -> None:
    """Under vLLM's own name for it, and imported when it is asked for."""
    done = subprocess.run(
        [sys.executable, "-c", LOADS_PLUGINS],
        env=harness.environment(cache),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "imported": False,
        "parser": "KimiK2StreamingToolParser",
        "reverted": "KimiK2ToolParser",
    }


def test_a_revert_restores(tokenizer: Any) -> None:
    """Also when vLLM had its own parser loaded, and when the plugin's was."""
    from vllm.tool_parsers import ToolParserManager

    before = parser_class()
    assert before is stock_class()
    routes = dict(ToolParserManager.lazy_parsers)
    undo = PATCH.install()
    assert PATCH.verify()
    assert parser_class().__name__ == "KimiK2StreamingToolParser"
    assert PATCH.verify()
    undo()
    assert not PATCH.verify()
    assert parser_class() is before
    assert ToolParserManager.lazy_parsers == routes


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_parser_of_the_users_own_stays(first: bool) -> None:
    """`--tool-parser-plugin` may be read before or after the plugin is loaded."""
    from vllm.tool_parsers import ToolParserManager

    class Own(stock_class()):  # type: ignore[misc]
        pass

    stock = parser_class()
    undo = None if first else PATCH.install()
    ToolParserManager.register_module(NAME, module=Own)
    try:
        undo = undo or PATCH.install()
        assert parser_class() is Own
        assert PATCH.verify()
        undo()
        assert parser_class() is Own
    finally:
        ToolParserManager.tool_parsers[NAME] = stock
        ToolParserManager.lazy_parsers[NAME] = (stock.__module__, stock.__name__)
