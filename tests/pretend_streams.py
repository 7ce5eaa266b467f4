"""Streams and events in name only, and who has waited for whom: the order that real ones promise, and no more."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch


class Event:
    """Where every stream had got to, as the recording stream knew it."""

    def __init__(self, **_: Any) -> None:
        self.seen: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self.seen = {**stream.seen, stream: stream.issued}

    def synchronize(self) -> None:
        _host.seen = _later(getattr(_host, "seen", {}), self.seen)


class Stream:
    """A queue of operations; `seen` says up to which operation of each other stream it has waited."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = in_full(device if device is not None else "cuda")
        self.issued = 0
        self.seen: dict[Stream, int] = {}
        _streams.add(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.seen = _later(self.seen, event.seen)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def wrote(self, tensor: torch.Tensor) -> None:
        """The operation issued last has written to this memory."""
        _written[_memory(tensor)] = self, self.issued


_host = threading.local()
_streams: weakref.WeakSet[Stream] = weakref.WeakSet()
_written: dict[int, tuple[Stream, int]] = {}
_default_streams: dict[torch.device, Stream] = {}


def start(num_devices: int) -> None:
    """Devices with nothing in their queues."""
    _written.clear()
    _default_streams.clear()
    for index in range(num_devices):
        device = torch.device("cuda", index)
        _default_streams[device] = Stream(device)


def current_stream(device: Any = None) -> Stream:
    device = in_full(device if device is not None else "cuda")
    chosen: Stream | None = getattr(_host, "stream", None)
    return chosen if chosen is not None and chosen.device == device else _default_streams[device]


def synchronize(device: Any = None) -> None:
    for stream in list(_streams):
        if stream.device == in_full(device if device is not None else "cuda"):
            stream.synchronize()


@contextlib.contextmanager
def in_stream(stream: Stream) -> Iterator[None]:
    before, _host.stream = getattr(_host, "stream", None), stream
    try:
        yield
    finally:
        _host.stream = before


def check_waited_for(tensor: torch.Tensor, reader: Stream) -> None:
    """Refuses memory that another stream has written and neither the reader nor the host has waited for."""
    writer, number = _written.get(_memory(tensor), (reader, 0))
    seen_by_host = getattr(_host, "seen", {}).get(writer, 0)
    if writer is not reader and max(reader.seen.get(writer, 0), seen_by_host) < number:
        raise RuntimeError("reads what another stream has written and nobody has waited for")


def in_full(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _later(mine: dict[Stream, int], theirs: dict[Stream, int]) -> dict[Stream, int]:
    return {s: max(mine.get(s, 0), theirs.get(s, 0)) for s in {*mine, *theirs}}


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
