"""Blocking streams for asyncio, without a thread per token and without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

_END = object()


async def iterate(make: Callable[[threading.Event], Iterator[T]]) -> AsyncGenerator[T, None]:
    """The items of `make(cancelled)` as they come; the iterator runs in one thread of its own.

    Closing the async iterator early (or cancelling its task) sets `cancelled`, which the iterator should hand on to
    whatever it waits for (`KVBoost.stream(cancelled=…)`), and closes the iterator when its next item comes. Exceptions
    of the blocking iterator are raised here.
    """
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[object] = asyncio.Queue()
    cancelled = threading.Event()

    def hand_over(item: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
            loop.call_soon_threadsafe(items.put_nowait, item)

    def produce() -> None:
        try:
            iterator = make(cancelled)
            try:
                for item in iterator:
                    hand_over(item)
                    if cancelled.is_set():
                        break
            finally:
                close = getattr(iterator, "close", None)
                if close is not None:
                    close()
        except BaseException as error:
            hand_over(_Raised(error))
        hand_over(_END)

    thread = threading.Thread(target=produce, name="kvboost-aio", daemon=True)
    thread.start()
    try:
        while (item := await items.get()) is not _END:
            if isinstance(item, _Raised):
                raise item.error
            yield item  # type: ignore[misc]
    finally:
        cancelled.set()


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error
