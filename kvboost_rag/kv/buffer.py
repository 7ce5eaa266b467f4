"""The shape of a model's KV and the prompt-long buffer that a prompt is assembled in. Plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.kv.huge_pages import ask_for_huge_pages
from kvboost_rag.kv.rope import Rotation

POOL_STEP = 256
"""Capacities of pooled buffers are multiples of this."""


@dataclass(frozen=True)
class LayerGroup:
    """Decoder layers whose KV can be stacked: same shape, device and rotation.

    Attributes:
        layers: layer indices, ascending.
        rotation: how keys are rotated, or None for layers without rotation.
        exchanged: the model hands its cache what is rotated as values and the rest as keys (latent attention of
            DeepSeek and its kin caches the compressed KV first, then the one rotated key that all heads share). What we
            call keys is always what is rotated.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    device: torch.device
    rotation: Rotation | None
    exchanged: bool = False


@dataclass(frozen=True)
class KVLayout:
    """Shape of the KV of a whole model."""

    groups: tuple[LayerGroup, ...]
    dtype: torch.dtype

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        per_layer = (len(g.layers) * g.num_kv_heads * (g.key_head_dim + g.value_head_dim) for g in self.groups)
        return sum(per_layer) * self.dtype.itemsize

    @cached_property
    def _exchanged(self) -> frozenset[int]:
        return frozenset(layer for group in self.groups if group.exchanged for layer in group.layers)

    def ordered(self, layer: int, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Our keys and values from those of the model's cache at one layer, or the other way round."""
        return (pair[1], pair[0]) if layer in self._exchanged else pair

    def stack(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> ChunkKV:
        """Per-layer tensors `[num_kv_heads, seq_len, head_dim]` of the model's cache, stacked into groups (copies)."""
        layers = [self.ordered(i, pair) for i, pair in enumerate(zip(keys, values, strict=True))]
        return ChunkKV(
            keys=tuple(torch.stack([layers[i][0] for i in g.layers]) for g in self.groups),
            values=tuple(torch.stack([layers[i][1] for i in g.layers]) for g in self.groups),
        )


class KVBuffer:
    """Room for the KV of one prompt and its answer: one allocation a layer group, filled in place.

    `keys[group]` is `[num_layers_in_group, num_kv_heads, capacity, key_head_dim]`, rotated to prompt positions.
    The first `length` positions are what the next forward may attend to. Not thread-safe; belongs to one call.
    """

    def __init__(self, layout: KVLayout, capacity: int) -> None:
        self.layout = layout
        self.capacity = capacity
        self.length = 0
        self.keys = [self._allocate(g, g.key_head_dim) for g in layout.groups]
        self.values = [self._allocate(g, g.value_head_dim) for g in layout.groups]
        self._slots = {layer: (i, j) for i, g in enumerate(layout.groups) for j, layer in enumerate(g.layers)}

    def _allocate(self, group: LayerGroup, head_dim: int) -> torch.Tensor:
        shape = (len(group.layers), group.num_kv_heads, self.capacity, head_dim)
        tensor = torch.empty(shape, dtype=self.layout.dtype, device=group.device)
        ask_for_huge_pages(tensor)
        return tensor

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer's keys and values, `[1, num_kv_heads, capacity, head_dim]`."""
        group, slot = self._slots[index]
        return self.keys[group][slot].unsqueeze(0), self.values[group][slot].unsqueeze(0)

    def place(self, kv: ChunkKV, start: int) -> None:
        """Copy KV that is already at its positions to `[start, start + seq_len)`."""
        end = start + kv.seq_len
        for mine, theirs in zip((*self.keys, *self.values), (*kv.keys, *kv.values), strict=True):
            mine[:, :, start:end].copy_(theirs)

    def read(self, start: int, end: int) -> ChunkKV:
        """A copy of `[start, end)`, keys at their positions."""
        return ChunkKV(
            keys=tuple(k[:, :, start:end].clone() for k in self.keys),
            values=tuple(v[:, :, start:end].clone() for v in self.values),
        )

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` positions (copies; decoding beyond what was asked for at the start)."""
        old_keys, old_values = self.keys, self.values
        self.capacity = capacity
        self.keys = [self._allocate(g, g.key_head_dim) for g in self.layout.groups]
        self.values = [self._allocate(g, g.value_head_dim) for g in self.layout.groups]
        for new, old in zip((*self.keys, *self.values), (*old_keys, *old_values), strict=True):
            new[:, :, : old.shape[2]].copy_(old)


class BufferPool:
    """Keeps the buffer of one request for the next one on a CPU, where a fresh allocation is paid for page by page.

    (A fifth of the time to first token with `none`; on an accelerator torch's allocator keeps memory itself.) At most
    one buffer is kept, and none that is more than twice as long as what was asked for last. Not thread-safe.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self._kept: KVBuffer | None = None

    def take(self, capacity: int) -> KVBuffer:
        """An empty buffer for at least `capacity` positions; what it holds is undefined."""
        kept, self._kept = self._kept, None
        if kept is None or not capacity <= kept.capacity <= 2 * capacity + POOL_STEP:
            return KVBuffer(self.layout, -(-capacity // POOL_STEP) * POOL_STEP)
        kept.length = 0
        return kept

    def give_back(self, buffer: KVBuffer) -> None:
        """Called when nobody uses the buffer any more."""
        if all(group.device.type == "cpu" for group in self.layout.groups):
            self._kept = buffer
