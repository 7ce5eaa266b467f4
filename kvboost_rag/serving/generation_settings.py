"""Every field of transformers' `GenerationConfig`: handed on, decided here, or not to be had, and then said so.

A field stands in exactly one of the three tables, which a test compares with the installed transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from kvboost_rag.config import ConfigError, GenerationParams
from kvboost_rag.serving.drafting import OF_ASSISTANT, as_told, can_check, drafts_leave_nothing
from kvboost_rag.serving.limits import context_tokens

HONOURED = frozenset(
    (
        *("min_length", "min_new_tokens", "max_time", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
        *("epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "renormalize_logits", "forced_bos_token_id"),
        *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
        *("begin_suppress_tokens", "sequence_bias", "guidance_scale", "watermarking_config"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", *OF_ASSISTANT),
    )
)
"""Handed to transformers as they are, from the model's own config or from a call."""

DECIDED = frozenset(
    (
        *("max_new_tokens", "max_length", "do_sample", "eos_token_id", "pad_token_id", "stop_strings"),
        # nobody sees what they would give
        *("return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        # means nothing to a decoder-only model with a prompt, without beams, with one tokenizer
        *("bos_token_id", "decoder_start_token_id", "early_stopping", "length_penalty", "diversity_penalty"),
        *("assistant_lookbehind", "target_lookbehind", "cache_config", "max_cache_len", "compile_config"),
        *("disable_compile", "low_memory"),
        *("continuous_batching_config", "transformers_version", "_from_model_config"),
    )
)
"""Set by `GenerationParams` or without meaning here: a value changes nothing that is promised."""

OWN_CACHE = "the answer is always decoded with the cache that the prompt was assembled in"
ONE_ANSWER = "one answer a call and no beam search"
NO_STRATEGY = "only greedy decoding and sampling go on from an assembled cache"
OTHER_DRAFTS = "tokens are guessed ahead by the prompt (prompt_lookup_num_tokens) or by an assistant_model"
UNAVAILABLE: dict[str, tuple[Any, str]] = {
    "use_cache": (True, OWN_CACHE),
    "cache_implementation": (None, OWN_CACHE),
    "prefill_chunk_size": (None, OWN_CACHE),
    "num_beams": (1, ONE_ANSWER),
    "num_beam_groups": (None, ONE_ANSWER),
    "num_return_sequences": (1, ONE_ANSWER),
    "constraints": (None, NO_STRATEGY),
    "force_words_ids": (None, NO_STRATEGY),
    "penalty_alpha": (None, NO_STRATEGY),
    "dola_layers": (None, NO_STRATEGY),
    "use_mtp": (None, OTHER_DRAFTS),
    "is_assistant": (None, OTHER_DRAFTS),
    "speculation_type": (None, OTHER_DRAFTS),
    "assistant_ensemble_weight": (None, "only the model decides about guessed tokens"),
    "assistant_early_exit": (None, OTHER_DRAFTS),
    "token_healing": (None, "the prompt's tokens are those of the tokenizer on its text"),
}
"""The value that always holds, and why: another one in a model's config is replaced, in a call refused."""


@dataclass(frozen=True)
class CallSettings:
    """What one call of `generate` is made with.

    Attributes:
        config: for transformers.
        stop: strings that end the answer.
        objects: arguments of `generate` beside its config: processors, a function, an assistant.
        criteria: the caller's own.
    """

    config: GenerationConfig
    stop: tuple[str, ...]
    objects: dict[str, Any]
    criteria: tuple[Any, ...]

    @property
    def drafts(self) -> bool:
        """Whether tokens are guessed ahead."""
        return "assistant_model" in self.objects or self.config.prompt_lookup_num_tokens is not None


def replaced_settings(config: GenerationConfig | None) -> list[str]:
    """What a model's own generation config asks for and does not get, one line each: `num_beams=4: …`."""
    asked = {name: getattr(config, name, None) for name in UNAVAILABLE}
    return [f"{name}={value!r}: {why}" for name, (value, why) in _others(asked).items()]


def call_settings(
    model: PreTrainedModel, params: GenerationParams, end_ids: Sequence[int], length: int = 0
) -> CallSettings:
    """The settings of a call: the model's generation config with those of the call on top.

    Args:
        end_ids: tokens that end the answer.
        length: of prompt and answer, in tokens; an assistant whose context is shorter is left out.

    Raises:
        ConfigError: a parameter that nobody knows, or that is not to be had here.
    """
    extra = dict(params.extra or {})
    objects: dict[str, Any] = {
        name: extra.pop(name) for name in ("logits_processor", "prefix_allowed_tokens_fn") if name in extra
    }
    criteria = tuple(extra.pop("stopping_criteria", None) or ())
    config = copy.deepcopy(model.generation_config) if model.generation_config is not None else GenerationConfig()
    _check(config, extra)
    stop = (*params.stop, *_strings(extra.pop("stop_strings", None)), *_strings(config.stop_strings))
    settings = {name: value for name, (value, _) in UNAVAILABLE.items() if hasattr(config, name)}
    given = {k: v for k, v in extra.items() if k not in UNAVAILABLE}
    config.update(**settings | _decided(config, params, end_ids) | given)
    objects |= _drafts(model, config, params, objects, length)
    return CallSettings(config, tuple(dict.fromkeys(stop)), objects, criteria)


@contextmanager
def only_these(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """While the context is open a model has no generation config but this: `generate` fills what is None in the one it
    is given from the model's.
    """
    before = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = before


def _check(config: GenerationConfig, extra: Mapping[str, Any]) -> None:
    if refused := _others(extra):
        raise ConfigError("; ".join(f"{name}={value!r}: {why}" for name, (value, why) in refused.items()))
    if unknown := sorted(name for name in extra if not hasattr(config, name)):
        raise ConfigError(f"unknown generation parameter {', '.join(unknown)}")


def _others(asked: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Settings that ask for something else than what always holds, with the reason."""
    found = {}
    for name, (value, why) in UNAVAILABLE.items():
        given = asked.get(name)
        if given is not None and given != value and not (name in NOTHING and given in NOTHING[name]):
            found[name] = (given, why)
    return found


NOTHING: dict[str, tuple[Any, ...]] = {
    "use_mtp": (False,),
    "is_assistant": (False,),
    "token_healing": (False,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0, 0.0),
    "cache_implementation": ("dynamic",),
}
"""Values that ask for nothing special."""


def _drafts(
    model: PreTrainedModel, config: GenerationConfig, params: GenerationParams, objects: dict[str, Any], length: int
) -> dict[str, Any]:
    """What guesses tokens ahead, if anything: set in the config, or an argument for `generate`."""
    lookup, assistant = params.prompt_lookup_num_tokens, params.assistant_model
    if lookup is None and assistant is None:
        lookup = config.prompt_lookup_num_tokens
    if not can_check(model) or not drafts_leave_nothing(config, objects):
        lookup = assistant = None
    config.prompt_lookup_num_tokens = lookup or None
    room = assistant is not None and (context_tokens(assistant) or length) >= length
    return {"assistant_model": as_told(assistant, config)} if room else {}


def _decided(config: GenerationConfig, params: GenerationParams, end_ids: Sequence[int]) -> dict[str, Any]:
    """What `GenerationParams` and the model's end tokens come to."""
    settings: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "max_length": None,
        "do_sample": params.do_sample and params.temperature != 0,
        "return_dict_in_generate": False,
        "eos_token_id": list(end_ids) or None,
        "pad_token_id": config.pad_token_id if config.pad_token_id is not None else next(iter(end_ids), 0),
        "stop_strings": None,
        "max_cache_len": None,
        "cache_config": None,
    }
    sampling = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "repetition_penalty": params.repetition_penalty,
    }
    settings |= {name: value for name, value in sampling.items() if value is not None}
    if not settings["do_sample"]:
        settings |= {"temperature": None, "top_p": None, "top_k": None}
    return settings


def _strings(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())
