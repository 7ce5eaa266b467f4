"""Breaks a disk store on purpose, round after round, and checks what must never happen.

    python benchmarks/torture.py [--kills 50] [--mutations 500] [--full 5] [--seed 0]

Kills: a process that stores, replaces, deletes and gives other contexts is killed at a random moment. Mutations: bytes
of a chunk file or of the catalog are flipped, cut out, repeated or overwritten, or the file is replaced by something
odd. Full: the store's file system (a small tmpfs; takes root, else left out) is filled up while it is used. After each
round every entry that is served must be the one that was stored, bit for bit; what was deleted must be in no file; the
account of bytes must be exact; and `gc` must leave nothing for `verify` to find. Nothing is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from kvboost_rag.datamodels import ChunkRecord, EntryCheck, StoreEntry
from kvboost_rag.kv.keys import content_hash
from kvboost_rag.stores import DiskStore, StoreError
from kvboost_rag.stores.maintenance import evict_unused, forget, set_contexts
from kvboost_rag.stores.verify import gc, verify

BUDGET = 120_000
NUM_CHUNKS = 24


class TortureError(Exception):
    """Something happened that must never happen."""


def record_of(number: int) -> ChunkRecord:
    """Chunk `number`, encoded after the two before it; its text and ids are found in no other chunk."""
    ids = tuple(1_000_000 + 1000 * number + i for i in range(12))
    before = [n for n in (number - 1, number - 2) if n >= 0]
    neighbours = tuple(content_hash("model", "", record_ids(n)) for n in before)
    return ChunkRecord(content_hash("model", "", ids), "model", "", f"text of {number:04d}!", ids, (7,), neighbours)


def record_ids(number: int) -> tuple[int, ...]:
    """Token ids of chunk `number`."""
    return tuple(1_000_000 + 1000 * number + i for i in range(12))


def entry_of(store: DiskStore, record: ChunkRecord) -> StoreEntry:
    """KV that depends on the chunk and its context, as a model's would."""
    context = store.catalog.context_hash(record)
    seed = torch.Generator().manual_seed(int(context[:15], 16) ^ record.token_ids[0])
    tensors = {"keys": torch.randn(2, 2, 12, 16, generator=seed)}
    return StoreEntry(record.content_hash, "", "model", record.token_ids, context, tensors, {"setting": "none"})


def work(folder: Path, rng: random.Random) -> None:
    """Use the store for ever, in all ways that change it."""
    store = DiskStore(folder, BUDGET)
    while True:
        step(store, rng)


def step(store: DiskStore, rng: random.Random) -> None:
    """One random change."""
    number, action = rng.randrange(NUM_CHUNKS), rng.random()
    known = store.catalog.get(record_of(number).content_hash)
    if action < 0.7:
        if known is None:
            wanted = record_of(number)
            here = store.catalog.known(wanted.neighbours)
            left = tuple(key for key in wanted.neighbours if key in here)
            known = store.catalog.add(dataclasses.replace(wanted, neighbours=left))
        store.put(entry_of(store, known))
    elif action < 0.85:
        forget(store, [record_of(number).content_hash])
    elif action < 0.95 and known is not None:
        set_contexts(store, [dataclasses.replace(known, neighbours=known.neighbours[:-1])])
    elif action >= 0.95:
        evict_unused(store, 0)


def check(folder: Path, what: str) -> None:
    """Open the store as the next process would, and compare all of it with what it must be.

    Raises:
        TortureError: it is something else.
    """
    store = DiskStore(folder, BUDGET)
    try:
        for number in range(NUM_CHUNKS):
            known = store.catalog.get(record_of(number).content_hash)
            if known is not None and known.neighbours and set(known.neighbours) <= set(store.catalog.hashes()):
                check_entry(store, known, what)
        gc(store)
        # What is somebody else's by its looks is left alone.
        if problems := [p for p in verify(store).problems if p.what not in ("foreign", "version", "unreadable")]:
            raise TortureError(f"{what}: after gc, verify finds {problems[:3]}")
        files = sum(path.stat().st_size for path in folder.glob("chunks/*/*.safetensors") if path.is_file())
        if store.bytes_held["disk"] != files:
            raise TortureError(f"{what}: {files} bytes of files, {store.bytes_held['disk']} accounted")
        check_gone(store, folder, what)
    finally:
        store.close()


def check_entry(store: DiskStore, known: ChunkRecord, what: str) -> None:
    """What is served of a chunk is what a model would compute for it."""
    wanted = entry_of(store, known)
    found = store.get(wanted.key, EntryCheck("", "model", wanted.token_ids, wanted.context_hash))
    if found is not None and not torch.equal(found.tensors["keys"], wanted.tensors["keys"]):
        raise TortureError(f"{what}: chunk {wanted.key[:16]} has another chunk's tensors")


def check_gone(store: DiskStore, folder: Path, what: str) -> None:
    """Texts and ids of chunks that are not known are in no file."""
    known = store.catalog.known(record_of(n).content_hash for n in range(NUM_CHUNKS))
    data = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    for record in (record_of(n) for n in range(NUM_CHUNKS)):
        ids = ",".join(map(str, record.token_ids[2:5])).encode()
        if record.content_hash not in known and (record.text.encode() in data or ids in data):
            raise TortureError(f"{what}: {record.text!r} was deleted and is still there")


def killed(folder: Path, seed: int) -> None:
    """One process that is killed after a random time."""
    rng = random.Random(seed)
    child = os.fork()
    if child == 0:
        logging.disable()
        try:
            work(folder, rng)
        finally:
            os._exit(1)
    time.sleep(rng.uniform(0.0, 0.15))
    os.kill(child, signal.SIGKILL)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
        raise TortureError(f"kill {seed}: the process had ended by itself")


def mutated(data: bytes, rng: random.Random) -> bytes:
    """`data` with one kind of damage."""
    at, size = rng.randrange(max(1, len(data))), rng.randrange(1, 200)
    kinds = (
        lambda: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if data else b"x",
        lambda: data[:at],
        lambda: data[:at] + data[at + size :],
        lambda: data[:at] + data[at : at + size] + data[at:],
        lambda: data[:at] + rng.randbytes(size) + data[at + size :],
        lambda: data[:at] + b"\0" * size + data[at + size :],
        lambda: b"",
    )
    return rng.choice(kinds)()


def mutate(folder: Path, seed: int) -> None:
    """Damage a chunk file (or sometimes the catalog, or replace the file by something that is none)."""
    rng = random.Random(seed)
    files = sorted(folder.glob("chunks/*/*.safetensors"))
    path = folder / "catalog.sqlite" if rng.random() < 0.1 or not files else rng.choice(files)
    if path.suffix != ".sqlite" and rng.random() < 0.1:
        path.unlink()
        rng.choice((os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)))(path)
    else:
        path.write_bytes(mutated(path.read_bytes(), rng))


def fill(folder: Path, seed: int) -> None:
    """Some steps on a whole store, which leave it with something to break."""
    rng, store = random.Random(seed), DiskStore(folder, BUDGET)
    for _ in range(12):
        step(store, rng)
    store.close()


def clear_oddities(folder: Path) -> None:
    """Take away what is no file of ours: it is left alone by design."""
    for path in folder.glob("chunks/*/*"):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        elif not path.is_file() or path.is_symlink():
            path.unlink()


def full(folder: Path, seed: int) -> None:
    """Fill the file system up, use the store, empty it again."""
    rng = random.Random(seed)
    fill(folder, seed)
    with open(folder.parent / "ballast", "wb", buffering=0) as ballast:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    ballast.write(b"\0" * size)
            except OSError:
                pass
    store = DiskStore(folder, BUDGET)
    for _ in range(10):
        try:
            step(store, rng)
        except StoreError:  # said in words; anything else is a fault
            continue
    evict_unused(store, 0)
    if len(store):
        raise TortureError(f"full {seed}: nothing could be evicted")
    store.close()
    (folder.parent / "ballast").unlink()


def run(kills: int, mutations: int, full_disks: int, seed: int, folder: Path) -> None:
    """All rounds. Raises TortureError."""
    for number in track(range(seed, seed + kills), "kills"):
        killed(folder / "kills", number)
        check(folder / "kills", f"kill {number}")
    for number in track(range(seed, seed + mutations), "mutations"):
        fill(folder / "mutations", number)
        mutate(folder / "mutations", number)
        check(folder / "mutations", f"mutation {number}")
        clear_oddities(folder / "mutations")
    small = folder / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)]
    if not full_disks or subprocess.run(mount, capture_output=True, check=False).returncode:
        return
    try:
        for number in track(range(seed, seed + full_disks), "full disks"):
            full(small / "kv", number)
            check(small / "kv", f"full {number}")
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--mutations", type=int, default=500)
    parser.add_argument("--full", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable()
    folder = Path(tempfile.mkdtemp())
    try:
        run(options.kills, options.mutations, options.full, options.seed, folder)
    except TortureError as error:
        Console(stderr=True).print(f"{error}; the store is kept in {folder}", highlight=False)
        sys.exit(1)
    shutil.rmtree(folder)
    Console().print(f"{options.kills} kills, {options.mutations} mutations, {options.full} full disks: nothing wrong")


if __name__ == "__main__":
    main()
