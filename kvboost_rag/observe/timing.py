"""The only clock: stage times that add up to the time to first token."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def gpus_of(model: nn.Module) -> tuple[torch.device, ...]:
    """The CUDA devices that a model lies on."""
    found = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    return tuple(sorted(found, key=str))


def synchronise(gpus: Iterable[torch.device]) -> None:
    """Wait for what was computed there, so that a clock may be read."""
    import torch

    for gpu in gpus:
        torch.cuda.synchronize(gpu)


class StageClock:
    """Splits the time since `start` among named stages without gaps, so that the stages add up.

    `start` is when the caller called (`time.perf_counter()`); what passed before the first lap is `queue_ms`. The
    `gpus` are waited for at the end of every stage.
    """

    def __init__(self, start: float, gpus: Iterable[torch.device] = ()) -> None:
        self._start = self._last = start
        self._gpus = tuple(gpus)
        self.timings_ms: dict[str, float] = {}
        self.ttft_ms: float | None = None
        self.lap("queue_ms")

    def lap(self, stage: str) -> None:
        """Book the time since the last lap under `stage` (adds up if called again)."""
        if self._gpus:
            synchronise(self._gpus)
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
