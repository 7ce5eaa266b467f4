"""Results of the engine as LlamaIndex responses, whole or piece by piece, with or without tools."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection
from typing import Any, Generic, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)

from kvboost_rag.adapters.result_summary import summary, usage_dict
from kvboost_rag.adapters.tool_calls import AnswerStream, ParsedAnswer, parse_tool_calls
from kvboost_rag.datamodels import GenerationResult, StreamEvent

Response = TypeVar("Response", CompletionResponse, ChatResponse)


def raw_of(result: GenerationResult, model_name: str) -> dict[str, Any]:
    """What `response.raw` holds: plain values only, `usage` as token counters read it, `kvboost` what reuse did."""
    return {
        "model": model_name,
        "finish_reason": result.finish_reason,
        "usage": usage_dict(result),
        "kvboost": summary(result),
    }


Make = Callable[[str, "str | None", ParsedAnswer, "dict[str, Any] | None"], Response]
"""Builds a response from the text so far, the new piece, the tool calls found and `raw`."""


class Collector(Generic[Response]):
    """Turns stream events into responses with the text so far and the new piece; the last response has `raw`.

    Args:
        make: builds a response.
        tool_names: tools that were offered; what belongs to a call of theirs is held back until the end.
    """

    def __init__(self, make: Make[Response], model_name: str, tool_names: Collection[str] = ()) -> None:
        self._make: Make[Response] = make
        self._model_name = model_name
        self._answer = AnswerStream(tool_names)
        self._text = ""

    def push(self, event: StreamEvent) -> Response | None:
        """The response to yield for an event, or None where nothing new can be shown."""
        delta = self._answer.push(event.delta) if event.delta else ""
        if event.result is None:
            self._text += delta
            return self._make(self._text, delta, ParsedAnswer(self._text), None) if delta else None
        rest, parsed = self._answer.finish()
        return self._make(parsed.text, delta + rest, parsed, raw_of(event.result, self._model_name))


def whole(
    make: Make[Response], result: GenerationResult, model_name: str, tool_names: Collection[str] = ()
) -> Response:
    """The response to a call that does not stream."""
    parsed = parse_tool_calls(result.text, tool_names)
    return make(parsed.text, None, parsed, raw_of(result, model_name))


def completion(text: str, delta: str | None, parsed: ParsedAnswer, raw: dict[str, Any] | None) -> CompletionResponse:
    """A `CompletionResponse`; there are no tools in completions."""
    return CompletionResponse(text=text, delta=delta, raw=raw)


def chat_response(text: str, delta: str | None, parsed: ParsedAnswer, raw: dict[str, Any] | None) -> ChatResponse:
    """A `ChatResponse` by the assistant; tool calls are blocks of the message, and in its `additional_kwargs`."""
    blocks: list[ContentBlock] = [TextBlock(text=text)]
    for call in parsed.calls:
        # Some templates insist on ids of nine letters and digits.
        call_id = call.call_id or uuid.uuid4().hex[:9]
        blocks.append(ToolCallBlock(tool_call_id=call_id, tool_name=call.name, tool_kwargs=call.arguments))
    extra: dict[str, Any] = {}
    if parsed.invalid:
        extra["invalid_tool_calls"] = [{"text": i.text, "error": i.error} for i in parsed.invalid]
    # Core's streaming structured programs look for calls here before they ask for the blocks.
    also = {"tool_calls": [_openai_call(b) for b in blocks if isinstance(b, ToolCallBlock)]} if parsed.calls else {}
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=also)
    return ChatResponse(message=message, delta=delta, raw=raw, additional_kwargs=extra)


def _openai_call(block: ToolCallBlock) -> dict[str, Any]:
    function = {"name": block.tool_name, "arguments": json.dumps(block.tool_kwargs)}
    return {"id": block.tool_call_id, "type": "function", "function": function}
