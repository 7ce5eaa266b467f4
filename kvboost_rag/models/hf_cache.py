"""The only file that touches transformers' cache classes, but for `packed_cache`.

Three things: a cache that keeps every position (to read chunk KV out of a forward), a cache over a `KVBuffer` (for
partial forwards and for decoding without a copy), and the name of the forward argument that takes a cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvboost_rag.kv.buffer import KVBuffer

LayerKV = tuple[torch.Tensor, torch.Tensor]

_OUTPUT_CACHE = "cache" if "cache" in {f.name for f in fields(CausalLMOutputWithPast)} else "past_key_values"
"""What transformers calls it: since 5.24 `cache`."""


def cache_argument(model: nn.Module) -> str:
    """`cache` (transformers ≥ 5.24) or `past_key_values`.

    Raises:
        ValueError: the model's forward takes no cache.
    """
    names = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise ValueError(f"{type(model).__name__}.forward takes no KV cache")


def kv_module(model: PreTrainedModel) -> nn.Module:
    """The part of the model that computes keys and values and stops before the logits (on a CPU in bfloat16 a large
    vocabulary costs more than the layers); the model itself where it has no such part.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model:
        return model
    names = inspect.signature(decoder.forward).parameters
    same_names = cache_argument(model) in names and "position_ids" in names and "input_ids" in names
    return decoder if same_names else model


def output_cache(output: Any) -> Any:
    """The cache in a model output, under either name."""
    cache = getattr(output, "cache", None)
    return cache if cache is not None else getattr(output, "past_key_values", None)


def causal_output(logits: torch.Tensor, cache: Any) -> CausalLMOutputWithPast:
    """What a model's forward returns, for logits `[batch_size, num_rows, vocab_size]`."""
    caches: dict[str, Any] = {_OUTPUT_CACHE: cache}
    return CausalLMOutputWithPast(logits=logits, **caches)


def full_length_cache() -> DynamicCache:
    """An empty cache that keeps all positions of every layer.

    Built without a config: with one, transformers makes sliding-window layers that forget positions. The window is
    still applied, by the mask.
    """
    return DynamicCache()


def layers_of(cache: Cache | None) -> list[LayerKV]:
    """Keys and values of every layer, `[batch_size, num_kv_heads, seq_len, head_dim]`.

    Raises:
        ValueError: a layer holds no keys and values (recurrent or linear attention, or KV shared between layers).
    """
    if cache is None:
        raise ValueError("its forward gives back no KV cache, as that of an encoder")
    result: list[LayerKV] = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or keys.shape[2] == 0:
            raise ValueError(f"layer {index} keeps no keys and values")
        result.append((keys, values))
    return result


class KVObserver(Protocol):
    """Sees fresh keys and values of a partial forward before they replace the assembled ones."""

    def on_kv(self, layer: int, fresh: LayerKV, stored: LayerKV) -> None:
        """`fresh` and `stored`: keys and values of the rows of this pass, `[1, num_kv_heads, num_rows, head_dim]`."""


class BufferLayer(CacheLayerMixin):
    """One layer of a `BufferCache`."""

    is_sliding = False
    is_croppable = True

    def __init__(self, owner: BufferCache, index: int) -> None:
        super().__init__()
        self.owner = owner
        self.index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The buffer is allocated already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.owner.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.visible_length(query_length), 0

    def get_seq_length(self) -> int | torch.Tensor:
        return self.owner.length_for(self.index)

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise NotImplementedError("beam search needs a copy of the cache per beam; use num_beams=1")


class BufferCache(Cache):
    """A transformers cache over a `KVBuffer`, without a copy.

    Two modes. *Appending* (as in decoding): new rows go after `buffer.length`. *Row* mode, between `begin_rows`
    and `end_rows`: fresh K and V are scattered to the given positions and attention gets the whole prompt.
    Sliding-window layers keep all positions here too; their window is in the mask that transformers builds.
    """

    def __init__(self, buffer: KVBuffer) -> None:
        super().__init__(layers=[BufferLayer(self, i) for i in range(buffer.layout.num_layers)])
        self.buffer = buffer
        self.rows_per_layer: list[int] = [0] * buffer.layout.num_layers
        self._observer: KVObserver | None = None
        self._rows: torch.Tensor | None = None
        self._row_length = 0
        self._in_layers = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` positions, such as those of a draft that was rejected; a positive number
        is the length that is left (what older transformers ask for).
        """
        left = self.buffer.length + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        self.buffer.length = min(self.buffer.length, left)

    @property
    def in_row_pass(self) -> bool:
        """Between `begin_rows` and `end_rows`."""
        return self._rows is not None

    @property
    def num_rows(self) -> int:
        """Rows that the partial forward computes now; 0 outside of one."""
        return 0 if self._rows is None else len(self._rows)

    def length_for(self, index: int) -> int | torch.Tensor:
        """How many positions stand in front of those that are being computed.

        A layer that asks in row mode counts its rows' positions itself, as `arange(num_rows)` + length (Llama 4, to
        scale queries). It is given a length for each row, `[num_rows]`, that makes the sum the row's position.
        """
        if self._rows is None or not self._in_layers:
            return self.buffer.length
        rows = self._rows.to(self.buffer.layer(index)[0].device)
        return rows - torch.arange(len(rows), device=rows.device)

    def visible_length(self, query_length: int) -> int:
        return self._row_length if self._rows is not None else self.buffer.length + query_length

    def begin_rows(self, rows: torch.Tensor, prompt_length: int, observer: KVObserver | None = None) -> None:
        """Scatter the next forward's KV to positions `rows` (`[num_rows]`, ascending) of a prompt of that length."""
        self._rows, self._row_length, self._observer = rows, prompt_length, observer
        self._in_layers = False
        self.rows_per_layer = [0] * len(self.layers)

    def enter_layers(self) -> None:
        """The next to ask are decoder layers, no longer the model around them."""
        self._in_layers = True

    def narrow_rows(self, rows: torch.Tensor) -> None:
        """From the next layer on, only these rows come."""
        self._rows = rows

    def count_rows(self, num_rows: int) -> None:
        """Rows of the same plan that went through the layers in forwards of their own."""
        self.rows_per_layer = [n + num_rows if n else 0 for n in self.rows_per_layer]

    def end_rows(self) -> None:
        """Back to appending."""
        self._rows, self._observer = None, None

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put one layer's fresh keys and values where they belong; returns all that attention may see."""
        ordered = self.buffer.layout.ordered
        put = self._append if self._rows is None else self._scatter
        return ordered(index, put(index, *ordered(index, (keys, values))))

    def _scatter(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerKV:
        assert self._rows is not None
        own_keys, own_values = self.buffer.layer(index)
        rows = self._rows.to(own_keys.device)
        if keys.shape[2] != len(rows):
            raise RuntimeError(f"layer {index} computed {keys.shape[2]} rows where {len(rows)} were expected")
        if self._observer is not None:
            stored = own_keys.index_select(2, rows), own_values.index_select(2, rows)
            self._observer.on_kv(index, (keys, values), stored)
        own_keys.index_copy_(2, rows, keys)
        own_values.index_copy_(2, rows, values)
        self.rows_per_layer[index] = len(rows)
        return own_keys[:, :, : self._row_length], own_values[:, :, : self._row_length]

    def _append(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerKV:
        start, end = self.buffer.length, self.buffer.length + keys.shape[2]
        if end > self.buffer.capacity:
            self.buffer.grow(max(end, self.buffer.capacity + self.buffer.capacity // 2))
        own_keys, own_values = self.buffer.layer(index)
        own_keys[:, :, start:end].copy_(keys)
        own_values[:, :, start:end].copy_(values)
        if index == len(self.layers) - 1:
            self.buffer.length = end
        return own_keys[:, :, :end], own_values[:, :, :end]


def split_batch(layers: Sequence[LayerKV], item: int, start: int, end: int) -> tuple[list[torch.Tensor], ...]:
    """Keys and values of one batch item's positions `[start, end)`, each `[num_kv_heads, end - start, head_dim]`."""
    return [k[item, :, start:end] for k, _ in layers], [v[item, :, start:end] for _, v in layers]
