"""How many bytes a tier may hold: an absolute number, or a share of what the machine has."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

DEFAULT_RATIO = 0.35

UNLIMITED = 2**62
"""Of disk, for what only looks or clears up: no share of a file system that may be smaller than what it once held."""

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def resolve_budget(budget_bytes: int | None, kv_cache_size_ratio: float, total_bytes: int) -> int:
    """`budget_bytes`, or where that is None `kv_cache_size_ratio` of `total_bytes`.

    Raises:
        ValueError: a negative budget, or a ratio outside 0…1.
    """
    if budget_bytes is not None:
        if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < 0:
            raise ValueError(f"budget_bytes={budget_bytes!r}: expected a whole number of bytes, 0 or more")
        return budget_bytes
    if not 0.0 <= kv_cache_size_ratio <= 1.0:
        raise ValueError(f"kv_cache_size_ratio={kv_cache_size_ratio!r}: expected a number from 0 to 1")
    return int(kv_cache_size_ratio * total_bytes)


def host_memory_bytes() -> int:
    """Memory that this process can have: the machine's, or its control group's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        try:
            total = min(total, int(path.read_text()))
        except (OSError, ValueError):  # no such control group, or "max"
            continue
    return total


def disk_budget(budget_bytes: int | None, kv_cache_size_ratio: float, folder: str | Path) -> int:
    """`resolve_budget` for the file system that holds `folder`.

    Raises:
        ValueError: as there, or a share is wanted of a file system that does not say its size (some in user space and
            in networks): a budget of 0 would keep nothing, and evict what an earlier run has stored.
    """
    total = shutil.disk_usage(folder).total
    if budget_bytes is None and total <= 0:
        raise ValueError(
            f"the file system of {folder} does not say its size, so that no share of it can be the disk budget: set "
            "one in bytes (open_store(…, disk_bytes=…), DiskStore(…, budget_bytes), or --disk-budget)"
        )
    return resolve_budget(budget_bytes, kv_cache_size_ratio, total)
