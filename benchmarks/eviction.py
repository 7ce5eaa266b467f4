"""Replay traces of chunk lookups through every eviction policy and the offline optimum; print hit rates and bytes.

    python benchmarks/eviction.py [--trace FILE] [--accesses N] [--capacity SHARE]

Traces: `zipf` (some chunks are asked for much more often than others), `scan` (Zipf with passes over the whole corpus
in between, as a warming job or a crawler makes them), `loop` (the corpus in order, again and again), `shift` (Zipf, and
from time to time other chunks become the popular ones), `news` (from time to time all chunks are replaced), `drift`
(what came last is asked for most), `sizes` (Zipf over chunks of 64 to 512 tokens). A trace file has one access a
line: `KEY` or `KEY BYTES`.

The optimum is Belady's rule with bypass (evict, or do not admit, what is used again last): exact for chunks of one
size, a good approximation for others. Counts are of accesses; no store and no time is involved.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvboost_rag.stores.eviction import EvictionPolicy, make_policy

NUM_CHUNKS = 2000
TOKEN_BYTES = 23_040
"""SmolLM2-135M in bfloat16."""
POLICIES = ("importance", "lru", "fifo", "ttl:1e9")

Access = tuple[str, int]


@dataclass(frozen=True)
class Replay:
    """Outcome of one replay; rates are shares of all accesses and of all bytes asked for."""

    hit_rate: float
    byte_hit_rate: float
    bytes_loaded: int


def replay(trace: Sequence[Access], capacity_bytes: int, policy: EvictionPolicy) -> Replay:
    """Look up every access; a miss brings the chunk in."""
    held, hits, hit_bytes, total = 0, 0, 0, 0
    for key, size in trace:
        total += size
        if key in policy.entries:
            policy.hit(key)
            hits, hit_bytes = hits + 1, hit_bytes + size
            continue
        if size > capacity_bytes:
            continue
        while held + size > capacity_bytes:
            victim = policy.victim()
            assert victim is not None
            use = policy.remove(victim)
            held -= use.num_bytes if use is not None else 0
        policy.add(key, size)
        held += size
    return Replay(hits / len(trace), hit_bytes / total, total - hit_bytes)


def optimum(trace: Sequence[Access], capacity_bytes: int) -> Replay:
    """Belady's rule: what is used again last goes first, or does not come in at all."""
    next_use = _next_uses(trace)
    held: dict[str, int] = {}
    due: dict[str, int] = {}
    heap: list[tuple[int, str]] = []
    used, hits, hit_bytes = 0, 0, 0
    for at, (key, size) in enumerate(trace):
        if key in held:
            hits, hit_bytes = hits + 1, hit_bytes + size
        elif size <= capacity_bytes:
            held[key], used = size, used + size
        else:
            continue
        due[key] = next_use[at]
        heapq.heappush(heap, (-next_use[at], key))
        while used > capacity_bytes:
            negative, victim = heapq.heappop(heap)
            if victim in held and due[victim] == -negative:
                used -= held.pop(victim)
    total = sum(size for _, size in trace)
    return Replay(hits / len(trace), hit_bytes / total, total - hit_bytes)


def _next_uses(trace: Sequence[Access]) -> list[int]:
    later: dict[str, int] = {}
    result = [0] * len(trace)
    for at in range(len(trace) - 1, -1, -1):
        key = trace[at][0]
        result[at] = later.get(key, len(trace) + at)
        later[key] = at
    return result


def zipf(rng: random.Random, num_accesses: int, exponent: float = 0.9, offset: int = 0) -> Iterator[str]:
    """Keys whose frequency falls with their rank."""
    ranks = [(rank + 1) ** -exponent for rank in range(NUM_CHUNKS)]
    for rank in rng.choices(range(NUM_CHUNKS), ranks, k=num_accesses):
        yield f"chunk-{(rank + offset) % NUM_CHUNKS}"


def traces(num_accesses: int, seed: int = 0) -> dict[str, list[Access]]:
    """All synthetic traces."""
    rng = random.Random(seed)
    size = 256 * TOKEN_BYTES
    sizes = {f"chunk-{n}": rng.choice((64, 128, 256, 512)) * TOKEN_BYTES for n in range(NUM_CHUNKS)}
    return {
        "zipf": [(key, size) for key in zipf(rng, num_accesses)],
        "scan": [(key, size) for key in _with_scans(rng, num_accesses)],
        "loop": [(f"chunk-{at % NUM_CHUNKS}", size) for at in range(num_accesses)],
        "shift": [(key, size) for key in _shifting(rng, num_accesses)],
        "news": [(f"{at // 5000}-{key}", size) for at, key in enumerate(zipf(rng, num_accesses, 1.1))],
        "drift": [(f"chunk-{max(0, int(at / 10 - rng.expovariate(0.01)))}", size) for at in range(num_accesses)],
        "sizes": [(key, sizes[key]) for key in zipf(rng, num_accesses)],
    }


def _with_scans(rng: random.Random, num_accesses: int) -> Iterator[str]:
    """Zipf, and after every 3,000 accesses one pass over 1,000 chunks that nobody asks for."""
    for start in range(0, num_accesses, 4000):
        yield from zipf(rng, min(3000, num_accesses - start))
        yield from (f"scanned-{start}-{n}" for n in range(min(1000, max(0, num_accesses - start - 3000))))


def _shifting(rng: random.Random, num_accesses: int) -> Iterator[str]:
    for epoch, start in enumerate(range(0, num_accesses, 5000)):
        yield from zipf(rng, min(5000, num_accesses - start), offset=epoch * NUM_CHUNKS // 5)


def read_trace(path: Path) -> list[Access]:
    """A trace file: `KEY` or `KEY BYTES` a line.

    Raises:
        ValueError: a line is neither; says which.
    """
    result = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        parts = line.split()
        if not parts:
            continue
        if len(parts) > 2 or (len(parts) == 2 and not parts[1].isdigit()):
            raise ValueError(f"{path}:{number}: expected KEY or KEY BYTES, found {line!r}")
        result.append((parts[0], int(parts[1]) if len(parts) == 2 else 256 * TOKEN_BYTES))
    return result


def compare(trace: Sequence[Access], share: float) -> dict[str, Replay]:
    """All policies and the optimum with room for `share` of the bytes of all distinct chunks."""
    capacity = math.floor(share * sum(dict(trace).values()))
    found = {name.split(":")[0]: replay(trace, capacity, make_policy(name)) for name in POLICIES}
    return {**found, "optimum": optimum(trace, capacity)}


def print_table(all_traces: dict[str, list[Access]], shares: Iterable[float]) -> None:
    """Hit rate, and GB that missed, by trace, capacity and policy."""
    table = Table("trace", "capacity", title="hit rate in % (GB loaded or encoded)", title_justify="left")
    names = [name.split(":")[0] for name in POLICIES] + ["optimum"]
    for name in names:
        table.add_column(name, justify="right")
    for label, trace in all_traces.items():
        for share in shares:
            found = compare(trace, share)
            cells = (f"{100 * found[n].hit_rate:5.1f} ({found[n].bytes_loaded / 1e9:.0f})" for n in names)
            table.add_row(label, f"{share:.0%}", *cells)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--trace", type=Path, help="replay this file instead of the synthetic traces")
    parser.add_argument("--accesses", type=int, default=40_000)
    parser.add_argument("--capacity", type=float, nargs="*", default=[0.05, 0.1, 0.3])
    options = parser.parse_args()
    chosen = {options.trace.name: read_trace(options.trace)} if options.trace else traces(options.accesses)
    print_table(chosen, options.capacity)


if __name__ == "__main__":
    main()
