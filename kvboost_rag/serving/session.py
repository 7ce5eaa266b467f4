"""A conversation: each turn is answered from what the turns before it left."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, Protocol

from kvboost_rag.chunks.lookup import Messages
from kvboost_rag.datamodels import GenerationResult, StreamEvent


class Events(Protocol):
    """Events of one answer, such as a `Stream` or a generator."""

    def __iter__(self) -> Iterator[StreamEvent]: ...

    def close(self) -> None: ...


class Session:
    """Keeps the messages of one conversation and settles its turns (see `ReuseConfig.settle`).

    It holds nothing but the messages: the same messages given to `KVBoost.generate` with `settle=True` find the same
    KV. Not thread-safe: a conversation has one turn at a time.

    Args:
        stream: `KVBoost.stream`.
        messages: what was said before, such as a system message.
        options: of `KVBoost.stream`, for every turn.

    Attributes:
        messages: the conversation so far, answers included. May be changed between turns (trimmed, summarised): what
            still matches from the beginning is used.
    """

    def __init__(self, stream: Callable[..., Events], messages: Messages = (), **options: Any) -> None:
        self._stream = stream
        self._options = {"settle": True} | options
        self.messages: list[Mapping[str, Any]] = list(messages)

    def stream(self, message: str | Mapping[str, Any], **options: Any) -> Generator[StreamEvent, None, None]:
        """Say something and get the answer piece by piece; the last event carries the result.

        Message and answer become part of the conversation when the answer is whole.

        Args:
            message: what the user says, or any message (`{"role": "tool", …}`).
            options: of `KVBoost.stream`, for this turn.
        """
        said = {"role": "user", "content": message} if isinstance(message, str) else message
        with closing(self._stream([*self.messages, said], **(self._options | options))) as events:
            for event in events:
                if event.result is not None:
                    self.messages += [said, {"role": "assistant", "content": event.result.text}]
                yield event

    def generate(self, message: str | Mapping[str, Any], **options: Any) -> GenerationResult:
        """Say something and get the whole answer."""
        return whole(self.stream(message, **options))


def whole(events: Events) -> GenerationResult:
    """The result that a stream of events ends with."""
    result = None
    with closing(events):  # Ctrl-C here stops the generation as well
        for event in events:
            result = event.result
    if result is None:
        raise RuntimeError("the request ended without a result")
    return result
