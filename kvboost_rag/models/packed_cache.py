"""The caches of several requests as one, for a forward over one new token of each (see `forward.packed_forward`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvboost_rag.models.hf_cache import BufferCache, LayerKV


class PackedCache(Cache):
    """Takes one row of each request to that request's own buffer. No padding: each keeps its own length.

    Args:
        caches: of the requests, in the order of the rows.

    Attributes:
        positions: of the rows, int64 `[num_requests]`.
    """

    def __init__(self, caches: Sequence[BufferCache]) -> None:
        super().__init__(layers=[_PackedLayer(self, i) for i in range(len(caches[0].layers))])
        self.caches = caches
        self.positions = torch.tensor([cache.buffer.length for cache in caches])
        self.in_layers = False
        self._visible: list[LayerKV] = []

    @property
    def visible_length(self) -> int:
        """Keys of the longest request, its new row included."""
        return int(self.positions.max()) + 1

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append a layer's rows, `[1, num_kv_heads, num_requests, head_dim]`, each to its request."""
        self.in_layers = True
        self._visible = [
            cache.write(index, keys[:, :, i : i + 1], values[:, :, i : i + 1]) for i, cache in enumerate(self.caches)
        ]

    def visible(self) -> list[LayerKV]:
        """What each request's row may see in the layer written last, `[1, num_kv_heads, kv_len, head_dim]`."""
        return self._visible

    def lengths(self) -> int | torch.Tensor:
        """In layers, what makes `arange(num_rows)` + length the rows' positions (as `BufferCache.length_for`)."""
        if not self.in_layers:
            return self.visible_length - 1
        return self.positions - torch.arange(len(self.positions))


class _PackedLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, owner: PackedCache, index: int) -> None:
        super().__init__()
        self._owner, self._index = owner, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The buffers are allocated already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._owner.write(self._index, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.visible_length, 0

    def get_seq_length(self) -> int | torch.Tensor:
        return self._owner.lengths()

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise NotImplementedError("a batch of requests has no beams")
