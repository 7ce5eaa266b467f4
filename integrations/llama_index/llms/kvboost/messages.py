"""LlamaIndex chat messages as the mappings that chat templates read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}
_SILENT = (CachePoint, ThinkingBlock, ToolCallBlock)
"""Blocks without text of their own: every prefix is cached as it is, thoughts are not told to the model again."""


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages for the chat template: role, text, tool calls.

    Text blocks are joined by line breaks, as `ChatMessage.content` joins them. A `CitableBlock` is its title, its
    source and its text; the text stands there verbatim, so that a stored document is found in it.

    Raises:
        TypeError: a block that is no text (image, audio, file); the message names its type.
    """
    return [_template_message(message) for message in messages]


def cited_texts(messages: Sequence[ChatMessage]) -> list[str]:
    """Texts of the documents that messages carry as `CitableBlock`s."""
    return [
        block.text
        for message in messages
        for citable in message.blocks
        if isinstance(citable, CitableBlock)
        for block in citable.content
        if isinstance(block, TextBlock)
    ]


def _template_message(message: ChatMessage) -> dict[str, Any]:
    result: dict[str, Any] = {
        "role": _ROLES.get(message.role, message.role.value),
        "content": "\n".join(_texts(message.blocks)),
    }
    extra = message.additional_kwargs
    if calls := _tool_calls(message):
        result["tool_calls"] = calls
    result |= {name: extra[name] for name in ("tool_call_id", "name") if extra.get(name)}
    return result


def _texts(blocks: Iterable[Any]) -> Iterable[str]:
    for block in blocks:
        if isinstance(block, TextBlock):
            yield block.text
        elif isinstance(block, CitableBlock):
            yield from (line for line in (block.title, block.source) if line)
            yield from _texts(block.content)
        elif isinstance(block, CitationBlock):
            yield from _texts([block.cited_content])
        elif not isinstance(block, _SILENT):
            kind = getattr(block, "block_type", type(block).__name__)
            raise TypeError(f"this model reads text only, got a message block of type {kind!r}")


def _tool_calls(message: ChatMessage) -> list[dict[str, Any]]:
    """Calls of an assistant's message: blocks, or OpenAI's form in `additional_kwargs` as older code writes it."""
    calls = [
        _template_call(block.tool_name, block.tool_kwargs, block.tool_call_id)
        for block in message.blocks
        if isinstance(block, ToolCallBlock)
    ]
    if calls:
        return calls
    for call in message.additional_kwargs.get("tool_calls") or ():
        plain = call if isinstance(call, dict) else call.model_dump()
        function = plain["function"]
        calls.append(_template_call(function["name"], function["arguments"], plain.get("id")))
    return calls


def _template_call(name: str, arguments: Any, call_id: str | None) -> dict[str, Any]:
    """Templates write the arguments themselves, so they get a mapping; text that is none stays text."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call | ({"id": call_id} if call_id else {})
