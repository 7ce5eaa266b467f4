"""One clock for everybody, and what is read besides it."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvbench.contenders import Contender, FirstToken
from kvbench.texts import RagPrompt


@dataclass(frozen=True)
class Sample:
    """One timed call: prompt text in, first token out. `peak_bytes`: most memory above what was held before it."""

    ttft_ms: float
    peak_bytes: int | None
    first: FirstToken


@dataclass
class Series:
    """All samples of one contender."""

    name: str
    samples: list[Sample] = field(default_factory=list)
    failure: str | None = None

    @property
    def p50_ms(self) -> float:
        return statistics.median(s.ttft_ms for s in self.samples)

    @property
    def p95_ms(self) -> float:
        """By linear interpolation; with few samples close to the slowest."""
        values = sorted(s.ttft_ms for s in self.samples)
        place = 0.95 * (len(values) - 1)
        low = int(place)
        return values[low] + (place - low) * (values[min(low + 1, len(values) - 1)] - values[low])

    @property
    def fastest_ms(self) -> float:
        return min(s.ttft_ms for s in self.samples)

    def stage_ms(self, stage: str) -> float:
        return statistics.median(s.first.stages_ms.get(stage, 0.0) for s in self.samples)

    def mean(self, value: str) -> float:
        return statistics.fmean(getattr(s.first, value) for s in self.samples)

    @property
    def peak_bytes(self) -> int | None:
        peaks = [s.peak_bytes for s in self.samples if s.peak_bytes is not None]
        return max(peaks, default=None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON lines."""
        if self.failure is not None:
            return {"name": self.name, "failure": self.failure}
        stages = sorted({stage for s in self.samples for stage in s.first.stages_ms})
        return {
            "name": self.name,
            "samples": len(self.samples),
            "ttft_p50_ms": self.p50_ms,
            "ttft_p95_ms": self.p95_ms,
            "ttft_min_ms": self.fastest_ms,
            "prompt_tokens": self.mean("prompt_tokens"),
            "reused_tokens": self.mean("reused_tokens"),
            "recomputed_tokens": self.mean("recomputed_tokens"),
            "peak_bytes": self.peak_bytes,
            "stages_ms": {stage: self.stage_ms(stage) for stage in stages},
        }


def measure(
    contenders: Sequence[Contender], prompts: Sequence[RagPrompt], warm_up: RagPrompt | None = None
) -> dict[str, Series]:
    """Rounds: each prompt goes through every contender before the next, so that drift hits all alike.

    A contender that raises gets the message as its row and is left out from then on. Each is called once with
    `warm_up` (default: the first prompt) before the clock counts.
    """
    series = {c.name: Series(c.name) for c in contenders}
    for number, prompt in enumerate([warm_up or prompts[0], *prompts]):
        for contender in contenders:
            row = series[contender.name]
            if row.failure is not None:
                continue
            try:
                contender.prepare(prompt)
                sample = time_once(contender, prompt)
            except Exception as error:
                row.failure = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
                continue
            if number:
                row.samples.append(sample)
    return series


def time_once(contender: Contender, prompt: RagPrompt) -> Sample:
    """The call itself, device synchronised on both sides."""
    contender.synchronise()
    with PeakMemory() as memory:
        start = time.perf_counter()
        first = contender.first_token(prompt)
        contender.synchronise()
        ttft_ms = (time.perf_counter() - start) * 1e3
    return Sample(ttft_ms, memory.peak_bytes, first)


class PeakMemory:
    """Most memory above what was held at the start: the allocator's on CUDA, the process' resident set elsewhere.

    Linux resets a process' high-water mark when 5 is written to `/proc/self/clear_refs`; where that is not possible
    nothing is reported. Memory that the process had freed before, but kept, is not seen.
    """

    peak_bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        self._start = self._reset()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._start is None:
            return
        top = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status_bytes("VmHWM")
        self.peak_bytes = None if top is None else max(0, top - self._start)

    def _reset(self) -> int | None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return None
        return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
