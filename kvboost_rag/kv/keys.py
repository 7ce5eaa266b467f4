"""The only hash function of the project, the dual hash of chunks and the fingerprint of a model.

SHA-256 over length-prefixed, domain-tagged fields, so that no two different lists of fields give the same bytes
(a public fault elsewhere: an adapter's name that collided with a cache salt).
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvboost_rag.datamodels import ChunkRecord

ROOT_HASH = "0" * 64
"""Preceding hash of a prompt's first block."""


def hash_fields(domain: str, *fields: bytes) -> str:
    """SHA-256 hex digest of `fields` under the tag `domain`; each field is preceded by its length (8 bytes)."""
    digest = hashlib.sha256()
    for part in (domain.encode(), *fields):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Little-endian int64, the same on every platform."""
    ids = array("q", token_ids)
    if ids.itemsize != 8:  # pragma: no cover - no such platform is supported by torch
        raise RuntimeError("array('q') is not 64 bits wide on this platform")
    return ids.tobytes()


def content_hash(fingerprint: str, namespace: str, token_ids: Sequence[int]) -> str:
    """Identifies token ids whatever stands before them, for one model and one namespace."""
    return hash_fields("content", fingerprint.encode(), namespace.encode(), token_bytes(token_ids))


def prefix_hash(fingerprint: str, namespace: str, preceding: str, token_ids: Sequence[int]) -> str:
    """Identifies token ids *and* all that precedes them: chains the hash of the preceding block (or `ROOT_HASH`)."""
    return hash_fields("prefix", fingerprint.encode(), namespace.encode(), preceding.encode(), token_bytes(token_ids))


def context_hash(token_ids: Sequence[int]) -> str:
    """Identifies an encoding context by its token ids."""
    return hash_fields("context", token_bytes(token_ids))


def encoding_context(record: ChunkRecord, neighbour_tokens: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Token ids in front of a chunk while it is encoded; `neighbour_tokens` are those of `record.neighbours`.

    The separator makes a chunk begin as it does in a prompt, after a blank line instead of in mid-sentence: with four
    neighbours it halves the KL to full prefill (`benchmarks/evidence.py`).
    """
    behind = (i for ids in neighbour_tokens for i in (*ids, *record.separator_ids))
    return (*record.anchor_ids, *behind)


def model_fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Identifies everything that a chunk's KV depends on besides its tokens.

    Weights (every tensor's name, shape, dtype, and a sample of its bytes with both ends, so that a 7B model costs
    milliseconds), config including RoPE parameters, dtype, adapters and the tokenizer's vocabulary and template.

    Weights are sampled, not read whole: 4 KiB at 16 places a tensor. Weights that differ only between the samples
    of every tensor would collide; training, merging or quantising changes nearly every value.
    """
    return hash_fields(
        "model",
        _weights_digest(model).encode(),
        _config_bytes(model),
        str(model.dtype).encode(),
        _adapter_bytes(model),
        _tokenizer_bytes(tokenizer),
    )


def weights_fingerprint(model: PreTrainedModel) -> str:
    """As `model_fingerprint`, whatever tokenizer goes with the model."""
    return hash_fields("weights and config", _weights_digest(model).encode(), _config_bytes(model))


def parameters_fingerprint(module: Any) -> str:
    """Identifies a network's parameters whatever they are called, sampled as those of a language model are."""
    described = ((str(tuple(t.shape)), str(t.dtype), _sample(t)) for t in module.parameters())
    return hash_fields(
        "parameters", *sorted(hash_fields("parameter", s.encode(), d.encode(), raw).encode() for s, d, raw in described)
    )


def _weights_digest(model: PreTrainedModel) -> str:

    fields: list[bytes] = []
    tensors: Iterable[tuple[str, torch.Tensor]] = (*model.named_parameters(), *model.named_buffers())
    for name, tensor in tensors:
        fields += [name.encode(), str(tuple(tensor.shape)).encode(), str(tensor.dtype).encode(), _sample(tensor)]
    return hash_fields("weights", *fields)


def _sample(tensor: torch.Tensor) -> bytes:
    """4 KiB at 16 places of a tensor, both ends among them."""
    import torch

    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // 16)
    width = max(1, 4096 // max(1, flat.element_size()))
    starts = sorted({*range(0, flat.numel(), step), max(0, flat.numel() - width)})
    sample = torch.cat([flat[s : s + width] for s in starts]) if starts else flat
    return sample.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def _config_bytes(model: PreTrainedModel) -> bytes:
    # Paths, versions and kernel choices do not change what the model computes beyond rounding.
    skip = {"_name_or_path", "transformers_version", "_attn_implementation", "attn_implementation", "use_cache"}
    config: dict[str, Any] = {k: v for k, v in model.config.to_dict().items() if k not in skip}
    return json.dumps(config, sort_keys=True, default=str).encode()


def _adapter_bytes(model: PreTrainedModel) -> bytes:
    configs = getattr(model, "peft_config", None) or {}
    active = getattr(model, "active_adapter", None)
    if callable(active):  # transformers' PEFT mixin offers a method of this name
        active = None
    described = {name: str(config) for name, config in dict(configs).items()}
    return json.dumps({"adapters": described, "active": str(active)}, sort_keys=True).encode()


def _tokenizer_bytes(tokenizer: PreTrainedTokenizerBase) -> bytes:
    vocab = hash_fields("vocab", *(f"{token}\0{i}".encode() for token, i in sorted(tokenizer.get_vocab().items())))
    template = json.dumps(tokenizer.chat_template, sort_keys=True, default=str)
    return json.dumps([vocab, template, tokenizer.bos_token_id, tokenizer.eos_token_id]).encode()
