"""Every kind of message reaches the prompt as text, and the documents that messages carry are found."""

from __future__ import annotations

from typing import Any

import pytest
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

from langchain_kvboost.messages import carried_documents, document_hints, template_messages

CALL = {"name": "look_up", "args": {"q": "who"}, "id": "c1", "type": "tool_call"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (SystemMessage("s"), {"role": "system", "content": "s"}),
        (HumanMessage("h", name="bob"), {"role": "user", "content": "h"}),
        (AIMessage("a"), {"role": "assistant", "content": "a"}),
        (ChatMessage("c", role="ipython"), {"role": "ipython", "content": "c"}),
        (ChatMessage("c", role="human"), {"role": "user", "content": "c"}),
        (FunctionMessage("f", name="fn"), {"role": "tool", "content": "f", "name": "fn"}),
        (
            ToolMessage("t", tool_call_id="c1", name="look_up"),
            {"role": "tool", "content": "t", "tool_call_id": "c1", "name": "look_up"},
        ),
        (
            AIMessage("", tool_calls=[CALL]),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": {"q": "who"}}}
                ],
            },
        ),
        (HumanMessage(["a", {"type": "text", "text": "b"}]), {"role": "user", "content": "ab"}),
        (HumanMessage([]), {"role": "user", "content": ""}),
        (
            AIMessage([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}]),
            {"role": "assistant", "content": "x"},
        ),
    ],
)
def test_each_kind(message: BaseMessage, expected: dict[str, Any]) -> None:
    assert template_messages([message]) == [expected]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "text-plain", "text": "D", "title": "T"},
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
        {"type": "search_result", "title": "T", "source": "u", "content": [{"type": "text", "text": "D"}]},
    ],
)
def test_document_blocks_are_paragraphs_and_hints(block: dict[str, Any]) -> None:
    message = HumanMessage([{"type": "text", "text": "Read:"}, block, {"type": "text", "text": "Who?"}])
    assert template_messages([message])[0]["content"] == "Read:\n\nT\nD\n\nWho?"
    assert carried_documents([message]) == ["D"]


@pytest.mark.parametrize("kind", ["image_url", "image", "audio", "file"])
def test_blocks_that_are_no_text_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ValueError, match=f"reads text only.*{kind}"):
        template_messages([HumanMessage([{"type": kind, kind: "data"}])])


def test_documents_of_messages() -> None:
    documents = [Document("one"), Document("two")]
    messages = [
        HumanMessage("h", additional_kwargs={"documents": documents}),
        ToolMessage("t", tool_call_id="1", artifact=[Document("three")]),
        ToolMessage("t", tool_call_id="2", artifact=Document("four")),
        ToolMessage("t", tool_call_id="3", artifact={"rows": [1, 2]}),
        ToolMessage("t", tool_call_id="4", artifact=object()),
        HumanMessage("h", additional_kwargs={"documents": [{"text": "five"}, {"title": "no text"}]}),
    ]
    assert carried_documents(messages) == ["one", "two", "three", "four", "five"]


def test_document_hints() -> None:
    assert document_hints(None) == []
    assert document_hints(["a", Document("b"), {"page_content": "c"}]) == ["a", "b", "c"]
    assert document_hints(Document("b")) == document_hints("b") == ["b"]
    with pytest.raises(TypeError, match=r"documents\[1\] is a int"):
        document_hints(["a", 3])
