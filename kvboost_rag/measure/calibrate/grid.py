"""The settings that calibration tries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvboost_rag.models.profile import Setting

NEIGHBOURS = (0, 4)
QUANTIZATIONS = ("k8v8", "k8v4")

_AT_QUERY_TIME = (
    Setting("none", 0.0),
    Setting("query", 0.05),
    Setting("query", 0.10),
    Setting("query", 0.20),
    Setting("query", 0.05, "deviation"),
    Setting("query", 0.10, "deviation"),
    Setting("cacheblend", 0.15),
)

QUICK_GRID: tuple[Setting, ...] = (Setting("none", 0.0), Setting("query", 0.05), Setting("cacheblend", 0.15))
"""For a first look, and for tests."""


def default_grid(neighbours: Iterable[int] = NEIGHBOURS) -> list[Setting]:
    """Every strategy and ratio after every number of neighbours, and after two contexts of the most, unquantised."""
    counts = list(neighbours)
    once = [replace(setting, neighbours=count) for count in counts for setting in _AT_QUERY_TIME]
    most = max(counts, default=0)
    twice = [replace(s, neighbours=most, contexts=2) for s in _AT_QUERY_TIME if s.repair in ("none", "query")]
    return once + (twice if most else [])


def quantised(setting: Setting, codecs: Sequence[str] = QUANTIZATIONS) -> list[Setting]:
    """A setting with its stored KV quantised: tried for the settings that are good without."""
    return [replace(setting, quantization=codec) for codec in codecs]
