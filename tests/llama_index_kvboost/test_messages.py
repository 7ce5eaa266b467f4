"""LlamaIndex messages as chat templates read them."""

from __future__ import annotations

import pytest
from llama_index.core.base.llms.types import (
    CachePoint,
    CitableBlock,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms import ChatMessage
from llama_index.llms.kvboost.messages import template_messages
from llama_index_kvboost.helpers import TEXTS, MakeLLM


def test_roles_and_text_blocks() -> None:
    messages = [
        ChatMessage(role="developer", content="Be brief."),
        ChatMessage(role="user", blocks=[TextBlock(text="one"), TextBlock(text="two")]),
        ChatMessage(role="chatbot", content="three"),
        ChatMessage(role="model", blocks=[ThinkingBlock(content="hm"), TextBlock(text="four")]),
        ChatMessage(role="user", blocks=[]),
    ]
    assert template_messages(messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "three"},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize("form", ["blocks", "openai"])
def test_tool_calls_and_results(form: str) -> None:
    if form == "blocks":
        block = ToolCallBlock(tool_call_id="abc", tool_name="add", tool_kwargs={"a": 1})
        calling = ChatMessage(role="assistant", blocks=[block])
    else:
        call = {"id": "abc", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        calling = ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": [call]})
    result = ChatMessage(role="tool", content="2", additional_kwargs={"tool_call_id": "abc", "name": "add"})
    function = {"name": "add", "arguments": {"a": 1}}
    assert template_messages([calling, result]) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function, "id": "abc"}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "abc", "name": "add"},
    ]


def test_citable_documents_are_found_and_reused(make_llm: MakeLLM) -> None:
    llm = make_llm()
    blocks = [
        CitableBlock(title="Stores", source="stores.txt", content=[TextBlock(text=TEXTS[0])]),
        CachePoint(cache_control={"type": "ephemeral"}),
        TextBlock(text="Which is full?"),
    ]
    messages = [ChatMessage(role="user", blocks=blocks)]
    assert template_messages(messages)[0]["content"] == f"Stores\nstores.txt\n{TEXTS[0]}\nWhich is full?"
    assert llm.chat(messages).raw["kvboost"]["hits"] == {"encoded": 1}
    assert llm.chat(messages).raw["kvboost"]["hits"] == {"approximate": 1}


def test_blocks_that_are_no_text_are_refused() -> None:
    with pytest.raises(TypeError, match="image"):
        template_messages([ChatMessage(role="user", blocks=[ImageBlock(url="http://localhost/a.png")])])
