"""Generation keywords as people write them for transformers and other model classes -> `GenerationParams`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from kvboost_rag.config import GenerationParams

ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "stopping_ids": "stop_token_ids",
}
OBJECTS = ("stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn")
"""Arguments of `generate` that are no settings of its config."""

_ALREADY_SO = {
    "return_full_text": False,
    "skip_prompt": True,
    "skip_special_tokens": True,
    "clean_up_tokenization_spaces": False,
    "return_dict_in_generate": False,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "return_tensors": False,
    "use_cache": True,
    "num_beams": 1,
    "num_return_sequences": 1,
    "early_stopping": False,
}
"""What always holds here: a keyword that asks for it is fulfilled, one that asks for something else is warned about
(beams and several answers are refused by the decoder)."""
_WITHOUT_MEANING = ("pad_token_id", "batch_size", "padding", "truncation", "tokenizer")
CLIENT_OPTIONS = ("timeout", "max_retries", "api_key", "base_url", "organization")
"""Options of classes that call a server. Warned about and left out: the model runs in this process."""
_INSTEAD = {
    "max_length": "it counts the prompt too; use max_new_tokens",
    "streamer": "use the model's stream method",
    **dict.fromkeys(CLIENT_OPTIONS, "the model runs in this process"),
}
_BOOKKEEPING = ("transformers_version", "_from_model_config", "bos_token_id", "decoder_start_token_id")


def merge_params(base: GenerationParams, given: Mapping[str, Any]) -> GenerationParams:
    """`base` with the keywords of a call on top.

    A positive temperature without `do_sample` means sampling, a temperature of 0 means greedy decoding. None leaves
    a parameter as it is. Names that neither we nor transformers' `GenerationConfig` know are warned about and left out.

    Args:
        given: names of `GenerationParams`, of transformers' `generate`, of pipelines (`return_full_text`) or of other
            model classes (`max_tokens`, `stop_sequences`); `generation_config` may hold a whole config.

    Raises:
        ConfigError: a value that cannot be used.
    """
    changes: dict[str, Any] = {}
    extra = dict(base.extra or {})
    own = {f.name for f in fields(GenerationParams)} - {"extra"}
    for name, value in _flat(given).items():
        name = ALIASES.get(name, name)
        if name in own:
            changes[name] = _as_tuple(value) if name in ("stop", "stop_token_ids") else value
        elif name in OBJECTS or _is_setting(name, value):
            extra[name] = value
    if "do_sample" not in changes and "temperature" in changes:
        changes["do_sample"] = changes["temperature"] > 0
    return replace(base, **changes, extra=extra or None)


def check_params(given: Mapping[str, Any]) -> None:
    """Look at the values of `GenerationParams` among keywords; what transformers would have to be asked about waits.

    Raises:
        ConfigError: a value that cannot be used.
    """
    own = {f.name for f in fields(GenerationParams)} - {"extra"}
    merge_params(GenerationParams(), {k: v for k, v in _flat(given).items() if ALIASES.get(k, k) in own})


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords that are set, those inside `generation_config` and `extra` among them (an own keyword beats them)."""
    flat: dict[str, Any] = {}
    config = given.get("generation_config")
    if config is not None:
        held = config if isinstance(config, Mapping) else config.to_diff_dict()
        flat |= {name: value for name, value in held.items() if name not in _BOOKKEEPING}
    flat |= given.get("extra") or {}
    flat |= {name: value for name, value in given.items() if name not in ("generation_config", "extra")}
    return {name: value for name, value in flat.items() if value is not None}


def _is_setting(name: str, value: Any) -> bool:
    """Whether the keyword goes to `generate`; warns about those that can do nothing."""
    if name in _WITHOUT_MEANING:
        return False
    if name in _ALREADY_SO and name not in ("num_beams", "num_return_sequences"):
        if value != _ALREADY_SO[name]:
            _warn(name, f"it is always {_ALREADY_SO[name]} here")
        return False
    if name in _INSTEAD:
        _warn(name, _INSTEAD[name])
        return False
    from transformers import GenerationConfig

    known = hasattr(GenerationConfig(), name)
    if not known:
        _warn(name, "transformers' GenerationConfig has no such parameter")
    return known


def _warn(name: str, why: str) -> None:
    warnings.warn(f"{name} is ignored: {why}", UserWarning, stacklevel=5)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, (str, int)) else tuple(value)
