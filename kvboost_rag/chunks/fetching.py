"""Chunks that lie on disk: load them, or encode them again?"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from kvboost_rag.chunks.library import ChunkLibrary, FetchedChunk
from kvboost_rag.datamodels import ChunkRecord, DiskChoice

DISK = "disk"
"""Name of the tier whose loads are weighed against encoding again."""


def choose(library: ChunkLibrary, record: ChunkRecord, always_load: bool = False) -> DiskChoice | None:
    """What to do about a chunk on disk, by what both ways have cost so far; None for one in memory or not held.

    Encoding again is chosen only where it gives the stored bits: if the chunk was computed alone, by the same software
    on the same kind of device. The decision is counted in the metrics.
    """
    info = library.store.info(record.content_hash) if library.store.tier_of(record.content_hash) == DISK else None
    if info is None or library.encoder is None:
        return None
    load = always_load or info.meta.get("encoder") != library.encoder.signature
    if not load:
        load = library.costs.decide(info.num_bytes, library.check(record)[0].num_tokens).load
    if library.metrics is not None:
        library.metrics.record_decision(load)
    return "load" if load else "recompute"


def load_all(
    library: ChunkLibrary, records: Mapping[str, ChunkRecord], choices: Mapping[str, DiskChoice | None]
) -> dict[str, FetchedChunk]:
    """What the store holds of `records` (by content hash), apart from what is chosen to be encoded again."""
    wanted = {key: record for key, record in records.items() if choices[key] != "recompute"}
    start = time.perf_counter()
    library.store.prefetch(wanted)
    found, num_bytes, seconds = {}, 0, time.perf_counter() - start
    for key, record in wanted.items():
        start = time.perf_counter()
        chunk = library.load(record)
        if chunk is not None and choices[key] == "load":
            num_bytes += chunk.num_bytes
            seconds += time.perf_counter() - start
        if chunk is not None:
            found[key] = replace(chunk, disk_choice=choices[key])
    # Together, since they are read at the same time: one by one, the first would seem to take all of it.
    library.costs.observe_load(num_bytes, seconds)
    return found


def encode(library: ChunkLibrary, record: ChunkRecord, choice: DiskChoice | None) -> FetchedChunk:
    """Compute a chunk that is missing (or turned out to be unusable), or that is faster to compute than to load."""
    again = choice == "recompute"
    return replace(library.encode(record, again), disk_choice="recompute" if again else None)
