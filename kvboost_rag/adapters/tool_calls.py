"""Tool calls in generated text: the formats that chat templates teach their models, parsed into names and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

MARKERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=", "<|START_ACTION|>", "```")
"""Where a call can begin inside a text. A bare JSON value counts only at the very start of an answer."""

_BLOCK = re.compile(
    r"<tool_call>(?P<tagged>.*?)(?:</tool_call>|(?=<tool_call>)|\Z)"
    r"|\[TOOL_CALLS\](?P<mistral>.*?)(?=\[TOOL_CALLS\]|\Z)"
    r"|<\|python_tag\|>(?P<python_tag>.*?)(?:<\|eom_id\|>|<\|eot_id\|>|\Z)"
    r"|(?P<function><function=.*?(?:</function>|(?=<function=)|\Z))"
    r"|<\|START_ACTION\|>(?P<action>.*?)(?:<\|END_ACTION\|>|\Z)"
    r"|```(?:json|tool_call|tool_code)?[ \t]*\n(?P<fenced>.*?)(?:```|\Z)",
    re.DOTALL,
)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_ARG_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", re.DOTALL)
_NAMED_JSON = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][\w-]*\s*)?(?:\[ARGS\])?\s*(?=\{)")
_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")


@dataclass(frozen=True)
class ToolCall:
    """A call the model asks for. `call_id` is set only where the model wrote one."""

    name: str
    arguments: dict[str, Any]
    call_id: str | None = None


@dataclass(frozen=True)
class InvalidToolCall:
    """Text marked as a tool call that is none; `error` says why."""

    text: str
    error: str


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer taken apart: `text` is what stands outside the calls, unchanged where there is no call at all."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    invalid: tuple[InvalidToolCall, ...] = field(default=())


def parse_tool_calls(text: str, tool_names: Collection[str]) -> ParsedAnswer:
    """Find the tool calls in an answer.

    Understood are `<tool_call>` blocks (Hermes, Qwen, SmolLM: JSON; GLM: argument pairs; Qwen3-Coder: parameters),
    `[TOOL_CALLS]` (Mistral), `<|python_tag|>` and bare JSON (Llama 3), `<function=…>`, `<|START_ACTION|>` (Command R)
    and fenced JSON. Bare and fenced JSON are calls only where they name one of the tools: they may be the answer.

    Args:
        tool_names: tools that were offered. With none, nothing is parsed.
    """
    if not tool_names:
        return ParsedAnswer(text)
    calls: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    outside, done = [], 0
    for start, end, found in _blocks(text, tool_names):
        outside.append(text[done:start])
        done = end
        if isinstance(found, InvalidToolCall):
            invalid.append(found)
        else:
            calls.extend(found)
    if not done:
        return ParsedAnswer(text)
    outside.append(text[done:])
    return ParsedAnswer("".join(outside).rstrip(), tuple(calls), tuple(invalid))


Found = list[ToolCall] | InvalidToolCall


def _blocks(text: str, tool_names: Collection[str]) -> Iterator[tuple[int, int, Found]]:
    """`(start, end, what it holds)` of every stretch that is a tool call or claims to be one."""
    bare = _bare_calls(text, tool_names)
    if bare is not None:
        yield 0, len(text), bare
        return
    for match in _BLOCK.finditer(text):
        kind = match.lastgroup or ""
        body = match[kind]
        try:
            calls = _PARSERS[kind](body)
        except ValueError as error:
            if kind != "fenced":
                yield match.start(), match.end(), InvalidToolCall(body.strip(), str(error))
            continue
        if kind != "fenced" or all(call.name in tool_names for call in calls):
            yield match.start(), match.end(), calls


def _bare_calls(text: str, tool_names: Collection[str]) -> list[ToolCall] | None:
    """Calls of an answer that is JSON and nothing else, if all of them name known tools."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        calls = _json_calls(text)
    except ValueError:
        return None
    return calls if calls and all(call.name in tool_names for call in calls) else None


def _json_calls(text: str) -> list[ToolCall]:
    """Calls written as JSON: one object, a list of them, or objects one after the other (`;` or a space between)."""
    decoder = json.JSONDecoder(strict=False)
    calls: list[ToolCall] = []
    at = 0
    text = text.strip()
    if not text:
        raise ValueError("the call is empty")
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        calls.extend(_as_call(item) for item in (value if isinstance(value, list) else [value]))
        while at < len(text) and (text[at].isspace() or text[at] in ";,"):
            at += 1
    return calls


def _as_call(value: Any) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):  # OpenAI's wrapping
        value = {**value["function"], "id": value.get("id")}
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object with a name and arguments, got {type(value).__name__}")
    name = next((value[key] for key in _NAME_KEYS if isinstance(value.get(key), str)), None)
    if not name:
        raise ValueError("the call has no name")
    arguments: Any = next((value[key] for key in _ARGUMENT_KEYS if value.get(key) is not None), {})
    call_id = value.get("id") or value.get("tool_call_id")
    return ToolCall(name, _arguments(arguments), str(call_id) if call_id else None)


def _arguments(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = json.loads(value, strict=False) if value.strip() else {}
    if not isinstance(value, dict):
        raise ValueError(f"arguments must be a JSON object, got {type(value).__name__}")
    return value


def _tagged_calls(body: str) -> list[ToolCall]:
    if "<function=" in body:
        return _function_calls(body)
    if "<arg_key>" in body:
        name = body.partition("<arg_key>")[0].strip()
        return [ToolCall(name, {key.strip(): _scalar(value) for key, value in _ARG_PAIR.findall(body)})]
    return _json_calls(body)


def _function_calls(body: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for name, inner in _FUNCTION.findall(body):
        parameters = _PARAMETER.findall(inner)
        written: dict[str, Any] = {key: _scalar(value) for key, value in parameters}
        calls.append(ToolCall(name, written or _arguments(inner.strip())))
    if not calls:
        raise ValueError("the function tag is not complete")
    return calls


def _mistral_calls(body: str) -> list[ToolCall]:
    named = _NAMED_JSON.match(body)
    if named is None:
        return _json_calls(body)
    arguments, _ = json.JSONDecoder(strict=False).raw_decode(body, named.end())
    return [ToolCall(named[1], _arguments(arguments))]


def _scalar(text: str) -> Any:
    """A parameter written as bare text: JSON where it is JSON, else the string."""
    text = text.strip()
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return text


_PARSERS: dict[str, Callable[[str], list[ToolCall]]] = {
    "tagged": _tagged_calls,
    "mistral": _mistral_calls,
    "python_tag": _json_calls,
    "function": _function_calls,
    "action": _json_calls,
    "fenced": _json_calls,
}


class AnswerStream:
    """Lets the text of a streamed answer through and holds back what may belong to a tool call.

    What `push` returned so far, joined with what `finish` returns as text, is `parse_tool_calls(answer).text`.
    """

    def __init__(self, tool_names: Collection[str]) -> None:
        self._names = frozenset(tool_names)
        self._text = ""
        self._shown = 0

    def push(self, delta: str) -> str:
        """The part of the text so far that certainly stands outside a call."""
        self._text += delta
        return self._show(self._text[: self._safe_end()] if self._names else self._text)

    def finish(self) -> tuple[str, ParsedAnswer]:
        """The rest of the text, and the whole answer taken apart."""
        parsed = parse_tool_calls(self._text, self._names)
        return self._show(parsed.text), parsed

    def _show(self, text: str) -> str:
        delta = text[self._shown :]
        self._shown += len(delta)
        return delta

    def _safe_end(self) -> int:
        if self._text.lstrip()[:1] in ("{", "["):
            return 0
        starts = [at for marker in MARKERS if (at := self._text.find(marker)) >= 0]
        end = min(starts, default=len(self._text))
        for marker in MARKERS:
            for length in range(min(len(marker) - 1, end), 0, -1):
                if self._text.startswith(marker[:length], end - length):
                    end -= length
                    break
        return len(self._text[:end].rstrip())
