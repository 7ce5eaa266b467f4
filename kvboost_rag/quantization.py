"""Codecs between chunk KV and the tensors that a store keeps."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvboost_rag.datamodels import ChunkKV


def encode(kv: ChunkKV) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and meta strings for a `StoreEntry`; codec `none` keeps the model's dtype."""
    tensors = {f"keys.{i}": t for i, t in enumerate(kv.keys)} | {f"values.{i}": t for i, t in enumerate(kv.values)}
    return tensors, {"codec": "none"}


def decode(tensors: Mapping[str, torch.Tensor], meta: Mapping[str, str]) -> ChunkKV:
    """Chunk KV from what `encode` returned.

    Raises:
        ValueError: the payload was written by a codec that this version does not know.
    """
    if meta.get("codec") != "none":
        raise ValueError(f"unknown codec {meta.get('codec')!r}")
    groups = range(sum(name.startswith("keys.") for name in tensors))
    return ChunkKV(tuple(tensors[f"keys.{i}"] for i in groups), tuple(tensors[f"values.{i}"] for i in groups))
