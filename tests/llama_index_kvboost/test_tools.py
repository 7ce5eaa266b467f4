"""Function calling over a chat template that knows tools, with a model whose answers are given."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.kvboost import KVBoostLLM
from llama_index_kvboost.helpers import USER, MakeLLM

from kvboost_rag import KVBoost
from kvboost_rag.models.load import load_model

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


class Says:
    """A logits processor that makes the model say the given texts, one a call, and end each."""

    def __init__(self, llm: KVBoostLLM, *texts: str) -> None:
        tokenizer = llm.engine.tokenizer
        self._answers = [[*llm.tokenize(text), tokenizer.eos_token_id] for text in texts]
        self._left: list[int] = []
        self.prompts: list[str] = []
        self._decode = tokenizer.decode

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if not self._left:
            self._left = self._answers.pop(0)
            self.prompts.append(self._decode(input_ids[0]))
        scores[:] = float("-inf")
        scores[0, self._left.pop(0)] = 0
        return scores


@pytest.fixture
def tool_llm(tiny_loaded: Any, make_llm: MakeLLM) -> Iterator[KVBoostLLM]:
    tokenizer = copy.deepcopy(tiny_loaded.tokenizer)
    tokenizer.chat_template = TEMPLATE
    with KVBoost(load_model(tiny_loaded.model, tokenizer=tokenizer)) as engine:
        yield make_llm(engine=engine, max_new_tokens=200)


def speak(llm: KVBoostLLM, *texts: str) -> Says:
    """Give the model its next answers."""
    says = Says(llm, *texts)
    llm.generate_kwargs = {"logits_processor": [says]}
    return says


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ADD = FunctionTool.from_defaults(fn=add)


def test_only_templates_with_tools_make_a_function_calling_model(tool_llm: KVBoostLLM, make_llm: MakeLLM) -> None:
    assert tool_llm.metadata.is_function_calling_model is True
    assert make_llm().metadata.is_function_calling_model is False
    assert make_llm(is_function_calling_model=True).metadata.is_function_calling_model is True


async def test_calls_are_parsed_in_all_four_chats(tool_llm: KVBoostLLM) -> None:
    says = speak(tool_llm, *["I will add. " + CALL] * 4)
    responses = [
        tool_llm.chat_with_tools([ADD], "2 + 3?"),
        list(tool_llm.stream_chat_with_tools([ADD], "2 + 3?"))[-1],
        await tool_llm.achat_with_tools([ADD], "2 + 3?"),
        [r async for r in await tool_llm.astream_chat_with_tools([ADD], "2 + 3?")][-1],
    ]
    for response in responses:
        (selection,) = tool_llm.get_tool_calls_from_response(response)
        assert (selection.tool_name, selection.tool_kwargs) == ("add", {"a": 2, "b": 3})
        assert selection.tool_id
        assert response.message.content == "I will add."
    assert all('"name": "add"' in prompt for prompt in says.prompts)


def test_streams_show_no_piece_of_a_call(tool_llm: KVBoostLLM) -> None:
    speak(tool_llm, "I will add. " + CALL)
    deltas = [r.delta for r in tool_llm.stream_chat_with_tools([ADD], "2 + 3?")]
    assert "".join(deltas) == "I will add."


def test_predict_and_call_runs_the_tool(tool_llm: KVBoostLLM) -> None:
    speak(tool_llm, CALL, CALL + CALL, CALL + CALL, "No.")
    assert tool_llm.predict_and_call([ADD], "2 + 3?").response == "5"
    assert tool_llm.predict_and_call([ADD], "2 + 3?").response == "5"
    both = tool_llm.predict_and_call([ADD], "2 + 3?", allow_parallel_tool_calls=True)
    assert both.response == "5\n\n5"
    with pytest.raises(ValueError, match="without calling a tool"):
        tool_llm.predict_and_call([ADD], "2 + 3?")


def test_broken_calls_are_reported_and_no_calls(tool_llm: KVBoostLLM) -> None:
    speak(tool_llm, "<tool_call>not json</tool_call>")
    response = tool_llm.chat_with_tools([ADD], "2 + 3?")
    assert not any(isinstance(block, ToolCallBlock) for block in response.message.blocks)
    assert response.additional_kwargs["invalid_tool_calls"][0]["text"] == "not json"


def test_tool_choice_narrows_what_is_offered(tool_llm: KVBoostLLM) -> None:
    other = FunctionTool.from_defaults(fn=lambda: 1, name="other", description="Something else.")
    says = speak(tool_llm, "a", "b", "c")
    tool_llm.chat_with_tools([ADD, other], "2 + 3?", tool_choice="none")
    tool_llm.chat_with_tools([ADD, other], "2 + 3?", tool_choice={"type": "function", "function": {"name": "add"}})
    tool_llm.chat_with_tools([ADD, other], "2 + 3?", tool_choice="auto")
    offered = [("add" in prompt, "other" in prompt) for prompt in says.prompts]
    assert offered == [(False, False), (True, False), (True, True)]
    with pytest.raises(ValueError, match=r"nothing.*add, other"):
        tool_llm.chat_with_tools([ADD, other], "2 + 3?", tool_choice="nothing")
    with pytest.raises(ValueError, match="'web_search': only functions"):
        tool_llm.chat(USER, tools=[{"type": "web_search"}])


class Sum(BaseModel):
    """Two numbers."""

    a: int
    b: int


def test_structured_answers(tool_llm: KVBoostLLM) -> None:
    speak(tool_llm, CALL.replace('"add"', '"Sum"'))
    assert tool_llm.structured_predict(Sum, PromptTemplate("Which {what}?"), what="numbers") == Sum(a=2, b=3)


@pytest.mark.parametrize("streaming", [True, False])
async def test_function_agent(tool_llm: KVBoostLLM, streaming: bool) -> None:
    says = speak(tool_llm, CALL, "It is 5.")
    agent = FunctionAgent(tools=[ADD], llm=tool_llm, streaming=streaming)
    result = await agent.run("2 + 3?")
    assert str(result) == "It is 5."
    assert [call.tool_name for call in result.tool_calls] == ["add"]
    assert "<|im_start|>tool\n5<|im_end|>" in says.prompts[1]
    assert '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>' in says.prompts[1].replace(
        '{"arguments": {"a": 2, "b": 3}, "name": "add"}', '{"name": "add", "arguments": {"a": 2, "b": 3}}'
    )


async def test_a_model_without_tools_in_its_template_can_be_a_react_agent(make_llm: MakeLLM) -> None:
    llm = make_llm(max_new_tokens=100)
    thought = 'Thought: I add.\nAction: add\nAction Input: {"a": 2, "b": 3}'
    says = speak(llm, thought, "Thought: I know.\nAnswer: It is 5.")
    result = await ReActAgent(tools=[ADD], llm=llm).run("2 + 3?")
    assert str(result) == "It is 5."
    assert "Observation: 5" in says.prompts[1]


def test_tools_that_cannot_reach_the_prompt_are_refused(make_llm: MakeLLM) -> None:
    llm = make_llm(messages_to_prompt=lambda messages: messages[-1].content)
    with pytest.raises(ValueError, match="messages_to_prompt"):
        llm.chat_with_tools([ADD], "2 + 3?")


def test_other_templates_have_tools_in_words(make_llm: MakeLLM) -> None:
    llm = make_llm(is_function_calling_model=True, max_new_tokens=100)
    says = speak(llm, CALL)
    assert llm.predict_and_call([ADD], "2 + 3?").response == "5"
    assert '"name": "add"' in says.prompts[0]


class Pair(BaseModel):
    """Two numbers."""

    a: int
    b: int


async def test_structured_answers_stream_to_the_whole_object(tool_llm: KVBoostLLM) -> None:
    call = CALL.replace('"add"', '"Pair"')
    speak(tool_llm, *[call] * 4)
    prompt = PromptTemplate("Give me two numbers.")
    assert list(tool_llm.stream_structured_predict(Pair, prompt))[-1] == Pair(a=2, b=3)
    streamed = await tool_llm.astream_structured_predict(Pair, prompt)
    assert [item async for item in streamed][-1] == Pair(a=2, b=3)
    structured = tool_llm.as_structured_llm(Pair)
    assert list(structured.stream_chat(USER))[-1].raw == Pair(a=2, b=3)
    assert [item async for item in await structured.astream_chat(USER)][-1].raw == Pair(a=2, b=3)


async def test_the_first_call_alone_is_kept_in_both_places(tool_llm: KVBoostLLM) -> None:
    speak(tool_llm, CALL + CALL)
    message = tool_llm.chat_with_tools([ADD], "Add 2 and 3.").message
    assert len([b for b in message.blocks if isinstance(b, ToolCallBlock)]) == 1
    assert [c["function"]["name"] for c in message.additional_kwargs["tool_calls"]] == ["add"]
