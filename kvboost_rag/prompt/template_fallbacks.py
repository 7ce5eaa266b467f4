"""Messages that a chat template cannot write, put into words it can: tools, tool calls, tool results, system text.

Many templates drop what they do not know without a word, so whether a template writes a thing is found by rendering.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Conversation = list[dict[str, Any]]
Render = Callable[[Conversation, Sequence[Any] | None], str]

_MARK = "kvboostmark"
_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_TOOL = {"type": "function", "function": {"name": _MARK, "description": "", "parameters": _PARAMETERS}}
_USER: dict[str, Any] = {"role": "user", "content": "hello"}


def _calling(name: str) -> dict[str, Any]:
    """An assistant's call. The id is of the form that Mistral's templates insist on: nine letters and digits."""
    call = {"id": "kvboost00", "type": "function", "function": {"name": name, "arguments": {"a": "b"}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "a", "tool_call_id": "kvboost00", "content": content}


@dataclass(frozen=True)
class Abilities:
    """What a chat template writes."""

    tools: bool
    tool_calls: bool
    tool_results: bool
    system: bool

    @classmethod
    def of(cls, render: Render) -> Abilities:
        """Found by rendering short conversations; one that the template refuses or drops is an ability it lacks."""

        def writes(conversation: Conversation, tools: Sequence[Any] | None = None) -> bool:
            try:
                return _MARK in render(conversation, tools)
            except Exception:  # templates raise what they like
                return False

        said = {"role": "assistant", "content": "calling"}
        return cls(
            tools=writes([_USER], [_TOOL]),
            tool_calls=writes([_USER, _calling(_MARK), _result("x")]) or writes([_USER, _calling(_MARK)]),
            tool_results=writes([_USER, _calling("a"), _result(_MARK)]) or writes([_USER, said, _result(_MARK)]),
            system=writes([{"role": "system", "content": _MARK}, _USER]),
        )


def fit(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, abilities: Abilities
) -> tuple[Conversation, Sequence[Any] | None]:
    """The conversation and tools for a template with these abilities; what it lacks is written as text.

    Tools are described in the system message and calls written in `<tool_call>` tags, in the words of the Hermes
    format, which most open models have seen. Text of the messages themselves is kept as it is.
    """
    conversation = [dict(message) for message in messages]
    if tools and not abilities.tools:
        conversation = _with_system_text(conversation, tools_text(tools))
        tools = None
    conversation = [_fitting(message, abilities) for message in conversation]
    if not abilities.system:
        conversation = _without_system(conversation)
    return conversation, tools


def tools_text(tools: Sequence[Any]) -> str:
    """What tells a model which tools there are and how to call one."""
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{signatures}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def _fitting(message: dict[str, Any], abilities: Abilities) -> dict[str, Any]:
    if message.get("tool_calls") and not abilities.tool_calls:
        calls = message["tool_calls"]
        written = [f"<tool_call>\n{_call_json(call['function'])}\n</tool_call>" for call in calls]
        text = message.get("content") or ""
        return {"role": message["role"], "content": "\n".join([*([text] if text else []), *written])}
    if message["role"] == "tool" and not abilities.tool_results:
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    return message


def _call_json(function: Mapping[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)


def _with_system_text(conversation: Conversation, text: str) -> Conversation:
    if conversation and conversation[0]["role"] == "system":
        return [conversation[0] | {"content": f"{conversation[0]['content']}\n\n{text}"}, *conversation[1:]]
    return [{"role": "system", "content": text}, *conversation]


def _without_system(conversation: Conversation) -> Conversation:
    """Each system message in front of the user's text that follows it, or as the user's where none follows."""
    fitted: Conversation = []
    waiting: list[str] = []
    for message in conversation:
        if message["role"] == "system":
            waiting.append(message.get("content") or "")
        elif waiting and message["role"] == "user":
            fitted.append(message | {"content": "\n\n".join([*waiting, message.get("content") or ""])})
            waiting = []
        else:
            fitted.append(message)
    return [*fitted, {"role": "user", "content": "\n\n".join(waiting)}] if waiting else fitted
