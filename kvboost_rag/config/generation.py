"""Parameters of decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvboost_rag.config.checks import ConfigError, check_range, check_whole, is_list

DRAFTS = ("prompt_lookup_num_tokens", "assistant_model")
"""Fields of `GenerationParams` that say what guesses tokens ahead."""


@dataclass(frozen=True)
class GenerationParams:
    """Parameters of decoding; unset ones take the model's generation config. Names are those of transformers.

    Attributes:
        max_new_tokens: default 256.
        stop: strings at whose first occurrence the text ends; they are not part of it.
        stop_token_ids: tokens that end the answer, besides the model's own.
        prompt_lookup_num_tokens: so many tokens that followed the same words in the prompt are guessed and checked in
            one forward; 0: none, whatever the engine says.
        assistant_model: a smaller model that guesses tokens ahead: loaded, or what `load_model` takes. Instead of
            prompt lookup. Either one named in a call stands for both of the engine's.
        extra: further keyword arguments for `generate` (for example `no_repeat_ngram_size`, `logits_processor`).
    """

    max_new_tokens: int = 256
    do_sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    prompt_lookup_num_tokens: int | None = None
    assistant_model: Any = field(default=None, repr=False)
    extra: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens!r}: expected a whole number, 1 or more")
        check_range("temperature", self.temperature, 0.0, None)
        check_range("top_p", self.top_p, 0.0, 1.0)
        check_range("repetition_penalty", self.repetition_penalty, 0.0, None)
        if self.repetition_penalty == 0:
            raise ConfigError("repetition_penalty=0: expected a number above 0; 1 is no penalty")
        check_whole("top_k", self.top_k, 0, None)
        check_whole("seed", self.seed, -(2**63), 2**63 - 1)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, what in (("stop", "non-empty strings"), ("stop_token_ids", "token ids")):
            if not is_list(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected {what}")
            object.__setattr__(self, name, tuple(getattr(self, name)))  # once: it may be a generator
        if not all(isinstance(s, str) and s for s in self.stop):
            raise ConfigError(f"stop={self.stop!r}: expected non-empty strings")
        for token in self.stop_token_ids:
            check_whole("stop_token_ids", token, 0, None)
        if self.extra is not None and not isinstance(self.extra, Mapping):
            raise ConfigError(f"extra={self.extra!r}: expected keyword arguments of `generate` by name")
        self._check_drafts()

    def _check_drafts(self) -> None:
        """What guesses ahead is a field of its own, also where it was given among other keywords."""
        extra = dict(self.extra or {})
        for name in DRAFTS:
            given = extra.pop(name, None)
            if given is not None and getattr(self, name) is None:
                object.__setattr__(self, name, given)
        if self.extra is not None and len(extra) < len(self.extra):
            object.__setattr__(self, "extra", extra or None)
        check_whole("prompt_lookup_num_tokens", self.prompt_lookup_num_tokens, 0, None)
        if self.prompt_lookup_num_tokens and self.assistant_model is not None:
            raise ConfigError("prompt_lookup_num_tokens and assistant_model are alternatives; set one of them")
