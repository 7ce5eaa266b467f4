"""What guesses tokens ahead: the prompt itself, or a smaller model. The model checks them, several in one forward."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from kvboost_rag.config import ConfigError, GenerationParams
from kvboost_rag.config.generation import DRAFTS
from kvboost_rag.models.errors import ModelLoadError
from kvboost_rag.models.load import load_model
from kvboost_rag.models.ranks import Ranks
from kvboost_rag.models.unwrap import input_device
from kvboost_rag.prompt.tokens import PromptTokens

OF_ASSISTANT = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)
"""Settings that transformers reads from the assistant's own generation config."""


class Drafting:
    """Gives requests what they draft with, checked. Thread-safe.

    Args:
        model, tokens: whose requests these are.
        defaults: of the engine, for calls that name nothing.

    Raises:
        ConfigError: the engine's own defaults cannot be used.
    """

    def __init__(self, model: PreTrainedModel, tokens: PromptTokens, defaults: GenerationParams | None = None) -> None:
        self._model, self._tokens = model, tokens
        self._loaded: dict[str, PreTrainedModel] = {}
        self._lock = threading.Lock()
        self.defaults = self.ready(defaults or GenerationParams())

    def ready(self, params: GenerationParams) -> GenerationParams:
        """The same with the assistant loaded.

        Raises:
            ConfigError: this model cannot check drafts, or not those of that assistant; the message says why.
        """
        asked = params.prompt_lookup_num_tokens or params.assistant_model is not None
        if asked and not can_check(self._model):
            raise ConfigError(
                f"{type(self._model).__name__} cannot check drafts: its state cannot go back behind a rejected token"
            )
        if params.assistant_model is None:
            return params
        return replace(params, assistant_model=self._assistant(params.assistant_model))

    def for_call(self, params: GenerationParams | None) -> GenerationParams:
        """A call's parameters, with the engine's drafts where it names none; raises as `ready`."""
        if params is None:
            return self.defaults
        if all(getattr(params, name) is None for name in DRAFTS):
            return replace(params, **{name: getattr(self.defaults, name) for name in DRAFTS})
        return self.ready(params)

    def _assistant(self, given: Any) -> PreTrainedModel:
        if isinstance(given, (str, os.PathLike)):
            return self._load(os.fspath(given))
        if not isinstance(given, torch.nn.Module) or not hasattr(given, "generate"):
            raise ConfigError(f"assistant_model={given!r}: expected a causal language model, or where to load one from")
        self._check(given, type(given).__name__)
        return given

    def _load(self, name: str) -> PreTrainedModel:
        with self._lock:
            if name not in self._loaded:
                try:
                    loaded = load_model(name, dtype=self._model.dtype)
                except ModelLoadError as error:
                    raise ConfigError(f"assistant_model={name!r}: {error}") from error
                self._check(loaded.model, name)
                if loaded.tokenizer.get_vocab() != self._tokens.tokenizer.get_vocab():
                    raise ConfigError(f"assistant_model={name!r} has another tokenizer than the model; {_SAME}")
                self._loaded[name] = loaded.model.to(input_device(self._model))
            return self._loaded[name]

    def _check(self, assistant: Any, name: str) -> None:
        """Raises ConfigError for what transformers would fail at in the middle of an answer."""
        ours, theirs = (m.config.get_text_config(decoder=True).vocab_size for m in (self._model, assistant))
        if type(assistant).__name__.startswith(_OWN_STATES):
            raise ConfigError(f"assistant_model {name} reads states of the model that are not kept here")
        if assistant is self._model:
            raise ConfigError("assistant_model is the model itself: give a smaller one, or prompt_lookup_num_tokens")
        if ours != theirs:
            raise ConfigError(f"assistant_model {name} has {theirs} tokens, the model {ours}; {_SAME}")
        if not can_check(assistant) or assistant.config.is_encoder_decoder:
            raise ConfigError(f"assistant_model {name}: only a decoder whose KV cache can be cropped guesses tokens")
        if Ranks.many(self._model):
            raise ConfigError("assistant_model: not with tensor parallel; prompt_lookup_num_tokens works there")


_OWN_STATES = ("Gemma4Assistant", "Gemma4UnifiedAssistant")
_SAME = "it must have the model's own tokenizer, or its guesses would be other words"


def can_check(model: Any) -> bool:
    """Whether a model's cache can go back behind a token, which that of a recurrent one cannot."""
    return not getattr(model, "_is_stateful", False)


def drafts_leave_nothing(config: GenerationConfig, objects: Mapping[str, Any]) -> bool:
    """Whether a rejected draft leaves nothing behind in what changes logits. The caller's own processors, the other
    half of guidance and watermarks may keep state from one token to the next.
    """
    guided = config.guidance_scale not in (None, 1)
    return not (guided or config.watermarking_config is not None or objects.get("logits_processor"))


def as_told(assistant: PreTrainedModel, config: GenerationConfig) -> PreTrainedModel:
    """An assistant with the settings of one call. It shares all but these with the assistant, which others may be
    using in the meantime; transformers writes into them how long its guesses should be.
    """
    told = copy.copy(assistant)
    told.generation_config = copy.deepcopy(assistant.generation_config) or GenerationConfig()
    given = {name: getattr(config, name) for name in OF_ASSISTANT}
    told.generation_config.update(**{name: value for name, value in given.items() if value is not None})
    return told
