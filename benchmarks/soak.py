"""Thousands of mixed operations on an engine, beside an independent model of what its store must hold.

    python benchmarks/soak.py [--operations 10000] [--seed 0]

Each operation is one of: answer a question over some documents, warm some, evict one, delete a namespace, restart the
engine. The budgets of memory and disk are about a tenth of the documents' KV. After every operation the store's hits,
misses, bytes by tier and keys by tier must be what the model says, to the byte. At the end the process's memory must
be within 5 % of what it was after a third of the operations. The model is a tiny random llama; nothing is timed.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvbench.soak_model import Expected, LruTier, SoakError
from kvbench.tiny import tiny_model
from rich.console import Console
from rich.progress import track

from kvboost_rag.config import GenerationParams, ReuseConfig
from kvboost_rag.engine import KVBoost
from kvboost_rag.stores import DiskStore, MemoryStore, TieredStore
from kvboost_rag.stores.maintenance import delete_namespace

NUM_DOCUMENTS = 100
NAMESPACES = ("", "b")
WORDS = ("store", "key", "value", "token", "prompt", "chunk", "layer", "model", "answer", "question", "memory", "disk")
MEMORY_SHARE, DISK_SHARE = 0.05, 0.10
FLAT_WITHIN = 0.05


class InOrder(TieredStore):
    """Without reading ahead and writing behind, whose order nobody can predict."""

    def prefetch(self, keys: Iterable[str]) -> None:
        """Do nothing."""


class Soak:
    """The engine, its documents, and the model of its store."""

    def __init__(self, loaded: Any, folder: Path, seed: int) -> None:
        self.loaded = loaded
        self.folder = folder
        self.rng = random.Random(seed)
        self.counts: dict[str, int] = {}
        self.documents = [
            (namespace, self._text()) for namespace in NAMESPACES for _ in range(NUM_DOCUMENTS // len(NAMESPACES))
        ]
        entry_bytes, file_bytes = self._measure()
        total, on_disk = sum(entry_bytes.values()), sum(file_bytes.values())
        self.budgets = int(MEMORY_SHARE * total), int(DISK_SHARE * on_disk)
        self.expected = Expected(LruTier(self.budgets[0]), LruTier(self.budgets[1]), entry_bytes, file_bytes)
        self.engine = self._open()

    def steps(self, count: int) -> None:
        """`step`, many times."""
        for _ in range(count):
            self.step()

    def step(self) -> None:
        """One random operation, and a comparison of everything."""
        kinds = ("ask", "warm", "evict", "delete namespace", "restart")
        kind = self.rng.choices(kinds, (70, 15, 13, 1, 1))[0]
        self.counts[kind] = self.counts.get(kind, 0) + 1
        {"ask": self._ask, "warm": self._warm, "evict": self._evict, "delete namespace": self._delete}.get(
            kind, self._restart
        )()
        self._compare(kind)

    def close(self) -> None:
        """Close the engine and its store."""
        self.engine.close()

    def _text(self) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randrange(8, 40))) + f" {self.rng.random()}"

    def _pick(self, most: int) -> tuple[str, list[str], list[str]]:
        """A namespace, some of its documents (few of them much more often than the others), and their keys."""
        namespace = self.rng.choice(NAMESPACES)
        own = [text for name, text in self.documents if name == namespace]
        weights = [1 / (rank + 1) for rank in range(len(own))]
        texts = list(dict.fromkeys(self.rng.choices(own, weights, k=self.rng.randint(1, most))))
        return namespace, texts, [self._key(text, namespace) for text in texts]

    def _key(self, text: str, namespace: str) -> str:
        return self.engine.registry.describe(text, namespace).content_hash

    def _ask(self) -> None:
        namespace, texts, keys = self._pick(4)
        prompt = "\n".join(texts) + "\nWhich layer holds it?"
        self.engine.register(texts, namespace=namespace)
        self.engine.generate(prompt, namespace=namespace, params=GenerationParams(max_new_tokens=1), strict=True)
        # All are looked up before the missing ones are encoded.
        self.expected.pinned = keys
        missing = [key for key in keys if not self.expected.lookup(key)]
        for key in missing:
            self.expected.store(key)
        self.expected.pinned = ()

    def _warm(self) -> None:
        namespace, texts, keys = self._pick(3)
        self.engine.warm(texts, neighbours=None, namespace=namespace)
        for key in keys:
            if key not in self.expected.memory.held and key not in self.expected.disk.held:
                self.expected.store(key)

    def _evict(self) -> None:
        namespace, texts, keys = self._pick(1)
        self.engine.evict(texts, namespace=namespace)
        self.expected.forget(keys[0])

    def _delete(self) -> None:
        namespace = self.rng.choice(NAMESPACES)
        keys = [self._key(text, name) for name, text in self.documents if name == namespace]
        delete_namespace(self.engine.store, namespace)
        for key in keys:
            self.expected.forget(key)

    def _restart(self) -> None:
        self.close()
        self.engine = self._open()
        self.expected.restart()

    def _open(self) -> KVBoost:
        memory, disk = self.budgets
        tiers = MemoryStore(memory, policy="lru", pin_memory=False), DiskStore(self.folder, disk, policy="lru")
        return KVBoost(self.loaded, store=InOrder(*tiers, write_back=False), config=ReuseConfig(disk_load="always"))

    def _measure(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of each document's entry and file."""
        with tempfile.TemporaryDirectory() as folder:
            disk = DiskStore(folder, 1 << 40)
            with KVBoost(self.loaded, store=disk) as engine:
                self.engine = engine
                for namespace, text in self.documents:
                    engine.warm([text], neighbours=None, namespace=namespace)
                infos = {info.key: info for info in disk.entries()}
                memory = {}
                for namespace, text in self.documents:
                    record = engine.registry.describe(text, namespace)
                    memory[record.content_hash] = disk.read(record.content_hash).num_bytes
                return memory, {key: infos[key].num_bytes for key in memory}

    def _compare(self, kind: str) -> None:
        store = self.engine.store
        memory, disk = store.tiers
        found = {
            "hits": store.stats.hits,
            "misses": store.stats.misses,
            "keys in memory": set(memory.keys()),
            "keys on disk": set(disk.keys()),
            "bytes in memory": memory.bytes_held["memory"],
            "bytes on disk": disk.bytes_held["disk"],
            "rejected": sum(store.stats.rejected.values()),
        }
        expected = {
            "hits": self.expected.hits,
            "misses": self.expected.misses,
            "keys in memory": set(self.expected.memory.held),
            "keys on disk": set(self.expected.disk.held),
            "bytes in memory": sum(self.expected.memory.held.values()),
            "bytes on disk": sum(p.stat().st_size for p in self.folder.glob("chunks/*/*")),
            "rejected": 0,
        }
        for name, value in expected.items():
            if found[name] != value:
                raise SoakError(f"after {kind!r}: {name} is {found[name]}, expected {value}")
        if found["bytes in memory"] > self.budgets[0] or found["bytes on disk"] > self.budgets[1]:
            raise SoakError(f"after {kind!r}: over budget, {found}")


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(tiny_model(), Path(folder) / "kv", options.seed)
        warmed_up, before = options.operations // 3, 0
        for number in track(range(options.operations), "soak", console=console):
            if number == warmed_up:
                gc.collect()
                before = resident_bytes()
            soak.step()
        gc.collect()
        after = resident_bytes()
        soak.close()
    growth = after / before - 1 if before else 0.0
    console.print(f"{options.operations:,} operations as predicted: {soak.counts}")
    console.print(f"memory of the process {before / 1e6:.0f} MB -> {after / 1e6:.0f} MB ({growth:+.1%})")
    return 0 if growth <= FLAT_WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
