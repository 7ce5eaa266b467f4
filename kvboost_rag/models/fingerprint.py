"""Identifies everything that a chunk's KV depends on besides its tokens."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

from torch import nn

from kvboost_rag.kv.keys import hash_fields
from kvboost_rag.models.adapters import adapter_layers, layer_state
from kvboost_rag.models.digest import NamedTensors, WeightDigests
from kvboost_rag.models.tensors import named_tensors, packing

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

UNKNOWN = "unknown weights "
"""Begins the fingerprint of a model whose weights cannot be read: it is nobody's but that of one engine."""


def model_fingerprint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, digests: WeightDigests | None = None
) -> str:
    """Weights (every byte of every tensor, adapters that are not active left out), active adapters with their scaling,
    config including RoPE parameters, dtype, and the tokenizer's vocabulary and template.

    Args:
        digests: those already known; without them everything is read.

    Raises:
        UnreadableWeights: a weight lies where it cannot be read.
    """
    return hash_fields("model", *_model_fields(model, digests), _tokenizer_bytes(tokenizer))


def weights_fingerprint(model: PreTrainedModel) -> str:
    """As `model_fingerprint`, whatever tokenizer goes with the model."""
    return hash_fields("weights and config", *_model_fields(model, None))


def parameters_fingerprint(module: nn.Module) -> str:
    """Identifies a network's parameters whatever they are called."""
    digests = WeightDigests().of([("", parameter) for parameter in module.parameters()])
    return hash_fields("parameters", *sorted(digests))


def unknown_fingerprint() -> str:
    """For a model whose weights cannot be read: shared with nothing, so that nothing is reused by mistake."""
    return UNKNOWN + uuid.uuid4().hex


def _model_fields(model: PreTrainedModel, digests: WeightDigests | None) -> tuple[bytes, ...]:
    tensors = list(named_tensors(model))
    return (
        _weights_digest(tensors, digests or WeightDigests()).encode(),
        json.dumps(sorted(packing(model))).encode(),
        _config_bytes(model),
        str(model.dtype).encode(),
        _adapter_bytes(model),
    )


def _weights_digest(tensors: NamedTensors, digests: WeightDigests) -> str:
    pairs = sorted((name, digest.hex()) for (name, _), digest in zip(tensors, digests.of(tensors), strict=True))
    return hash_fields("weights", *(f"{name} {digest}".encode() for name, digest in pairs))


def _config_bytes(model: PreTrainedModel) -> bytes:
    # Paths, versions and kernel choices do not change what the model computes beyond rounding.
    skip = {"_name_or_path", "transformers_version", "_attn_implementation", "attn_implementation", "use_cache"}
    config: dict[str, Any] = {k: v for k, v in model.config.to_dict().items() if k not in skip}
    return json.dumps(config, sort_keys=True, default=str).encode()


def _adapter_bytes(model: nn.Module) -> bytes:
    """Active adapters by their place in the order, not by name, with their numbers; nothing where none is active."""
    states = []
    for index, layer in enumerate(adapter_layers(model)):
        active, numbers, merged = layer_state(layer)
        if active and not merged:
            states.append((index, type(layer).__qualname__, len(active), numbers))
        elif merged:  # their weights are among the layer's own
            states.append((index, "merged", len(merged), ()))
    return json.dumps(states).encode()


def _tokenizer_bytes(tokenizer: PreTrainedTokenizerBase) -> bytes:
    vocab = hash_fields("vocab", *(f"{token}\0{i}".encode() for token, i in sorted(tokenizer.get_vocab().items())))
    template = json.dumps(tokenizer.chat_template, sort_keys=True, default=str)
    return json.dumps([vocab, template, tokenizer.bos_token_id, tokenizer.eos_token_id]).encode()
