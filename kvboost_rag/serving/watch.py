"""What an answer becomes while it is decoded: text, and a reason to end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria

from kvboost_rag.prompt.detokenize import Detokenizer, StopMatcher
from kvboost_rag.prompt.tokens import PromptTokens


@dataclass(frozen=True)
class Decoded:
    """A finished answer.

    Attributes:
        finish_reason: `stop` (end token or stop string), `length` or `cancelled`.
        accepted_tokens: of `token_ids`, those that were guessed ahead and that the model agreed with.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Endings:
    """What ends an answer.

    Attributes:
        stop: strings at whose first occurrence the text ends.
        token_ids: tokens that end it.
        criteria: the caller's own stopping criteria.
        cancelled: set when nobody waits any more.
    """

    stop: tuple[str, ...]
    token_ids: frozenset[int]
    criteria: tuple[Any, ...]
    cancelled: threading.Event


class Watch(StoppingCriteria):  # type: ignore[misc]
    """Sees every new token: turns it into text, and says when to stop.

    Several may come at once, as drafts do. Each is looked at as if it had come alone; what stands after the one that
    ends the answer is no part of it.

    Args:
        prompt_tokens: length of the prompt.
        on_text: gets each piece of text as soon as no stop string can begin in it.
        on_token: called after each token.
    """

    def __init__(
        self,
        tokens: PromptTokens,
        endings: Endings,
        prompt_tokens: int,
        on_text: Callable[[str], None],
        on_token: Callable[[], None],
    ) -> None:
        self._text = Detokenizer(tokens)
        self._stops = StopMatcher(endings.stop)
        self._endings = endings
        self._seen = prompt_tokens
        self._on_text, self._on_token = on_text, on_token
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._reason: str | None = None
        self._is_over = False
        self._num_forwards = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._num_forwards += not self._is_over
        while not self._is_over and self._seen < input_ids.shape[1]:
            self._seen += 1
            until = input_ids[:, : self._seen]
            self._accept(int(until[0, -1]))
            # All of them, whoever says so first: a criterion may count its calls.
            ended = [bool(torch.as_tensor(c(until, scores, **kwargs)).all()) for c in self._endings.criteria]
            self._is_over = self._reason is not None or any(ended)
        return torch.full((1,), self._is_over, device=input_ids.device)

    def _accept(self, token: int) -> None:
        self._token_ids.append(token)
        if token in self._endings.token_ids:
            self._reason = "stop"
        else:
            self._emit(self._stops.push(self._text.push(token)))
            if self._stops.matched:
                self._reason = "stop"
        self._on_token()
        if self._reason is None and self._endings.cancelled.is_set():
            self._reason = "cancelled"

    def _emit(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._on_text(text)

    def finish(self, max_new_tokens: int) -> Decoded:
        """Release what was held back and say how it ended."""
        self._emit(self._stops.push(self._text.flush()))
        self._emit(self._stops.flush())
        # Whoever ended it early without our saying so was a stopping criterion of the caller.
        unsaid = "length" if len(self._token_ids) >= max_new_tokens else "stop"
        reason = "stop" if self._stops.matched else self._reason or unsaid
        accepted = len(self._token_ids) - self._num_forwards
        return Decoded("".join(self._pieces), tuple(self._token_ids), reason, accepted)
