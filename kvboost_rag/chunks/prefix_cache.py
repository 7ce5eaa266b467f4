"""The exact path: KV of true full-context forwards, stored in blocks under chained prefix hashes.

Blocks are computed one a forward, cold or warm, so that a prompt of which some blocks were found runs the very same
forwards for the others as one of which none was: bit-equal, not only close. Each is a partial forward over the block's
rows: with the model's own attention the mask over what stands in front would cost more than the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from kvboost_rag.datamodels import ChunkKV, EntryCheck, StoreEntry
from kvboost_rag.forward.row_forward import RowPlan, observe_rows
from kvboost_rag.kv import quantization
from kvboost_rag.kv.keys import ROOT_HASH, prefix_hash
from kvboost_rag.models.hf_cache import BufferCache
from kvboost_rag.models.ranks import Ranks
from kvboost_rag.models.unwrap import input_device
from kvboost_rag.stores.base import Store
from kvboost_rag.stores.heads import WHOLE, Heads

FIRST_BLOCK_TOKENS = 64


class PrefixCache:
    """Finds and fills the exact beginning of a prompt, block by block.

    Args:
        heads, ranks: as in `ChunkFetcher`.
        block_tokens: tokens a block; only whole blocks are found again in a longer prompt. The first ones are shorter
            (64, 64, 128, …), so that short prompts have some too; long ones make fewer forwards.
    """

    def __init__(
        self,
        store: Store,
        model: PreTrainedModel,
        fingerprint: str,
        block_tokens: int = 256,
        heads: Heads = WHOLE,
        ranks: Ranks | None = None,
    ) -> None:
        self.store = store
        self.heads = heads
        self.ranks = ranks or Ranks()
        self.model = model
        self.fingerprint = fingerprint
        self.block_tokens = block_tokens

    def blocks(self, token_ids: Sequence[int], namespace: str, cut: int = 0) -> list[tuple[str, str, tuple[int, ...]]]:
        """(prefix hash, preceding hash, token ids) of every block; the last one may be shorter.

        Args:
            cut: where one block is to end, and all that follows is the last one; 0: nowhere.
        """
        result, preceding, start = [], ROOT_HASH, 0
        cut = cut or len(token_ids)
        for end in (*self._ends(cut), cut, len(token_ids)):
            if end == start:
                continue
            ids, start = tuple(token_ids[start:end]), end
            key = prefix_hash(self.fingerprint, namespace, preceding, ids)
            result.append((key, preceding, ids))
            preceding = key
        return result

    def whole(self, num_tokens: int) -> int:
        """How many of so many tokens lie in whole blocks."""
        return max(self._ends(num_tokens), default=0)

    def _ends(self, num_tokens: int) -> list[int]:
        """Where whole blocks end."""
        ends, end, size = [], 0, min(FIRST_BLOCK_TOKENS, self.block_tokens)
        while end + size <= num_tokens:
            end += size
            ends.append(end)
            size = min(self.block_tokens, max(size, end))
        return ends

    def load(self, cache: BufferCache, token_ids: Sequence[int], namespace: str, cut: int = 0) -> int:
        """Place the longest stored beginning of `token_ids` into the cache's buffer; returns its length in tokens."""
        buffer = cache.buffer
        buffer.length = 0
        for key, preceding, ids in self.blocks(token_ids, namespace, cut):
            if not self.heads.holds(self.store, key):
                break
            entry = self.heads.get(self.store, key, EntryCheck(namespace, self.fingerprint, ids, preceding))
            if entry is None:
                break
            buffer.place(quantization.decode(entry.tensors, entry.meta), buffer.length)
            buffer.length += len(ids)
        buffer.length = self.ranks.smallest("prefix", buffer.length)
        return buffer.length

    def fill(self, cache: BufferCache, token_ids: Sequence[int], namespace: str, cut: int = 0) -> int:
        """Compute the blocks after `buffer.length` and store them; returns the number of tokens computed.

        `token_ids` and `cut` are what was given to `load`.
        """
        return sum(self.steps(cache, token_ids, namespace, cut))

    def steps(self, cache: BufferCache, token_ids: Sequence[int], namespace: str, cut: int = 0) -> Iterator[int]:
        """`fill`, one block a step; yields the number of tokens that each computed."""
        buffer, start = cache.buffer, cache.buffer.length
        tokens = torch.tensor(token_ids, device=input_device(self.model))
        end = 0
        for key, preceding, ids in self.blocks(token_ids, namespace, cut):
            first, end = end, end + len(ids)
            if first < start:  # loaded
                continue
            # Nothing after the block is handed over: its bits must not depend on the prompt's length.
            with torch.no_grad():
                observe_rows(self.model, buffer, tokens[:end], RowPlan(torch.arange(first, end)))
            self._put(key, preceding, ids, namespace, buffer.read(first, end))
            yield len(ids)

    def _put(self, key: str, preceding: str, ids: tuple[int, ...], namespace: str, kv: ChunkKV) -> None:
        # Never quantised: an exact hit must give the bits that the forward gave.
        tensors, meta = quantization.encode(kv)
        entry = StoreEntry(key, namespace, self.fingerprint, ids, preceding, tensors, meta)
        self.heads.put(self.store, entry)
