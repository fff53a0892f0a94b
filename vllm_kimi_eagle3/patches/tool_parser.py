# SPDX-License-Identifier: Apache-2.0
"""vLLM's streaming parser of Kimi's tool calls wants one token in a delta; speculation sends more.

The parser is offered as plugins offer one, by a name that vLLM looks up when a server asks for it;
the name is vLLM's own, so that ``--tool-call-parser kimi_k2`` becomes right. No other model's
parser has it.
"""

from __future__ import annotations

import ast

from vllm_kimi_eagle3.contract import Sources, Symbol

from .base import Patch, Undo

_PARSERS = "vllm.tool_parsers.abstract_tool_parser"
_PROTOCOL = "vllm.entrypoints.openai.engine.protocol"
_TARGET = f"{_PARSERS}:ToolParserManager.lazy_parsers"
_STOCK_MODULE = "vllm.tool_parsers.kimi_k2_tool_parser"
_STOCK_STREAMING = f"{_STOCK_MODULE}:KimiK2ToolParser.extract_tool_calls_streaming"
NAME = "kimi_k2"
_ROUTE = ("vllm_kimi_eagle3.tool_parsers.kimi_k2_streaming", "KimiK2StreamingToolParser")


def _open_in(sources: Sources) -> bool:
    # The parser that loses calls tells where it is by counting marker tokens.
    node = sources.node(_STOCK_STREAMING)
    return node is not None and any(
        isinstance(part, ast.Attribute)
        and part.attr == "count"
        and isinstance(part.value, ast.Name)
        and part.value.id == "previous_token_ids"
        for part in ast.walk(node)
    )


def _registered() -> str | None:
    """The module of the parser that a server would get."""
    from vllm.tool_parsers import ToolParserManager

    # In the order in which vLLM looks.
    if (loaded := ToolParserManager.tool_parsers.get(NAME)) is not None:
        return str(loaded.__module__)
    route = ToolParserManager.lazy_parsers.get(NAME)
    return None if route is None else str(route[0])


def _install() -> Undo:
    from vllm.tool_parsers import ToolParserManager

    if _registered() != _STOCK_MODULE:
        # The user's own, by --tool-parser-plugin, which vLLM reads first.
        return lambda: None
    loaded = ToolParserManager.tool_parsers.pop(NAME, None)
    route = ToolParserManager.lazy_parsers.get(NAME)
    ToolParserManager.register_lazy_module(NAME, *_ROUTE)

    def undo() -> None:
        if _registered() != _ROUTE[0]:
            return
        ToolParserManager.tool_parsers.pop(NAME, None)
        ToolParserManager.lazy_parsers.pop(NAME, None)
        if loaded is not None:
            ToolParserManager.tool_parsers[NAME] = loaded
        if route is not None:
            ToolParserManager.lazy_parsers[NAME] = route

    return undo


def _verify() -> bool:
    # A user's own parser is as good: what must not be there is vLLM's.
    return _registered() not in (None, _STOCK_MODULE)


PATCH = Patch(
    id="tool-parser",
    gap="the kimi_k2 tool parser loses calls and arguments of a streamed answer when several "
    "tokens arrive in one delta, as they do with speculation.",
    target=_TARGET,
    since="0.15.1",
    before="0.20",
    does="registers under that name a parser that gives the same calls however the answer is cut "
    "into deltas; a parser of the user's own under the name stays.",
    upstream=(
        "https://github.com/vllm-project/vllm/issues/38274",
        "https://github.com/vllm-project/vllm/pull/38579",
    ),
    goes="with support for vLLM 0.19",
    symbols=(
        Symbol(_TARGET, "present"),
        Symbol(f"{_PARSERS}:ToolParserManager.tool_parsers", "present"),
        Symbol(f"{_PARSERS}:ToolParserManager.get_tool_parser", "body"),
        Symbol(f"{_PARSERS}:ToolParserManager.register_lazy_module", "body"),
        Symbol(f"{_PARSERS}:ToolParser.adjust_request"),
        Symbol(f"{_PARSERS}:ToolParser.extract_tool_calls"),
        Symbol(f"{_PARSERS}:ToolParser.extract_tool_calls_streaming"),
        Symbol(_STOCK_STREAMING),
        *(
            Symbol(f"{_PROTOCOL}:{name}", "present")
            for name in (
                "DeltaFunctionCall",
                "DeltaMessage",
                "DeltaToolCall",
                "ExtractedToolCallInformation",
                "FunctionCall",
                "ToolCall",
            )
        ),
        # Asks what `_SentCall` answers.
        Symbol(
            "vllm.entrypoints.openai.chat_completion.serving:"
            "OpenAIServingChat._should_check_for_unstreamed_tool_arg_tokens",
            "body",
        ),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
)
