"""Tools reach the prompt, and what the model writes comes back as tool calls. The model is told what to say."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"query": "naïve é", "limit": 2}}\n</tool_call>'


@tool
def look_up(query: str, limit: int = 3) -> str:
    """Search the archive."""
    return f"{limit} results for {query}"


@pytest.mark.parametrize("path", ["invoke", "stream", "ainvoke", "astream"])
def test_calls_come_back_on_every_path(chat: Any, saying: Any, path: str) -> None:
    bound = chat().bind_tools([look_up])
    answer = _ask(bound, path, **saying(f"Let me see. {CALL}"))
    assert answer.text == "Let me see."
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("look_up", {"query": "naïve é", "limit": 2})
    assert call["id"]
    assert not answer.invalid_tool_calls


@pytest.mark.parametrize("path", ["invoke", "stream"])
def test_broken_calls_are_invalid_calls(chat: Any, saying: Any, path: str) -> None:
    bound = chat().bind_tools([look_up])
    answer = _ask(bound, path, **saying('<tool_call>{"name": look_up}</tool_call>'))
    assert not answer.tool_calls
    assert len(answer.invalid_tool_calls) == 1
    assert "look_up" in answer.invalid_tool_calls[0]["args"]


def test_without_tools_the_text_stays_text(chat: Any, saying: Any) -> None:
    answer = chat().invoke("hi", **saying(CALL))
    assert answer.text == CALL
    assert not answer.tool_calls


def test_plain_answers_are_streamed_in_pieces_with_tools_bound(chat: Any, saying: Any) -> None:
    text = "The store holds every document that was encoded."
    chunks = list(chat().bind_tools([look_up]).stream("hi", **saying(text)))
    assert "".join(c.text for c in chunks) == text
    assert len(chunks) > 5


@pytest.mark.parametrize("text", ['{"city": "Velm"}', "a < b <", "```\ncode\n```"])
def test_what_was_held_back_and_is_no_call_comes_at_the_end(chat: Any, saying: Any, text: str) -> None:
    for path in ("stream", "astream", "invoke"):
        answer = _ask(chat().bind_tools([look_up]), path, **saying(text))
        assert answer.text == text
        assert not answer.tool_calls


def test_tools_are_in_the_prompt(chat: Any) -> None:
    ours = chat()
    count = ours.get_num_tokens_from_messages([HumanMessage("hi")])
    with_tools = ours.get_num_tokens_from_messages([HumanMessage("hi")], tools=[look_up])
    answer = ours.bind_tools([look_up]).invoke("hi")
    assert answer.usage_metadata["input_tokens"] == with_tools > count + 20


def test_tools_may_be_bound_in_any_form(chat: Any, saying: Any) -> None:
    expected = chat().bind_tools([look_up]).invoke("hi").usage_metadata["input_tokens"]
    bound = chat().bind(tools=[look_up])
    assert bound.invoke("hi").usage_metadata["input_tokens"] == expected
    for path in ("invoke", "stream"):
        assert [call["name"] for call in _ask(bound, path, **saying(CALL)).tool_calls] == ["look_up"]


@tool
def other(x: int) -> int:
    """Another one."""
    return x


@pytest.mark.parametrize(
    ("choice", "offered"),
    [
        *[(choice, ["look_up", "other"]) for choice in (None, "any", "auto", "required", True, False, {"type": "any"})],
        ("other", ["other"]),
        ({"type": "function", "function": {"name": "other"}}, ["other"]),
        ({"type": "tool", "name": "other"}, ["other"]),
        ("none", []),
        ({"type": "none"}, []),
    ],
)
def test_tool_choice_is_the_same_for_every_way_to_give_tools(chat: Any, choice: Any, offered: list[str]) -> None:
    ours, both, said = chat(), [look_up, other], [HumanMessage("hi")]
    bound = ours.bind_tools(both, tool_choice=choice)
    assert [t["function"]["name"] for t in bound.kwargs["tools"]] == offered
    expected = ours.get_num_tokens_from_messages(said, tools=[t for t in both if t.name in offered])
    for answer in (
        bound.invoke(said),
        ours.bind(tools=both, tool_choice=choice).invoke(said),
        ours.invoke(said, tools=both, tool_choice=choice),
    ):
        assert answer.usage_metadata["input_tokens"] == expected


def test_tools_that_cannot_be_offered_are_refused_by_name(chat: Any) -> None:
    ours = chat()
    for ask in (ours.bind_tools, lambda tools, **call: ours.bind(tools=tools, **call).invoke("hi")):
        with pytest.raises(ValueError, match="'third' is not among the tools offered: look_up, other"):
            ask([look_up, other], tool_choice="third")
        with pytest.raises(ValueError, match="'web_search_preview': only functions"):
            ask([look_up, {"type": "web_search_preview"}])


FREE = {"max_tokens": 200, "min_new_tokens": 0, "temperature": 0}
"""Room for an answer that ends of its own."""


class Choice(BaseModel):
    """One of a few."""

    city: Literal["Oslo", "Lima"]
    far: bool


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("schema", [Choice, Choice.model_json_schema()])
def test_structured_output(chat: Any, schema: Any, method: str) -> None:
    """A random model, in every way to ask: nothing but the constraint can make it answer in form."""
    structured = chat(**FREE).with_structured_output(schema, method=method)
    streamed = _plain(list(structured.stream("Which?"))[-1])
    assert Choice.model_validate(streamed)
    for result in (structured.invoke("Which?"), asyncio.run(structured.ainvoke("Which?"))):
        assert _plain(result) == streamed


def _plain(result: Any) -> Any:
    return result if isinstance(result, dict) else result.model_dump()


def test_json_mode_without_a_schema_is_any_object(chat: Any) -> None:
    raw = chat(max_tokens=40, min_new_tokens=0).with_structured_output(method="json_mode", include_raw=True)
    assert raw.invoke("An object.")["raw"].text.startswith("{")


def test_structured_output_that_is_cut_off_says_so(chat: Any) -> None:
    model = chat(max_tokens=3, min_new_tokens=0)
    result = model.with_structured_output(Choice, include_raw=True).invoke("Which?")
    assert result["parsed"] is None
    assert isinstance(result["parsing_error"], OutputParserException)
    with pytest.raises(OutputParserException):
        model.with_structured_output(Choice).invoke("Which?")


@pytest.mark.parametrize("arguments", [{"method": "yaml"}, {"schema": None}, {"schema": Choice, "colour": 1}])
def test_what_structured_output_does_not_know_is_refused(chat: Any, arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"yaml|needs a schema|colour"):
        chat().with_structured_output(**({"schema": Choice} | arguments))


def test_without_the_library_what_comes_is_parsed(chat: Any, saying: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost_rag.adapters.constrained.find_spec", lambda name: None)
    said = saying('{"city": "Oslo", "far": true}')
    with pytest.warns(UserWarning, match=r"kvboost-rag\[structured\]"):
        assert chat(**said).with_structured_output(Choice).invoke("Which?") == Choice(city="Oslo", far=True)
    with pytest.warns(UserWarning, match="not enforced"), pytest.raises(OutputParserException):
        chat(**saying("I do not know.")).with_structured_output(Choice).invoke("Which?")


@tool
def book(city: Literal["Oslo", "Lima"], far: bool = False) -> str:
    """Book a journey."""
    return city


@pytest.mark.parametrize("choice", ["any", "required", "book", {"type": "function", "function": {"name": "book"}}])
@pytest.mark.parametrize("path", ["invoke", "astream"])
def test_a_forced_choice_makes_any_model_call(chat: Any, choice: Any, path: str) -> None:
    (call,) = _ask(chat(**FREE).bind_tools([book], tool_choice=choice), path).tool_calls
    assert call["name"] == "book"
    assert call["args"]["city"] in ("Oslo", "Lima")
    assert {"city"} <= call["args"].keys() <= {"city", "far"}


def test_a_whole_agent_loop(chat: Any, saying: Any) -> None:
    """Call, result, answer: the second turn's prompt holds the call and what came of it."""
    ours = chat()
    first = ours.bind_tools([look_up]).invoke("Find Ada.", **saying(CALL))
    result = look_up.invoke(first.tool_calls[0])
    messages = [HumanMessage("Find Ada."), first, result]
    final = ours.bind_tools([look_up]).invoke(messages, **saying("Found."))
    assert final.text == "Found."
    assert final.usage_metadata["input_tokens"] == ours.get_num_tokens_from_messages(messages, tools=[look_up])


def _ask(runnable: Any, path: str, **call: Any) -> AIMessage:
    async def collect() -> list[Any]:
        return [chunk async for chunk in runnable.astream("hi", **call)]

    if path == "invoke":
        return runnable.invoke("hi", **call)
    if path == "ainvoke":
        return asyncio.run(runnable.ainvoke("hi", **call))
    chunks = list(runnable.stream("hi", **call)) if path == "stream" else asyncio.run(collect())
    return sum(chunks[1:], chunks[0])
