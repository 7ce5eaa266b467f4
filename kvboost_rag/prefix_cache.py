"""The exact path: KV of true full-context forwards, stored in blocks under chained prefix hashes.

Blocks are computed one a forward, cold or warm, so that a prompt of which some blocks were found runs the very same
forwards for the others as one of which none was: bit-equal, not only close.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_rag import quantization
from kvboost_rag.chunk_keys import ROOT_HASH, prefix_hash
from kvboost_rag.datamodels import ChunkKV, EntryCheck, StoreEntry
from kvboost_rag.models.hf_cache import BufferCache, cache_argument, kv_module
from kvboost_rag.stores.base import Store


class PrefixCache:
    """Finds and fills the exact beginning of a prompt, block by block.

    Args:
        block_tokens: tokens a block; only whole blocks are found again in a longer prompt.
    """

    def __init__(self, store: Store, model: PreTrainedModel, fingerprint: str, block_tokens: int = 128) -> None:
        self.store = store
        self.model = model
        self.fingerprint = fingerprint
        self.block_tokens = block_tokens
        self._module = kv_module(model)

    def blocks(self, token_ids: Sequence[int], namespace: str) -> list[tuple[str, str, tuple[int, ...]]]:
        """(prefix hash, preceding hash, token ids) of every block; the last one may be shorter."""
        result, preceding = [], ROOT_HASH
        for start in range(0, len(token_ids), self.block_tokens):
            ids = tuple(token_ids[start : start + self.block_tokens])
            key = prefix_hash(self.fingerprint, namespace, preceding, ids)
            result.append((key, preceding, ids))
            preceding = key
        return result

    def load(self, cache: BufferCache, token_ids: Sequence[int], namespace: str) -> int:
        """Place the longest stored beginning of `token_ids` into the cache's buffer; returns its length in tokens."""
        buffer = cache.buffer
        buffer.length = 0
        for key, preceding, ids in self.blocks(token_ids, namespace):
            if key not in self.store:
                break
            entry = self.store.get(key, EntryCheck(namespace, self.fingerprint, ids, preceding))
            if entry is None:
                break
            buffer.place(quantization.decode(entry.tensors, entry.meta), buffer.length)
            buffer.length += len(ids)
        return buffer.length

    def fill(self, cache: BufferCache, token_ids: Sequence[int], namespace: str) -> int:
        """Compute the blocks behind `buffer.length` and store them; returns the number of tokens computed.

        `token_ids` is what was given to `load`.
        """
        buffer, start = cache.buffer, cache.buffer.length
        for key, preceding, ids in self.blocks(token_ids, namespace)[-(-start // self.block_tokens) :]:
            self._forward(cache, ids)
            kv = buffer.read(buffer.length - len(ids), buffer.length)
            self._put(key, preceding, ids, namespace, kv)
        return buffer.length - start

    def _put(self, key: str, preceding: str, ids: tuple[int, ...], namespace: str, kv: ChunkKV) -> None:
        # Never quantised: an exact hit must give the bits that the forward gave.
        tensors, meta = quantization.encode(kv)
        self.store.put(StoreEntry(key, namespace, self.fingerprint, ids, preceding, tensors, meta))

    @torch.no_grad()
    def _forward(self, cache: BufferCache, ids: tuple[int, ...]) -> None:
        device = self.model.get_input_embeddings().weight.device
        start = cache.buffer.length
        kwargs: dict[str, Any] = {cache_argument(self.model): cache}
        positions = torch.arange(start, start + len(ids), device=device)[None]
        self._module(input_ids=torch.tensor([ids], device=device), position_ids=positions, use_cache=True, **kwargs)
