"""A catalog of many documents: insert, lookup, delete, memory, by size.

usage: python benchmarks/catalog.py [--sizes 1000 10000 100000] [--text-bytes 1000] [--neighbours 4] [--cpu-time]

Every document is one chunk of random words with neighbours, in a folder. Tokens are one a word, made up here: no model
runs, and no KV is stored. Printed per document, in microseconds unless said otherwise; each is to stay about the same
from the smallest to the largest size.

insert:   records into the catalog in transactions of 1,000, neighbours and sources included.
reopen:   seconds to open the folder again and read all texts into the index that finds them in prompts.
find:     the four known documents in a prompt of four, milliseconds (512 characters of question and head around them).
get:      a record with its context by content hash, in random order.
forget:   text, links and KV of one document, and the next prompt's lookup with it, milliseconds.
re-add:   records that are known already.
catalog:  bytes on disk; memory: what the process holds more than before, for texts, keys and their index.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from pathlib import Path

from kvboost_rag.chunks.identity import ChunkIdentity
from kvboost_rag.chunks.registry import ChunkRegistry
from kvboost_rag.datamodels import ChunkRecord
from kvboost_rag.kv.keys import content_hash
from kvboost_rag.stores import DiskStore

MODEL, NAMESPACE = "model", "namespace"
BATCH = 1000


def record_of(number: int, text_bytes: int, neighbours: tuple[str, ...]) -> ChunkRecord:
    source = random.Random(number)
    ids = tuple(source.randrange(50_000) for _ in range(text_bytes // 5))
    text = f"Document {number}. " + " ".join(f"{i:04x}" for i in ids)
    return ChunkRecord(
        content_hash(MODEL, NAMESPACE, ids), MODEL, NAMESPACE, text[:text_bytes], ids, (1, 2, 3), neighbours, (4,)
    )


def held_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def insert(store: DiskStore, size: int, args: argparse.Namespace) -> tuple[list[str], float]:
    keys: list[str] = []
    seconds = 0.0
    for start in range(0, size, BATCH):
        numbers = range(start, min(size, start + BATCH))
        records: list[ChunkRecord] = []
        for number in numbers:
            before = [*keys[-args.neighbours :], *(r.content_hash for r in records[-args.neighbours :])]
            records.append(record_of(number, args.text_bytes, tuple(before[-args.neighbours :])))
        began = args.clock()
        store.catalog.add_many(records)
        for number, record in zip(numbers, records, strict=True):
            if number % 10 == 0:  # ten chunks a source
                group = [r.content_hash for r in records[number - start : number - start + 10]]
                store.catalog.sources.link(MODEL, NAMESPACE, f"file-{number}", group)
            keys.append(record.content_hash)
        seconds += args.clock() - began
    return keys, seconds


def registry_of(store: DiskStore) -> ChunkRegistry:
    return ChunkRegistry(store, None, ChunkIdentity(MODEL))  # type: ignore[arg-type] - nothing is tokenised


def measure(size: int, args: argparse.Namespace, folder: Path) -> str:
    store = DiskStore(folder)
    keys, inserting = insert(store, size, args)
    store.close()
    draw = random.Random(0)

    before, began = held_bytes(), args.clock()
    store = DiskStore(folder)
    registry = registry_of(store)
    registry.known_texts(NAMESPACE)
    reopening, memory = args.clock() - began, held_bytes() - before

    def prompt() -> str:
        found = store.catalog.get_many(draw.sample(keys, 4))
        return "\n\n".join(["x " * 128, *(record.text for record in found.values()), "y " * 128])

    prompts = [prompt() for _ in range(50)]
    began = args.clock()
    for text in prompts:
        assert len(registry.known_texts(NAMESPACE).find(text)) == 4
    finding = (args.clock() - began) / len(prompts)

    some = draw.sample(keys, min(1000, size))
    began = args.clock()
    for key in some:
        store.catalog.contexts(store.catalog.get(key))
    getting = (args.clock() - began) / len(some)

    numbers = draw.sample(range(size), min(BATCH, size))
    again = [record_of(i, args.text_bytes, ()) for i in numbers]
    began = args.clock()
    store.catalog.add_many(again)
    adding = (args.clock() - began) / len(again)

    gone = draw.sample(keys, 20)
    began = args.clock()
    for key in gone:
        assert registry.forget([key]).num_chunks == 1
        registry.known_texts(NAMESPACE).find(prompts[0])
    forgetting = (args.clock() - began) / len(gone)
    store.close()
    on_disk = (folder / "catalog.sqlite").stat().st_size
    cells = f"{inserting / size * 1e6:.0f} | {reopening:.1f} | {finding * 1e3:.1f} | {getting * 1e6:.0f}"
    more = f"{forgetting * 1e3:.1f} | {adding * 1e6:.0f} | {on_disk / size:.0f} | {memory / size:.0f}"
    return f"| {size:,} | {cells} | {more} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--text-bytes", type=int, default=1000)
    parser.add_argument("--neighbours", type=int, default=4)
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine; waiting for the disk is left out")
    args = parser.parse_args()
    args.clock = time.process_time if args.cpu_time else time.perf_counter
    print("| documents | insert, µs | reopen, s | find, ms | get, µs | forget, ms | re-add, µs | disk, B | memory, B |")
    print("|---|---|---|---|---|---|---|---|---|")
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            print(measure(size, args, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
