"""Slow, obvious ways to get at a model's KV."""

from __future__ import annotations

from typing import Any

import torch

from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.kv.buffer import KVLayout
from kvboost_rag.models import hf_cache


@torch.no_grad()
def plain_forward(model: Any, ids: torch.Tensor, start: int = 0) -> tuple[torch.Tensor, list[hf_cache.LayerKV]]:
    """Logits `[seq_len, vocab_size]` and KV of every layer, by one ordinary forward at positions `start…`."""
    cache = hf_cache.full_length_cache()
    positions = torch.arange(start, start + len(ids))[None]
    output = model(
        input_ids=ids[None], position_ids=positions, use_cache=True, **{hf_cache.cache_argument(model): cache}
    )
    return output.logits[0], hf_cache.layers_of(cache)


def kv_at(model: Any, layout: KVLayout, ids: torch.Tensor, start: int) -> ChunkKV:
    """KV of `ids` at positions `start…`, keys rotated to them."""
    keys, values = hf_cache.split_batch(plain_forward(model, ids, start)[1], 0, 0, len(ids))
    return layout.stack(keys, values)
