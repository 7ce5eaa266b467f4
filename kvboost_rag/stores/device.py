"""The hottest entries on an accelerator."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvboost_rag.datamodels import StoreEntry
from kvboost_rag.stores.budget import DEFAULT_RATIO
from kvboost_rag.stores.eviction import EvictionPolicy
from kvboost_rag.stores.memory import MemoryStore
from kvboost_rag.stores.payload import own


@dataclass(frozen=True)
class _Arriving(StoreEntry):
    """An entry with the event after the copies that bring it to the device."""

    arrival: torch.cuda.Event = field(kw_only=True)


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
        super().__init__(budget_bytes, kv_cache_size_ratio=kv_cache_size_ratio, policy=policy, pin_memory=False)

    def _total_bytes(self) -> int:
        free = torch.cuda.mem_get_info(self.device)[0]
        # What the allocator holds and nobody uses is free too.
        return int(free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device))

    def _take(self, entry: StoreEntry) -> StoreEntry:
        # What is already on the device may still be being computed by the stream that the caller uses.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            held = own(entry, self.device, non_blocking=True)
            for tensor in entry.tensors.values():
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
            return _Arriving(**vars(held), arrival=self._stream.record_event())

    def _readable(self, entry: StoreEntry) -> StoreEntry:
        held = {**vars(entry)}
        reader = torch.cuda.current_stream(self.device)
        reader.wait_event(held.pop("arrival"))
        for tensor in entry.tensors.values():
            tensor.record_stream(reader)  # the allocator may not hand its memory on while the reader uses it
        return StoreEntry(**held)
