"""A chunk's KV after several encoding contexts, combined into one.

What a chunk's KV owes to one context is peculiar to that context; the prompt it will stand in is another draw. The mean
over several is nearer to it, at no cost when it is used. How much each context counts may be fitted for a model, for
each layer, KV head, and keys and values apart (`measure.calibrate.contexts`); else the plain mean is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.kv.buffer import KVLayout
from kvboost_rag.kv.keys import hash_fields

PLAIN = "mean"
"""What a catalog calls the plain mean."""

Table = tuple[tuple[tuple[float, ...], ...], ...]
"""`[num_layers][num_kv_heads][num_parts]`."""


@dataclass(frozen=True)
class ContextWeights:
    """How much the KV after each context counts in the mixture of a model's chunks.

    The first part is the chunk after the anchor alone, the others are its contexts in order.

    Attributes:
        keys, values: `[num_layers][num_kv_heads][1 + num_contexts]`.

    Raises:
        ValueError: tables of another form, or numbers that are not finite.
    """

    keys: Table
    values: Table

    def __post_init__(self) -> None:
        for name in ("keys", "values"):
            table = tuple(tuple(tuple(map(float, parts)) for parts in heads) for heads in getattr(self, name))
            object.__setattr__(self, name, table)
            widths = {len(parts) for heads in table for parts in heads}
            if len(widths) != 1 or min(widths) < 2 or not all(abs(w) < 1e3 for h in table for p in h for w in p):
                raise ValueError(f"weights of {name}: expected finite numbers, [layers][heads][1 + contexts]")
        if len(self.keys) != len(self.values):
            raise ValueError(f"weights for {len(self.keys)} layers of keys and {len(self.values)} of values")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ContextWeights:
        """The inverse of `dataclasses.asdict`."""
        return cls(given["keys"], given["values"])

    @property
    def num_contexts(self) -> int:
        return len(self.keys[0][0]) - 1

    @property
    def needs_alone(self) -> bool:
        """Whether the chunk must be encoded after the anchor alone as well."""
        return any(parts[0] != 0 for table in (self.keys, self.values) for heads in table for parts in heads)

    @cached_property
    def digest(self) -> str:
        """Identifies the weights."""
        return hash_fields("context weights", json.dumps([self.keys, self.values]).encode())


def combine(
    parts: Sequence[ChunkKV], layout: KVLayout, shares: Sequence[float], weights: ContextWeights | None
) -> ChunkKV:
    """One KV out of several of the same tokens: float32 arithmetic in a fixed order, rounded once.

    Args:
        parts: position-free KV after each context; with weights that ask for it, after the anchor alone first.
        shares: without weights, how much each part counts, in any unit.
        weights: per layer, KV head and kind.
    """
    if weights is not None:
        keys = [_weighted(layout, [p.keys for p in parts], weights.keys, i) for i in range(len(layout.groups))]
        values = [_weighted(layout, [p.values for p in parts], weights.values, i) for i in range(len(layout.groups))]
        return ChunkKV(tuple(keys), tuple(values))
    total = float(sum(shares))
    factors = [torch.tensor(share / total) for share in shares]
    return ChunkKV(
        tuple(_sum([p.keys[i] for p in parts], factors) for i in range(len(layout.groups))),
        tuple(_sum([p.values[i] for p in parts], factors) for i in range(len(layout.groups))),
    )


def _weighted(layout: KVLayout, parts: Sequence[tuple[torch.Tensor, ...]], table: Table, group: int) -> torch.Tensor:
    layers, tensors = layout.groups[group].layers, [part[group] for part in parts]
    factors = torch.tensor([table[layer] for layer in layers])  # [num_layers_in_group, num_kv_heads, 1 + num_contexts]
    used = factors[..., -len(parts) :, None, None].to(tensors[0].device)  # without the first where it counts nothing
    return _sum(tensors, list(used.unbind(2)))


def _sum(tensors: Sequence[torch.Tensor], factors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(tensors[0], dtype=torch.float32)
    for tensor, factor in zip(tensors, factors, strict=True):
        total += tensor.float() * factor
    return total.to(tensors[0].dtype)
