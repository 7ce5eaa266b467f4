"""What of a conversation was said before: up to the last answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvboost_rag.chunks.lookup import Messages, locate
from kvboost_rag.chunks.registry import ChunkRegistry
from kvboost_rag.serving.requests import Request

MERGING_TOKENS = 2
"""Tokens at the end of a turn that may become others when the conversation goes on."""


class Transcript(str):
    """A prompt of plain text that goes on after what was said before, as in a session.

    Attributes:
        said: how many characters were said before.
    """

    __slots__ = ("said",)
    said: int

    def __new__(cls, text: str, said: int) -> Transcript:
        """`text` with what was said before."""
        made = super().__new__(cls, text)
        made.said = said
        return made


def has_past(prompt: str | Messages) -> bool:
    """Whether something was said before: a text says so itself, messages by an answer among them."""
    return getattr(prompt, "said", 0) > 0 if isinstance(prompt, str) else bool(past(prompt))


def past(prompt: str | Messages) -> Sequence[Mapping[str, Any]]:
    """Messages up to and with the last of the assistant; none of them for a first turn, or for text."""
    if isinstance(prompt, str):
        return ()
    answers = [i for i, message in enumerate(prompt) if message.get("role") == "assistant"]
    return prompt[: answers[-1] + 1] if answers else ()


def with_answer(request: Request, text: str) -> Request:
    """The same conversation with its answer: what the next turn begins with."""
    if isinstance(request.prompt, str):
        return replace(request, prompt=request.prompt + text)
    prompt = [*request.prompt, {"role": "assistant", "content": text}]
    return replace(request, prompt=prompt, template=request.template | {"add_generation_prompt": False})


def token_ids(registry: ChunkRegistry, request: Request) -> tuple[int, ...]:
    """Of a request's prompt, as serving it would have them.

    Raises:
        ValueError: the chat template refuses the messages.
    """
    config = request.config
    return locate(registry, request.prompt, request.documents, config.namespace, None, request.template).token_ids


def past_tokens(registry: ChunkRegistry, request: Request, ids: Sequence[int]) -> int:
    """How many of a prompt's `ids` were there before its last answer ended; 0 for a first turn."""
    if not has_past(request.prompt):
        return 0
    if isinstance(request.prompt, Transcript):
        before = replace(request, prompt=str(request.prompt)[: request.prompt.said])
    else:
        template = request.template | {"add_generation_prompt": False}
        before = replace(request, prompt=past(request.prompt), template=template)
    try:
        earlier = token_ids(registry, before)
    except ValueError:  # a template that wants a user to speak last
        return 0
    return common_beginning(earlier, ids)


def common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading ids two prompts share."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
