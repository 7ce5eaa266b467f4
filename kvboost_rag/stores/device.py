"""The hottest entries on an accelerator."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvboost_rag.datamodels import StoreEntry
from kvboost_rag.stores.budget import DEFAULT_RATIO
from kvboost_rag.stores.eviction import EvictionPolicy
from kvboost_rag.stores.memory import MemoryStore


class DeviceStore(MemoryStore):
    """Holds entries in the memory of an accelerator; the fastest tier of a `TieredStore`.

    Copies to the device run on a stream of their own and are waited for (by the reader's stream, not by the host)
    when an entry is read. From page-locked memory, as `MemoryStore` uses where CUDA is present, they overlap with
    computation.

    Args:
        device: a CUDA device. A machine without one has no such tier: use `MemoryStore`.
        budget_bytes: absolute, or None for `kv_cache_size_ratio` (default 0.35) of the device's memory that is left
            beside the model when the tier is made.
        policy: name or object, see `stores.eviction.make_policy`.

    Raises:
        ValueError: not a CUDA device.
    """

    tier = "device"

    def __init__(
        self,
        device: torch.device | str,
        budget_bytes: int | None = None,
        *,
        kv_cache_size_ratio: float = DEFAULT_RATIO,
        policy: str | EvictionPolicy = "importance",
    ) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ValueError(f"device={str(device)!r}: a device tier needs a CUDA device; use the memory tier")
        self._stream = torch.cuda.Stream(self.device)
        self._arrivals: dict[str, torch.cuda.Event] = {}
        super().__init__(budget_bytes, kv_cache_size_ratio=kv_cache_size_ratio, policy=policy, pin_memory=False)

    def _total_bytes(self) -> int:
        free = torch.cuda.mem_get_info(self.device)[0]
        # What the allocator holds and nobody uses is free too.
        return int(free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device))

    def _take(self, entry: StoreEntry) -> StoreEntry:
        # What is already on the device may still be being computed by the stream that the caller uses.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            tensors = {n: t.to(self.device, non_blocking=True).contiguous() for n, t in entry.tensors.items()}
            self._arrivals[entry.key] = self._stream.record_event()
        return replace(entry, tensors=tensors)

    def _load(self, key: str) -> tuple[StoreEntry | None, str | None]:
        entry, reason = super()._load(key)
        if entry is not None:
            reader = torch.cuda.current_stream(self.device)
            reader.wait_event(self._arrivals[key])
            for tensor in entry.tensors.values():
                tensor.record_stream(reader)  # the allocator may not hand its memory on while the reader uses it
        return entry, reason

    def _drop(self, key: str, reason: str) -> StoreEntry | None:
        self._arrivals.pop(key, None)
        return super()._drop(key, reason)
