"""Entries and stores to test with: small payloads of several dtypes, real hashes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvboost_rag.datamodels import ChunkRecord, EntryCheck, StoreEntry
from kvboost_rag.kv.keys import content_hash, context_hash
from kvboost_rag.stores import DeviceStore, DiskStore, MemoryStore, Store, TieredStore
from tests.pretend_cuda import pretend_cuda

FINGERPRINT = "model-a"
NUM_BYTES = 4 * 3 * 5 * 4 + 4 * 3 * 5 * 2 + 7 + 2 * 9

Make = Callable[..., StoreEntry]
MakeRecord = Callable[..., ChunkRecord]


def build_entry(
    number: int, namespace: str = "", context: tuple[int, ...] = (), fingerprint: str = FINGERPRINT, version: int = 0
) -> StoreEntry:
    """An entry of `NUM_BYTES` bytes that differs from all other numbers' (and versions') in every tensor."""
    token_ids = tuple(range(number, number + 5))
    rng = torch.Generator().manual_seed(number * 1000 + version)
    keys = torch.randn(4, 3, 5, generator=rng)
    return StoreEntry(
        key=content_hash(fingerprint, namespace, token_ids),
        namespace=namespace,
        fingerprint=fingerprint,
        token_ids=token_ids,
        context_hash=context_hash(context),
        tensors={
            "keys": keys,
            "values": keys.to(torch.bfloat16),
            "codes": torch.randint(0, 256, (7,), dtype=torch.uint8, generator=rng),
            "scales": torch.randn(9, generator=rng).to(torch.float16),
        },
        meta={"codec": "none", "psnr": "∞"},
    )


def check_of(entry: StoreEntry) -> EntryCheck:
    return EntryCheck(entry.namespace, entry.fingerprint, entry.token_ids, entry.context_hash)


def build_record(number: int, neighbours: tuple[str, ...] = (), namespace: str = "", anchor: tuple[int, ...] = ()):
    ids = tuple(range(number, number + 5))
    return ChunkRecord(
        content_hash(FINGERPRINT, namespace, ids), FINGERPRINT, namespace, f"text {number} é", ids, anchor, neighbours
    )


def same(a: StoreEntry | None, b: StoreEntry) -> bool:
    """Whether all fields and all bits of the tensors agree."""
    if a is None or dataclasses.replace(a, tensors={}) != dataclasses.replace(b, tensors={}):
        return False
    return a.tensors.keys() == b.tensors.keys() and all(
        a.tensors[n].dtype == t.dtype and torch.equal(a.tensors[n].cpu(), t) for n, t in b.tensors.items()
    )


@pytest.fixture
def make_entry() -> Make:
    return build_entry


@pytest.fixture
def make_record() -> MakeRecord:
    return build_record


BUDGET = 10_000_000

STORES: dict[str, Callable[[Path], Store]] = {
    "memory": lambda folder: MemoryStore(BUDGET),
    "disk": lambda folder: DiskStore(folder, BUDGET),
    "tiered": lambda folder: TieredStore(MemoryStore(BUDGET), DiskStore(folder, BUDGET)),
    "tiered-write-through": lambda folder: TieredStore(
        MemoryStore(BUDGET), DiskStore(folder, BUDGET), write_back=False
    ),
    "tiered-small-memory": lambda folder: TieredStore(MemoryStore(NUM_BYTES), DiskStore(folder, BUDGET)),
    "three-tiers": lambda folder: TieredStore(MemoryStore(NUM_BYTES), MemoryStore(BUDGET), DiskStore(folder, BUDGET)),
}


ON_DEVICES: dict[str, Callable[[Path], Store]] = {
    "device": lambda folder: DeviceStore("cuda:0", BUDGET),
    "device-first": lambda folder: TieredStore(
        DeviceStore("cuda:0", NUM_BYTES), MemoryStore(2 * NUM_BYTES), DiskStore(folder, BUDGET)
    ),
}
"""On a GPU that is pretended; memory is page-locked there."""


@pytest.fixture(params=[*STORES, *ON_DEVICES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    make = STORES.get(request.param)
    with contextlib.nullcontext() if make else pretend_cuda():
        opened = (make or ON_DEVICES[request.param])(tmp_path / "kv")
        yield opened
        opened.close()
