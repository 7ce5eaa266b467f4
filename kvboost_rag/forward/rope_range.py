"""Up to which prompt length the angles of a model's RoPE depend on the position alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvboost_rag.forward.not_reusable import NotReusable
from kvboost_rag.kv.rope import RotarySource, Rotation

PROBED_POSITIONS = 23
"""Their angles are compared."""


def context_lengths(model: PreTrainedModel) -> list[int]:
    """Lengths at which a model may change its RoPE: its context length, and the one before it was extended."""
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_type = (p for p in parameters.values() if isinstance(p, dict))
    key = "original_max_position_embeddings"
    before = (p.get(key) for p in (parameters, *per_layer_type))
    lengths = (getattr(config, "max_position_embeddings", None), getattr(config, key, None), *before)
    return sorted({int(n) for n in lengths if n} or {4096}, reverse=True)


def constant_range(model: PreTrainedModel, rotations: Sequence[Rotation | None]) -> int | None:
    """Up to which length the angles of a position do not depend on the length of the prompt; None = any length."""
    sources = {id(r.source): r.source for r in rotations if r is not None}.values()
    lengths = context_lengths(model)
    if all(_constant_up_to(source, 4 * lengths[0]) for source in sources):
        return None
    for limit in lengths:
        if all(_constant_up_to(source, limit) for source in sources):
            return limit
    raise NotReusable("its RoPE changes with the length of the prompt")


def _constant_up_to(source: RotarySource, limit: int) -> bool:
    device = next((b.device for b in source.module.buffers()), torch.device("cpu"))
    first = torch.arange(PROBED_POSITIONS, device=device)
    far = torch.cat([first, torch.tensor([limit - 1], device=device)])
    try:
        short, long = source.tables(first), source.tables(far)
    except (IndexError, ValueError):  # a table of fixed length
        return False
    constant = all(torch.equal(a, b[: len(first)]) for a, b in zip(short, long, strict=True))
    source.tables(first)  # modules that remember a length go back to the short one
    return constant
