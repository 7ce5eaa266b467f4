"""Differences between encoding contexts, scaled by what the recomputed rows say, added to the rows that are not.

Tried and left out of the package: see `docs/fidelity.md`. A chunk's KV behind one context, minus that behind another,
is a direction; at every layer coefficients are fitted per KV head and chunk by ridge regression on the rows that the
pass computes anyway, and the chunk's other rows are moved before that layer's attention reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.kv.buffer import KVBuffer, KVLayout
from kvboost_rag.kv.realign import PositionTables, realign_into
from kvboost_rag.models.hf_cache import LayerKV
from kvboost_rag.repair import QueryRepair, RepairContext, RepairPlan, RepairStrategy

RIDGE_TOKENS = 20.0
"""Coefficients are held at 0 as if so many tokens of the chunk said so."""

Parts = Sequence[ChunkKV]
"""A chunk's position-free KV behind each of its contexts."""


@dataclass(frozen=True)
class Placed:
    """One document of the prompt: its rows, and directions at its positions, of a model with one layer group.

    Attributes:
        keys, values: `[num_layers, num_kv_heads, seq_len, head_dim]` each.
    """

    start: int
    end: int
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class CompensatedRepair(RepairStrategy):
    """`query`, over the mean of each chunk's parts, with the differences between parts fitted on the chosen rows.

    Attributes:
        parts_of: KV of the chunk with these token ids behind each context.
        used: how many of the parts the kept KV is the mean of.
        directions: pairs of parts; their difference is a direction. None: nothing is moved.
    """

    name: ClassVar[str] = "compensated"
    parts_of: Callable[[tuple[int, ...]], Parts]
    used: int = 2
    directions: tuple[tuple[int, int], ...] = ()

    def plan(self, context: RepairContext) -> RepairPlan:
        layout = context.buffer.layout
        tables, ids = PositionTables.of(layout, len(context.token_ids)), context.token_ids.tolist()
        placed = []
        for start, end in context.documents:
            parts = self.parts_of(tuple(ids[start:end]))
            realign_into(context.buffer, mean(parts[: self.used]), start, tables)
            placed.append(self._placed(parts, layout, start, tables))
        plan = QueryRepair().plan(context)
        if not self.directions:
            return plan
        mover = _Mover(context.buffer, plan.row_plan.rows, placed)
        return replace(plan, row_plan=replace(plan.row_plan, observer=mover))

    def _placed(self, parts: Parts, layout: KVLayout, start: int, tables: PositionTables) -> Placed:
        keys, values, length = [], [], parts[0].seq_len
        for one, other in self.directions:
            difference = minus(parts[one], parts[other])
            turned = KVBuffer(layout, length)  # rotation is linear: of a difference it is the difference of the rotated
            span = PositionTables(tuple(_from(t, start, length) for t in tables.per_group), length)
            realign_into(turned, difference, 0, span)
            keys.append(turned.keys[0])
            values.append(turned.values[0])
        return Placed(start, start + length, tuple(keys), tuple(values))


class _Mover:
    """Observer: fits and moves at every layer, before the layer's attention."""

    def __init__(self, buffer: KVBuffer, rows: torch.Tensor, placed: Sequence[Placed]) -> None:
        self.buffer, self.rows, self.placed = buffer, rows, placed

    def on_kv(self, layer: int, fresh: LayerKV, stored: LayerKV) -> None:
        for own, new, old, kind in zip(self.buffer.layer(layer), fresh, stored, ("keys", "values"), strict=True):
            for document in self.placed:
                inside = (self.rows >= document.start) & (self.rows < document.end)
                directions = torch.stack([part[layer] for part in getattr(document, kind)])
                missing = new[0][:, inside] - old[0][:, inside]
                factors = fitted(directions, self.rows[inside] - document.start, missing)
                own[0][:, document.start : document.end] += torch.einsum("hm,mhnd->hnd", factors, directions)

    def wants_attention(self, layer: int) -> bool:
        return False


def fitted(directions: torch.Tensor, rows: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
    """Coefficients `[num_kv_heads, num_directions]` of a ridge regression towards 0.

    Args:
        directions: `[num_directions, num_kv_heads, seq_len, dim]`.
        rows: those of the chunk that were computed, `[num_rows]`.
        missing: fresh minus stored there, `[num_kv_heads, num_rows, dim]`.
    """
    given = directions[:, :, rows].permute(1, 2, 3, 0).flatten(1, 2)
    energy = directions.square().sum(-1).mean(-1).mean(0)  # of a token, [num_kv_heads]
    ridge = (RIDGE_TOKENS * energy + 1e-6)[:, None, None] * torch.eye(len(directions))
    squares = given.transpose(1, 2) @ given + ridge
    return torch.linalg.solve(squares, given.transpose(1, 2) @ missing.flatten(1)[..., None])[..., 0]


def mean(parts: Parts) -> ChunkKV:
    return ChunkKV(
        tuple(torch.stack([p.keys[i] for p in parts]).mean(0) for i in range(len(parts[0].keys))),
        tuple(torch.stack([p.values[i] for p in parts]).mean(0) for i in range(len(parts[0].values))),
    )


def minus(one: ChunkKV, other: ChunkKV) -> ChunkKV:
    return ChunkKV(
        tuple(a - b for a, b in zip(one.keys, other.keys, strict=True)),
        tuple(a - b for a, b in zip(one.values, other.values, strict=True)),
    )


def _from(tables: tuple[torch.Tensor, torch.Tensor] | None, start: int, length: int) -> tuple | None:
    return None if tables is None else (tables[0][start : start + length], tables[1][start : start + length])
