"""Which tools a call offers to a local model, and whether it must use one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def is_forced(choice: Any) -> bool:
    """Whether a choice asks for a call (`any`, `required`, a tool's name), in whatever form it is written."""
    if isinstance(choice, Mapping):
        choice = (choice.get("function") or choice).get("name") or choice.get("type")
    return choice not in (None, "auto", "none", True, False)


def chosen_tools(tools: Sequence[Mapping[str, Any]], choice: Any) -> list[Mapping[str, Any]]:
    """The tools to offer: none for the choice `none`, one for a name, else all.

    Args:
        tools: in OpenAI's form.
        choice: a word, a truth value or a mapping, as OpenAI and Anthropic write it.

    Raises:
        ValueError: a tool that is no function, or the named tool is not among them.
    """
    for tool in tools:
        if not (isinstance(tool.get("function"), Mapping) and tool["function"].get("name")):
            raise ValueError(
                f"tool of type {tool.get('type')!r}: only functions can be offered to a model of this process, "
                "other tools run on the servers of a provider"
            )
    if isinstance(choice, Mapping):
        choice = (choice.get("function") or choice).get("name") or choice.get("type")
    if choice in (None, "auto", "any", "required", True):
        return list(tools)
    if choice in ("none", False):
        return []
    named = [tool for tool in tools if tool["function"]["name"] == choice]
    if not named:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        raise ValueError(f"tool_choice={choice!r} is not among the tools offered: {names}")
    return named
