"""A conversation: each turn is answered from what the turns before it left."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, Protocol

from kvboost_rag.chunks.lookup import Messages
from kvboost_rag.datamodels import GenerationResult, StreamEvent
from kvboost_rag.serving.history import Transcript


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
        messages: what was said before, such as a system message; a text for a conversation of plain text, without
            a chat template, in which each message and answer follow as they are.
        options: of `KVBoost.stream`, for every turn.

    Attributes:
        messages: the conversation so far, answers included. May be changed between turns (trimmed, summarised): what
            still matches from the beginning is used.
        text: the same for a conversation of plain text, else None.
    """

    def __init__(self, stream: Callable[..., Events], messages: Messages | str = (), **options: Any) -> None:
        self._stream = stream
        self._options = {"settle": True} | options
        self.text = messages if isinstance(messages, str) else None
        self.messages: list[Mapping[str, Any]] = [] if isinstance(messages, str) else list(messages)

    def stream(self, message: str | Mapping[str, Any], **options: Any) -> Generator[StreamEvent, None, None]:
        """Say something and get the answer piece by piece; the last event carries the result.

        Message and answer become part of the conversation when the answer is whole.

        Args:
            message: what the user says, or any message (`{"role": "tool", …}`).
            options: of `KVBoost.stream`, for this turn.

        Raises:
            TypeError: a message that is no text, in a conversation of plain text.
        """
        prompt, keep = self._turn(message)
        with closing(self._stream(prompt, **(self._options | options))) as events:
            for event in events:
                if event.result is not None:
                    keep(event.result.text)
                yield event

    def _turn(self, message: str | Mapping[str, Any]) -> tuple[str | Messages, Callable[[str], None]]:
        """The prompt that a message makes, and what takes its answer."""
        if self.text is not None:
            if not isinstance(message, str):
                raise TypeError(f"a conversation of plain text goes on with text, not with {type(message).__name__}")
            prompt = Transcript(self.text + message, said=len(self.text))

            def keep_text(answer: str) -> None:
                self.text = prompt + answer

            return prompt, keep_text
        said = {"role": "user", "content": message} if isinstance(message, str) else message

        def keep_messages(answer: str) -> None:
            self.messages += [said, {"role": "assistant", "content": answer}]

        return [*self.messages, said], keep_messages

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
