"""The only clock: stage times that add up to the time to first token."""

from __future__ import annotations

import time


class StageClock:
    """Splits the time since `start` among named stages without gaps, so that the stages add up.

    `start` is when the caller called (`time.perf_counter()`); what passed before the first lap is `queue_ms`.
    """

    def __init__(self, start: float, device_type: str = "cpu") -> None:
        self._start = self._last = start
        self._device_type = device_type
        self.timings_ms: dict[str, float] = {}
        self.ttft_ms: float | None = None
        self.lap("queue_ms")

    def lap(self, stage: str) -> None:
        """Book the time since the last lap under `stage` (adds up if called again)."""
        self._synchronise()
        now = time.perf_counter()
        self.timings_ms[stage] = self.timings_ms.get(stage, 0.0) + (now - self._last) * 1e3
        self._last = now

    def first_token(self, stage: str = "suffix_ms") -> None:
        """The first token is on the host: closes the last stage. Later calls change nothing."""
        if self.ttft_ms is None:
            self.lap(stage)
            self.ttft_ms = (self._last - self._start) * 1e3

    @property
    def total_ms(self) -> float:
        return (time.perf_counter() - self._start) * 1e3

    def _synchronise(self) -> None:
        if self._device_type == "cuda":
            import torch

            torch.cuda.synchronize()
