"""Tool calls as models write them, whole and in pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost_rag.adapters.tool_calls import AnswerStream, ToolCall, parse_tool_calls

NAMES = ["add", "search"]
ADD = ToolCall("add", {"a": 1, "b": [2, "x"]})
JSON = json.dumps({"name": "add", "arguments": {"a": 1, "b": [2, "x"]}})
PARAMETERS = json.dumps({"name": "add", "parameters": {"a": 1, "b": [2, "x"]}})
WRITTEN = {
    "hermes": f"<tool_call>\n{JSON}\n</tool_call>",
    "unclosed": f"<tool_call>\n{JSON}",
    "list in a tag": f"<tool_call>[{JSON}]</tool_call>",
    "mistral list": f"[TOOL_CALLS] [{JSON}]",
    "mistral named": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, "x"]}',
    "llama bare": PARAMETERS,
    "llama bare list": f"  [{PARAMETERS}]\n",
    "llama python tag": f"<|python_tag|>{PARAMETERS}<|eom_id|>",
    "function tag": '<function=add>{"a": 1, "b": [2, "x"]}</function>',
    "qwen coder": '<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2, "x"]\n</parameter>\n'
    "</function>\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    '<arg_value>[2, "x"]</arg_value>\n</tool_call>',
    "command r": '<|START_ACTION|>[{"tool_name": "add", "parameters": {"a": 1, "b": [2, "x"]}}]<|END_ACTION|>',
    "fenced": f"```json\n{JSON}\n```",
    "openai wrapping": json.dumps(
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2, "x"]}'}}
    ),
}


@pytest.mark.parametrize("form", WRITTEN)
def test_every_form_is_read(form: str) -> None:
    parsed = parse_tool_calls(WRITTEN[form], NAMES)
    assert parsed.calls == (ADD,)
    assert parsed.text == ""
    assert not parsed.invalid


def test_several_calls_and_the_text_around_them() -> None:
    other = '<tool_call>{"name": "search", "arguments": {"q": "naïve \\u00e9"}, "id": "c7"}</tool_call>'
    parsed = parse_tool_calls(f"I will look.\n{WRITTEN['hermes']}\n{other} Done.", NAMES)
    assert parsed.calls == (ADD, ToolCall("search", {"q": "naïve é"}, "c7"))
    assert parsed.text == "I will look.\n\n Done."


@pytest.mark.parametrize(
    "body", ["not json", '{"arguments": {}}', '{"name": "add", "arguments": [1]}', "", "<function=", "7"]
)
def test_what_claims_to_be_a_call_and_is_none_is_reported(body: str) -> None:
    parsed = parse_tool_calls(f"Text. <tool_call>{body}</tool_call>", NAMES)
    assert not parsed.calls
    assert len(parsed.invalid) == 1
    assert parsed.invalid[0].error
    assert parsed.text == "Text."


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "arguments": 3}',
        '{"city": "Velm"}',
        "[1, 2]",
        '```json\n{"name": "Ada"}\n```',
        "```\ncode\n```",
        "  plain \n",
    ],
)
def test_json_answers_that_name_no_tool_are_answers(text: str) -> None:
    assert parse_tool_calls(text, NAMES).text == text
    assert parse_tool_calls(text, NAMES).calls == ()


def test_without_tools_nothing_is_a_call() -> None:
    assert parse_tool_calls(WRITTEN["hermes"], []).text == WRITTEN["hermes"]


PIECES = st.lists(
    st.sampled_from(
        [*WRITTEN.values(), "<tool_call>", "</tool_call>", "<tool", "```", "{", "[", " ", "\n", "word", "<", "[TOOL"]
    ),
    max_size=6,
)


@given(PIECES, st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_a_stream_says_what_the_whole_says(pieces: list[str], steps: list[int]) -> None:
    text = "".join(pieces)
    stream, shown, at, i = AnswerStream(NAMES), "", 0, 0
    while at < len(text):
        step = steps[i % len(steps)]
        shown += stream.push(text[at : at + step])
        at, i = at + step, i + 1
    rest, parsed = stream.finish()
    assert shown + rest == parse_tool_calls(text, NAMES).text
    assert parsed == parse_tool_calls(text, NAMES)


def test_plain_text_is_streamed_at_once() -> None:
    stream = AnswerStream(NAMES)
    assert stream.push("A plain") == "A plain"
    assert stream.push(" answer <") == " answer"
    assert stream.push("3") == " <3"
    assert AnswerStream([]).push("<tool_call>") == "<tool_call>"
