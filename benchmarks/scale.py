"""A corpus of a million, a hundred million or ten thousand million chunks, on paper and in a simulation.

    python benchmarks/scale.py [--tflops 989] [--mfu 0.4] [--chunks 1e6 1e8 1e10] [--nodes 4] [--requests 4000]

On paper: bytes of KV by codec, as `kv.quantization` writes it; GPU-hours to encode it once, encoding contexts included;
bytes of catalog and vectors, as `stores.catalog` writes them (measured now, on a small one); what loading a chunk takes
from memory, NVMe, a network and an object storage beside what computing it takes; how often a chunk must be used in a
month for storing to cost less than computing.

Simulated: requests of several chunks, drawn by Zipf's law with popularity that moves, spread over nodes; each node has
memory and disk, all share a remote store; memory and disk evict by the project's own policy, the remote one what was
used longest ago, as `allkeys-lru` does. Counted are accesses and bytes; no time is involved.

Assumptions are printed with the figures. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import catalog
import numpy as np
import torch

from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.kv import quantization
from kvboost_rag.stores import DiskStore
from kvboost_rag.stores.cost import plan
from kvboost_rag.stores.eviction import make_policy

CHUNK_TOKENS = 256
CONTEXT_TOKENS = 4 * CHUNK_TOKENS + 16
"""Four similar chunks, and an anchor."""
VECTOR_BYTES = 384 * 4
GRAPH_BYTES = 2 * 32 * 4 + 8
"""HNSW with 32 links a vector: neighbours of the lowest layer and an id."""
BANDWIDTHS = {"memory": 20e9, "NVMe": 6e9, "25 GbE": 2.5e9, "object storage": 0.5e9}
"""Bytes a second that one GPU's share of a machine can load, verification included."""


@dataclass(frozen=True)
class Model:
    """The shape of a model; KV in bfloat16."""

    name: str
    parameters: float
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_heads: int

    def chunk_bytes(self, setting: str) -> int:
        """Bytes of a chunk's KV as the codec writes it: of one layer, times the layers."""
        ramp = torch.linspace(-1, 1, CHUNK_TOKENS * self.num_kv_heads * self.head_dim)
        one = ramp.reshape(1, self.num_kv_heads, CHUNK_TOKENS, self.head_dim).bfloat16()
        tensors, meta = quantization.encode(ChunkKV((one,), (one,)), setting)
        assert meta["codec"] == setting
        return self.num_layers * sum(t.numel() * t.element_size() for t in tensors.values())

    def flops(self, num_tokens: int) -> float:
        """Of one forward: two for each parameter and token, and attention over what stands before (half of all)."""
        attention = 2 * self.num_layers * self.num_heads * self.head_dim * num_tokens**2
        return 2 * self.parameters * num_tokens + attention


MODELS = (
    Model("135M (SmolLM2)", 134.5e6, 30, 3, 64, 9),
    Model("8B (Llama 3.1)", 8.03e9, 32, 8, 128, 32),
    Model("70B (Llama 3.1)", 70.6e9, 80, 8, 128, 64),
)


def catalog_bytes(num_chunks: int = 2000) -> float:
    """Bytes a chunk takes in a catalog, with four neighbours, of about 256 tokens of text; measured."""
    wanted = argparse.Namespace(text_bytes=4 * CHUNK_TOKENS, neighbours=4, clock=lambda: 0.0)
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(folder)
        catalog.insert(store, num_chunks, wanted)
        store.close()
        return (Path(folder) / "catalog.sqlite").stat().st_size / num_chunks


def print_sizes(sizes: Sequence[float], flops_per_second: float) -> None:
    per_chunk = catalog_bytes()
    print(f"\ncatalog {per_chunk:,.0f} bytes a chunk, vector {VECTOR_BYTES}, its place in the graph {GRAPH_BYTES}")
    print("\n| model | chunks | KV plain | k8v8 | k8v4 | GPU-hours to encode | catalog | vectors and graph |")
    print("|---|---|---|---|---|---|---|---|")
    for model in MODELS:
        hours = model.flops(CHUNK_TOKENS + CONTEXT_TOKENS) / flops_per_second / 3600
        for size in sizes:
            kv = " | ".join(_bytes(size * model.chunk_bytes(s)) for s in ("none", "k8v8", "k8v4"))
            index = f"{_bytes(size * per_chunk)} | {_bytes(size * (VECTOR_BYTES + GRAPH_BYTES))}"
            print(f"| {model.name} | {size:.0e} | {kv} | {size * hours:,.2g} | {index} |")


def print_break_even(flops_per_second: float, gpu_hour: float, gb_month: float) -> None:
    print(f"\nload one chunk of {CHUNK_TOKENS} tokens, ms, beside computing it in its prompt (behind 2,000 tokens), ms")
    print("\n| model, codec | bytes | " + " | ".join(BANDWIDTHS) + " | compute | break-even | uses a month |")
    print("|---" * (len(BANDWIDTHS) + 5) + "|")
    for model in MODELS:
        prefill = (model.flops(2000 + CHUNK_TOKENS) - model.flops(2000)) / flops_per_second
        encode = model.flops(CHUNK_TOKENS + CONTEXT_TOKENS) / flops_per_second
        for setting in ("none", "k8v4"):
            size = model.chunk_bytes(setting)
            loads = {}
            for name, speed in BANDWIDTHS.items():
                found = plan(
                    bytes_per_token=size / CHUNK_TOKENS,
                    corpus_tokens=CHUNK_TOKENS,
                    chunk_tokens=CHUNK_TOKENS,
                    context_tokens=0,
                    load_bytes_per_second=speed,
                    encode_tokens_per_second=CHUNK_TOKENS / prefill,
                )
                loads[name] = f"{1000 * found.load_seconds:.2g}" + ("" if found.loading_pays else " (slower)")
            saved = prefill * gpu_hour / 3600
            uses = (size / 1e9 * gb_month) / saved
            cells = " | ".join(loads.values())
            print(
                f"| {model.name} {setting} | {_bytes(size)} | {cells} | {1000 * prefill:.2g} | "
                f"{_bytes(size / prefill)}/s | {uses:.2g} (+ {encode / prefill:.1f} once) |"
            )


class Tier:
    """Keys within a number of bytes, evicted by a policy."""

    def __init__(self, capacity: float, policy: str) -> None:
        self.capacity, self.held, self.policy = capacity, 0, make_policy(policy)

    def get(self, key: str) -> bool:
        found = key in self.policy.entries
        self.policy.hit(key)
        return found

    def put(self, key: str, num_bytes: int) -> None:
        if num_bytes > self.capacity or key in self.policy.entries:
            return
        while self.held + num_bytes > self.capacity:
            victim = self.policy.victim()
            assert victim is not None
            use = self.policy.remove(victim)
            self.held -= use.num_bytes if use is not None else 0
        self.policy.add(key, num_bytes)
        self.held += num_bytes


@dataclass(frozen=True)
class Fleet:
    """What is simulated; shares are of the corpus' bytes, for each node and for the remote store."""

    num_chunks: int = 100_000
    nodes: int = 4
    memory: float = 0.01
    disk: float = 0.1
    remote: float = 0.5
    policy: str = "importance"


def trace(num_chunks: int, num_requests: int, per_request: int, exponent: float, drift: float, seed: int) -> np.ndarray:
    """Chunks of each request, `[num_requests, per_request]`; every fifth of them, a share `drift` changes its rank."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, num_chunks + 1, dtype=np.float64) ** -exponent
    edges = np.cumsum(weights / weights.sum())
    ranks = np.minimum(np.searchsorted(edges, rng.random((num_requests, per_request))), num_chunks - 1)
    chunk_of = rng.permutation(num_chunks)
    parts = []
    for part in np.array_split(ranks, 5):
        parts.append(chunk_of[part])
        moved = rng.choice(num_chunks, int(drift * num_chunks), replace=False)
        chunk_of[moved] = chunk_of[rng.permutation(moved)]
    return np.concatenate(parts)


def simulate(requests: np.ndarray, fleet: Fleet, seed: int = 0) -> Counter[str]:
    """Accesses by where they were found: `memory`, `disk`, `remote`, `encoded`; all chunks are of one size.

    The remote store holds as much of the corpus as it has room for before the first request, as after `warm`.
    """
    rng = np.random.default_rng(seed)
    shares = (fleet.memory, fleet.disk)
    nodes = [[Tier(share * fleet.num_chunks, fleet.policy) for share in shares] for _ in range(fleet.nodes)]
    remote, found = Tier(fleet.remote * fleet.num_chunks, "lru"), Counter[str]()
    for chunk in rng.permutation(fleet.num_chunks):
        remote.put(str(chunk), 1)
    places = rng.integers(0, fleet.nodes, len(requests))
    for chunks, place in zip(requests, places, strict=True):
        memory, disk = nodes[place]
        for chunk in chunks:
            key = str(chunk)
            if memory.get(key):
                found["memory"] += 1
                disk.get(key)  # a hit in memory counts as a use on disk
            elif disk.get(key):
                found["disk"] += 1
            else:
                found["remote" if remote.get(key) else "encoded"] += 1
            for tier in (memory, disk, remote):
                tier.put(key, 1)
    return found


def print_simulation(options: argparse.Namespace) -> None:
    num_chunks = options.simulated
    requests = trace(num_chunks, options.requests, options.per_request, options.zipf, options.drift, options.seed)
    size, total = MODELS[1].chunk_bytes("none"), requests.size
    print(
        f"\n{options.requests:,} requests of {options.per_request} chunks of {num_chunks:,}, Zipf {options.zipf}, ",
        end="",
    )
    print(f"drift {options.drift:.0%} five times, {len(np.unique(requests)):,} chunks asked for, {options.nodes} nodes")
    print("\n| memory, disk of a node; remote | memory | disk | remote | encoded | GB by network | GB from disk |")
    print("|---|---|---|---|---|---|---|")
    for memory, disk, remote in ((0.01, 0, 0), (0.01, 0.1, 0), (0.01, 0.1, 0.5), (0.01, 0.1, 1.0), (0.01, 0, 1.0)):
        found = simulate(requests, Fleet(num_chunks, options.nodes, memory, disk, remote, options.policy), options.seed)
        rates = " | ".join(f"{found[name] / total:.1%}" for name in ("memory", "disk", "remote", "encoded"))
        label = f"{memory:.0%}, {disk:.0%}; {remote:.0%}"
        print(f"| {label} | {rates} | {found['remote'] * size / 1e9:,.0f} | {found['disk'] * size / 1e9:,.0f} |")


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} EB"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tflops", type=float, default=989, help="of the GPU, dense, in the model's dtype")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of it that a forward reaches")
    parser.add_argument("--gpu-hour", type=float, default=2.0, help="price of a GPU-hour")
    parser.add_argument("--gb-month", type=float, default=0.02, help="price of a stored GB for a month")
    parser.add_argument("--chunks", type=float, nargs="+", default=[1e6, 1e8, 1e10])
    parser.add_argument("--simulated", type=int, default=100_000, help="chunks of the simulated corpus")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--per-request", type=int, default=8)
    parser.add_argument("--zipf", type=float, default=0.9)
    parser.add_argument("--drift", type=float, default=0.1)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--policy", default="importance")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    speed = options.tflops * 1e12 * options.mfu
    print(f"assumed: {options.tflops:g} TFLOPS at {options.mfu:.0%}; {CHUNK_TOKENS}-token chunks behind ", end="")
    print(
        f"{CONTEXT_TOKENS} tokens; a GPU-hour {options.gpu_hour:g}, a GB for a month {options.gb_month:g}; GB/s: ",
        end="",
    )
    print(", ".join(f"{name} {speed / 1e9:g}" for name, speed in BANDWIDTHS.items()))
    print_sizes(options.chunks, speed)
    print_break_even(speed, options.gpu_hour, options.gb_month)
    print_simulation(options)


if __name__ == "__main__":
    main()
