"""KV of what prompts begin with, before their first chunk: the chat template's head, a system message."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.kv.buffer import BufferPool
from vllm_kvboost.reference import Reference


class PromptHeads:
    """Computes prompts' heads, each in a forward of its own, and keeps what it computed.

    Nothing stands before a head, so that its KV is full prefill's and the same in every prompt that begins alike;
    whether it was kept changes no bit. (Separators further on are not kept: encoded after their own chunk alone
    instead of the whole prompt they made answers worse, see docs/vllm.md.)

    Args:
        max_bytes: of kept KV; what was used longest ago goes first.
    """

    def __init__(self, reference: Reference, max_bytes: int) -> None:
        self._reference, self._max_bytes = reference, max_bytes
        self._kept: OrderedDict[tuple[int, ...], ChunkKV] = OrderedDict()
        self._bytes = 0
        self._buffers = BufferPool(reference.layout)  # the reference's own is in use by the load meanwhile
        self.num_computed = 0

    def get(self, token_ids: Sequence[int]) -> ChunkKV:
        """Position-free KV of a prompt's first tokens."""
        ids = tuple(token_ids)
        if (kept := self._kept.get(ids)) is not None:
            self._kept.move_to_end(ids)
            return kept
        kv = self._compute(ids)
        self._kept[ids] = kv
        self._bytes += kv.num_bytes
        while self._bytes > self._max_bytes:
            self._bytes -= self._kept.popitem(last=False)[1].num_bytes
        return kv

    def _compute(self, ids: tuple[int, ...]) -> ChunkKV:
        buffer = self._buffers.take(len(ids))
        try:
            self._reference.compute(buffer, ids, list(range(len(ids))))
            self.num_computed += len(ids)
            return self._reference.take(buffer, 0, len(ids))
        finally:
            self._buffers.give_back(buffer)
