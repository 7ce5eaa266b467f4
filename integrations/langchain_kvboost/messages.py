"""LangChain messages as the mappings that chat templates read, and the documents that messages carry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from kvboost_rag.config import lone_surrogate

_ROLES: dict[type[BaseMessage], str] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
    FunctionMessage: "tool",
}
_ROLE_NAMES = {"human": "user", "ai": "assistant", "developer": "system", "function": "tool"}
_DOCUMENT_BLOCKS = ("text-plain", "document", "search_result")
_SILENT = ("reasoning", "thinking", "redacted_thinking", "tool_use", "tool_call", "tool_call_chunk", "function_call")
"""Blocks without text for the model: thoughts are not told to it again, calls are taken from `tool_calls`."""


def template_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages for the chat template: role, text, tool calls.

    Text blocks are joined without anything between them, as `message.text` joins them; a document block (`text-plain`,
    `document`, `search_result`) stands in a paragraph of its own, its text verbatim.

    Raises:
        ValueError: a kind of message or block that is no text (image, audio, file); the message names it.
    """
    return [_template_message(message) for message in messages]


def carried_documents(messages: Sequence[BaseMessage]) -> list[Any]:
    """Documents that messages bring along: `additional_kwargs["documents"]`, tool artifacts, document blocks.

    They are hints: texts to look for in the prompt, never text of the prompt.
    """
    found: list[Any] = []
    for message in messages:
        found.extend(_document_texts(message.additional_kwargs.get("documents")))
        if isinstance(message, ToolMessage):
            found.extend(_document_texts(message.artifact))
        if not isinstance(message.content, str):
            blocks = (block for block in message.content if isinstance(block, dict))
            found.extend(t for b in blocks if b.get("type") in _DOCUMENT_BLOCKS for t in _document_block(b))
    return found


def document_hints(documents: Any) -> list[str]:
    """Texts of explicit documents, as the keyword `documents` of a call takes them. One with half a character in it
    stands in no prompt, and is left out.

    Raises:
        TypeError: something without text; the message says what.
    """
    if documents is None:
        return []
    if isinstance(documents, (str, Mapping, Document)):
        documents = [documents]
    texts = []
    for index, document in enumerate(documents):
        text = _document_text(document)
        if text is None:
            raise TypeError(f"documents[{index}] is a {type(document).__name__}; expected a Document or a str")
        texts.append(text)
    return [text for text in texts if lone_surrogate(text) is None]


def _template_message(message: BaseMessage) -> dict[str, Any]:
    result: dict[str, Any] = {"role": _role(message), "content": _text(message)}
    if isinstance(message, AIMessage) and message.tool_calls:
        result["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        result["tool_call_id"] = message.tool_call_id
    if result["role"] == "tool" and message.name:
        result["name"] = message.name
    return result


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return _ROLE_NAMES.get(message.role, message.role)
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise ValueError(f"a {type(message).__name__} cannot be part of a prompt")


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    text, paragraph = "", False
    for is_document, piece in _pieces(message.content):
        if text and piece and (is_document or paragraph):
            text += "\n\n"
        text += piece
        paragraph = is_document
    return text


def _pieces(content: Sequence[Any]) -> Iterator[tuple[bool, str]]:
    """(is a document, text) of each block."""
    for block in content:
        if isinstance(block, str):
            yield False, block
            continue
        kind = block.get("type")
        if kind in _DOCUMENT_BLOCKS:
            title = block.get("title")
            yield True, "\n".join([*([title] if title else []), *_document_block(block)])
        elif isinstance(block.get("text"), str):
            yield False, block["text"]
        elif kind not in _SILENT:
            raise ValueError(f"this model reads text only, got a content block of type {kind!r}")


def _document_block(block: Mapping[str, Any]) -> Iterable[str]:
    """Texts of a document block, in LangChain's form (`text`) or Anthropic's (`source.data`, `content` blocks)."""
    source = block.get("source")
    for text in (block.get("text"), source.get("data") if isinstance(source, Mapping) else None, block.get("content")):
        if isinstance(text, str):
            return [text]
        if isinstance(text, list):
            return [
                inner["text"] for inner in text if isinstance(inner, Mapping) and isinstance(inner.get("text"), str)
            ]
    raise ValueError(f"this model reads text only, got a {block.get('type')} block without text")


def _document_texts(value: Any) -> list[str]:
    """Texts of what may be one document, several, or something else altogether (artifacts are anything)."""
    candidates = value if isinstance(value, (list, tuple)) else [value]
    texts = (_document_text(candidate) for candidate in candidates if not isinstance(candidate, str))
    return [text for text in texts if text and lone_surrogate(text) is None]


def _document_text(document: Any) -> str | None:
    if isinstance(document, str):
        return document
    if isinstance(document, Mapping):
        document = next((document[key] for key in ("page_content", "text", "content") if key in document), None)
        return document if isinstance(document, str) else None
    text = getattr(document, "page_content", None)
    return text if isinstance(text, str) else None
