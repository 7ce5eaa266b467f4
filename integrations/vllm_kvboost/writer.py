"""The worker's side: a prompt's KV put together and written into vLLM's blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvboost_rag.datamodels import ChunkKV, StoreEntry
from kvboost_rag.kv import quantization
from kvboost_rag.kv.assemble import PlacedChunk
from kvboost_rag.kv.buffer import KVBuffer
from vllm_kvboost.heads import PromptHeads
from vllm_kvboost.metadata import Load
from vllm_kvboost.reference import Reference
from vllm_kvboost.source import ChunkSource

logger = logging.getLogger(__name__)

HEAD_BYTES = 64 << 20
"""Kept KV of prompts' heads."""


@dataclass(frozen=True)
class Heads:
    """The KV heads that one rank holds: `[first, first + count)` of the model's."""

    first: int
    count: int

    @classmethod
    def of(cls, num_kv_heads: int, rank: int, world_size: int) -> Heads:
        """Heads of a rank; where there are more ranks than heads, several ranks hold the same one."""
        if num_kv_heads >= world_size:
            count = num_kv_heads // world_size
            return cls(rank * count, count)
        return cls(rank * num_kv_heads // world_size, 1)


class Writer:
    """Writes loads into the caches of one rank's attention layers.

    What lies between the chunks (separators, titles) and the ids at their edges that the tokenizer merged otherwise has
    no stored KV: it is computed here, in one forward over those rows with the assembled prompt visible, as the engine
    does for text between documents. The prompt's head is computed once for all prompts that begin alike. vLLM itself
    computes what comes after the last chunk.
    """

    def __init__(self, source: ChunkSource, reference: Reference, block_size: int, rank: tuple[int, int]) -> None:
        self._source, self._reference, self.block_size = source, reference, block_size
        self._rank = rank
        self.heads = PromptHeads(reference, HEAD_BYTES)

    @torch.inference_mode()
    def load(self, load: Load, layers: Mapping[int, Any]) -> int:
        """Write one load into the layers' caches.

        Args:
            layers: vLLM's attention layers by decoder layer index.

        Returns:
            Number of tokens between chunks that had to be computed.

        Raises:
            KeyError: a chunk is not in the store any more.
            Exception: anything else that went wrong; no block may be believed then.
        """
        entries = self._source.entries(run.key for run in load.runs)
        buffer = self._reference.buffers.take(load.end)
        try:
            num_computed = self.assemble(load, entries, buffer)
            for index, layer in layers.items():
                self._write(load, buffer, index, layer)
        finally:
            self._reference.buffers.give_back(buffer)
        return num_computed

    @torch.inference_mode()
    def assemble(self, load: Load, entries: Mapping[str, StoreEntry], buffer: KVBuffer) -> int:
        """Fill `[load.start, load.end)` of the buffer, and before it what gaps in there can see.

        Returns:
            Number of tokens that were computed.
        """
        computed_before = self.heads.num_computed
        head = load.runs[0].start if load.runs else load.end
        covered = {i for run in load.runs for i in range(run.start, run.end)}
        rows = [i for i in range(head, load.end) if i not in covered]
        visible_from = 0 if rows and rows[-1] >= load.start else load.start
        placed = []
        if head > visible_from:
            placed.append(PlacedChunk(self.heads.get(load.token_ids[:head]), 0))
        for run in load.runs:
            length = min(run.end, load.end) - run.start
            if run.end > visible_from and length > 0:
                kv = quantization.decode(entries[run.key].tensors, entries[run.key].meta)
                placed.append(PlacedChunk(_span(kv, run.chunk_start, run.chunk_start + length), run.start))
        self._reference.place(buffer, placed)
        if not (rows and visible_from == 0):
            return self.heads.num_computed - computed_before
        self._reference.compute(buffer, load.token_ids, rows)
        return self.heads.num_computed - computed_before + len(rows)

    def _write(self, load: Load, buffer: KVBuffer, index: int, layer: Any) -> None:
        """One layer's `[load.start, load.end)`, by the method with which its backend writes what it computes itself.

        The cache is never indexed: backends pack it as they like, and quantise it with the layer's scales.
        """
        cache = layer.kv_cache
        keys, values = buffer.layout.ordered(index, buffer.layer(index))
        heads = Heads.of(keys.shape[1], *self._rank)
        # [num_kv_heads, num_tokens, head_dim] -> [num_tokens, num_kv_heads, head_dim]
        fresh = [
            side[0, heads.first : heads.first + heads.count, load.start : load.end]
            .transpose(0, 1)
            .contiguous()
            .to(cache.device)
            for side in (keys, values)
        ]
        layer.impl.do_kv_cache_update(layer, *fresh, cache, self._slots(load).to(cache.device))

    def _slots(self, load: Load) -> torch.Tensor:
        """Where each position lies in the paged cache, int64 `[num_tokens]`."""
        positions = torch.arange(load.start, load.end)
        blocks = torch.tensor(load.block_ids, dtype=torch.int64)
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size


def _span(kv: ChunkKV, start: int, end: int) -> ChunkKV:
    return ChunkKV(tuple(k[:, :, start:end] for k in kv.keys), tuple(v[:, :, start:end] for v in kv.values))
