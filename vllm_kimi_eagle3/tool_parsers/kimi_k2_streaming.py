# SPDX-License-Identifier: Apache-2.0
"""vLLM's tool parser for Kimi-K2, for 0.15 to 0.19: right for any number of tokens in a delta.

The releases' own parser counts marker tokens from delta to delta and takes one step of its
state machine in each, so it loses calls where speculation makes a delta hold several. This one
reads the text from its beginning before and after a delta, and sends the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.engine.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.tool_parsers.abstract_tool_parser import ToolParser

from .kimi_k2_format import Reading, difference, read

# Ends a message; the tokenizer's own end-of-sequence token is another one.
_MESSAGE_END = "<|im_end|>"


class _SentCall(DeltaToolCall):  # type: ignore[misc]
    """A tool call of which nothing is left to send.

    With the last delta, the server asks whether the first tool call is true and has arguments. If
    so, it replaces all calls of that delta by what it takes for the unsent rest of the last one:
    up to 0.16 that is the arguments' text encoded as JSON once more, and on every release other
    calls in the same delta are lost. False here is the answer "nothing to complete".
    """

    def __bool__(self) -> bool:
        return False


class KimiK2StreamingToolParser(ToolParser):  # type: ignore[misc]
    """Tool calls of Kimi-K2, K2.5 and later, from the text alone.

    It keeps no state of its own between deltas, because the server has one parser for all the
    choices of a request. The attributes that the server reads after each delta are those of the
    choice that the delta was for.
    """

    def adjust_request(self, request: Any) -> Any:
        """As every parser's; and the markers must not be left out of the text."""
        request = super().adjust_request(request)
        if request.tools and request.tool_choice != "none":
            request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Content and tool calls of a whole message.

        A call that the message breaks off in is left out, as vLLM's own parser does.
        """
        reading = read(model_output, complete=True)
        calls = [
            ToolCall(
                id=call.id,
                type="function",
                function=FunctionCall(name=call.name, arguments=call.arguments),
            )
            for call in reading.calls
            if call.ended
        ]
        # A section without a call also counts as called: the server would otherwise answer with
        # the whole text, markers included.
        return ExtractedToolCallInformation(
            tools_called=reading.in_section, tool_calls=calls, content=reading.content or None
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """What a delta adds to the message; None if that is nothing yet.

        Args:
            previous_text: the message before the delta.
            current_text: the message with the delta.
            delta_text: not used, nor are the other token ids.
            previous_token_ids: see there.
            current_token_ids: see there.
            delta_token_ids: the delta's tokens; says whether the message ends here.
            request: what the client asked for.
        """
        before, after = read(previous_text), read(current_text)
        if not after.in_section and after.content != current_text:
            # Only the token says that no second half of a marker will come.
            after = read(current_text, complete=self._ends(delta_token_ids, request))
        self._show(after)
        content, calls = difference(before, after)
        parts: dict[str, Any] = {}
        if content:
            parts["content"] = content
        if calls:
            parts["tool_calls"] = [
                _SentCall(index=call.index, function=DeltaFunctionCall(arguments=call.arguments))
                if call.id is None
                else _SentCall(
                    index=call.index,
                    id=call.id,
                    type="function",
                    function=DeltaFunctionCall(name=call.name, arguments=call.arguments),
                )
                for call in calls
            ]
        return DeltaMessage(**parts) if parts else None

    def _ends(self, token_ids: Sequence[int], request: Any) -> bool:
        if not token_ids or getattr(request, "ignore_eos", False):
            return False
        ends = (getattr(self.model_tokenizer, "eos_token_id", None), self.vocab.get(_MESSAGE_END))
        return token_ids[-1] in ends

    def _show(self, reading: Reading) -> None:
        """Set the attributes that the server reads."""
        self.prev_tool_call_arr = [
            {"id": call.id, "name": call.name, "arguments": call.arguments}
            for call in reading.calls
        ]
        self.streamed_args_for_tool = [call.arguments for call in reading.calls]
        self.current_tool_id = len(reading.calls) - 1
        self.current_tool_name_sent = bool(reading.calls)
