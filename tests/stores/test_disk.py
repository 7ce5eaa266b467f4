"""Files on disk: what happens to damaged, foreign, swapped and vanished ones, full disks, restarts, two processes."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sqlite3
import stat
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from kvboost_rag.cli import options
from kvboost_rag.stores import DiskStore, MemoryStore, StoreError, TieredStore
from kvboost_rag.stores.catalog.database import StoreBusyError, waiting_at_most
from kvboost_rag.stores.disk import chunk_file
from kvboost_rag.stores.disk.folder import StoreFolder
from tests.stores.conftest import FINGERPRINT, build_entry, build_record, check_of, same

BUDGET = 1_000_000


def open_disk(folder: Path, budget: int = BUDGET, **options: object) -> DiskStore:
    return DiskStore(folder, budget, **options)


def file_bytes(folder: Path) -> int:
    """Bytes of everything that is, or was about to be, a chunk file."""
    return sum(p.stat().st_size for part in ("chunks", "staging") for p in (folder / part).rglob("*") if p.is_file())


def truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def empty(data: bytes) -> bytes:
    return b""


def cut_in_the_length_field(data: bytes) -> bytes:
    return data[:5]


def flip_in_the_payload(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]


def flip_in_the_header(data: bytes) -> bytes:
    at = data.index(b"token_ids") + 14
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def grow(data: bytes) -> bytes:
    return data + b"\0" * 100


def absurd_header_length(data: bytes) -> bytes:
    return struct.pack("<Q", 1 << 60) + data[8:]


def noise(data: bytes) -> bytes:
    return os.urandom(len(data))


def a_safetensors_file_of_someone_else(data: bytes) -> bytes:
    return safetensors.torch.save({"keys": torch.zeros(3)}, metadata={"format": "pt"})


def a_later_version(data: bytes) -> bytes:
    return data.replace(b'"format_version":"4"', b'"format_version":"9"')


def an_earlier_version(data: bytes) -> bytes:
    return data.replace(b'"format_version":"4"', b'"format_version":"1"')


REMOVED = [
    truncate,
    empty,
    cut_in_the_length_field,
    flip_in_the_payload,
    flip_in_the_header,
    grow,
    absurd_header_length,
]
LEFT_ALONE = {a_safetensors_file_of_someone_else: "foreign", a_later_version: "version"}


@pytest.mark.parametrize("damage", [*REMOVED, noise])
def test_a_damaged_file_is_a_counted_miss_and_is_removed(tmp_path: Path, damage) -> None:
    store, entry, other = open_disk(tmp_path), build_entry(1), build_entry(2)
    store.put(entry)
    store.put(other)
    path = store.folder.path(entry.key)
    path.write_bytes(damage(path.read_bytes()))
    assert store.get(entry.key, check_of(entry)) is None
    assert sum(store.stats.rejected.values()) == 1
    assert store.stats.evictions["corrupt"] == 1
    assert not path.exists()
    assert store.bytes_held["disk"] == file_bytes(tmp_path)
    assert same(store.get(other.key, check_of(other)), other)
    assert store.put(entry)
    assert same(store.get(entry.key, check_of(entry)), entry)


def test_a_file_of_an_earlier_version_is_removed_but_not_called_corrupt(tmp_path: Path) -> None:
    store, entry = open_disk(tmp_path), build_entry(1)
    store.put(entry)
    path = store.folder.path(entry.key)
    path.write_bytes(an_earlier_version(path.read_bytes()))
    assert store.get(entry.key, check_of(entry)) is None
    assert store.stats.rejected == {"outdated": 1}
    assert store.stats.evictions == {"outdated": 1}
    assert not path.exists()


@pytest.mark.parametrize(("damage", "reason"), LEFT_ALONE.items())
def test_a_file_of_someone_else_is_a_counted_miss_and_is_left_alone(tmp_path: Path, damage, reason: str) -> None:
    store, entry = open_disk(tmp_path), build_entry(1)
    store.put(entry)
    path = store.folder.path(entry.key)
    path.write_bytes(damage(path.read_bytes()))
    assert store.get(entry.key, check_of(entry)) is None
    assert store.stats.rejected == {reason: 1}
    assert path.exists()


def test_every_single_bit_of_a_file_is_covered(tmp_path: Path) -> None:
    data = b"".join(chunk_file.dump(dataclasses.replace(build_entry(1), tensors={"k": torch.arange(3)}), created=0.0))
    for at in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(chunk_file.ChunkFileError):
            chunk_file.load(bytes(flipped))


def test_files_swapped_by_name_are_never_served(tmp_path: Path) -> None:
    store, a, b = open_disk(tmp_path), build_entry(1), build_entry(2)
    store.put(a)
    store.put(b)
    store.folder.path(a.key).write_bytes(store.folder.path(b.key).read_bytes())
    assert store.get(a.key, check_of(a)) is None
    assert store.stats.rejected == {"swapped": 1}
    assert same(store.get(b.key, check_of(b)), b)


def test_files_deleted_under_load_are_counted_misses(tmp_path: Path) -> None:
    store, entry = open_disk(tmp_path), build_entry(1)
    store.put(entry)
    store.folder.path(entry.key).unlink()
    assert store.get(entry.key, check_of(entry)) is None
    assert store.stats.rejected == {"vanished": 1}
    assert store.get(entry.key, check_of(entry)) is None
    assert store.stats.rejected == {"vanished": 1}
    assert store.bytes_held["disk"] == 0


def test_an_unreadable_file_is_a_miss_and_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, entry = open_disk(tmp_path), build_entry(1)
    store.put(entry)

    def fail(self: StoreFolder, key: str, most_bytes: int) -> bytes:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(StoreFolder, "read", fail)
        assert store.get(entry.key, check_of(entry)) is None
    assert store.stats.rejected == {"io_error": 1}
    assert same(store.get(entry.key, check_of(entry)), entry)


@pytest.mark.parametrize("step", ["stage", "publish", "sync"])
def test_a_full_disk_keeps_nothing_and_counts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    store, entry, other = open_disk(tmp_path), build_entry(1), build_entry(2)
    store.put(other)

    def fail(self: StoreFolder, *args: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StoreFolder, step, fail)
        assert not store.put(entry)
    assert store.stats.put_failures == {"disk_full": 1}
    assert same(store.get(other.key, check_of(other)), other)
    third = build_entry(3)
    assert store.put(third)
    assert store.bytes_held["disk"] == file_bytes(tmp_path)
    assert not list((tmp_path / "staging").iterdir())


def test_a_write_cut_short_leaves_nothing_in_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_disk(tmp_path)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        assert not store.put(build_entry(1))
    assert file_bytes(tmp_path) == 0


def test_a_folder_that_cannot_be_used_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot keep chunks in .*/file/kv: Not a directory"):
        DiskStore(tmp_path / "file" / "kv")

    def fail(self: StoreFolder, pieces: object) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(StoreFolder, "stage", fail)
    with pytest.raises(StoreError, match="Read-only file system"):
        DiskStore(tmp_path / "kv")


def test_a_file_system_that_cannot_sync_folders_keeps_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store = open_disk(tmp_path)
    assert store.put(build_entry(1))
    assert store.stats.put_failures == {}
    assert build_entry(1).key in open_disk(tmp_path)


def test_keys_that_are_no_hashes_never_become_paths(tmp_path: Path) -> None:
    store = open_disk(tmp_path / "kv")
    entry = dataclasses.replace(build_entry(1), key="../../../outside")
    with pytest.raises(ValueError, match="SHA-256"):
        store.put(entry)
    assert store.get(entry.key, check_of(entry)) is None
    assert entry.key not in store


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    neighbour, record = build_record(100), build_record(1, (build_record(100).content_hash,), anchor=(3,))
    store.catalog.add_many([neighbour, record])
    entry = build_entry(1, context=(3, *neighbour.token_ids))
    store.put(entry)
    store.close()
    again = open_disk(tmp_path)
    assert same(again.get(entry.key, check_of(entry)), entry)
    assert again.catalog.get(record.content_hash) == record
    assert [i.key for i in again.entries()] == [entry.key]


@pytest.mark.parametrize("fault", ["missing", "overwritten", "empty", "half of it", "of an earlier version"])
def test_a_lost_catalog_is_rebuilt_from_the_files(tmp_path: Path, fault: str) -> None:
    store = open_disk(tmp_path)
    neighbour, record = build_record(100), build_record(1, (build_record(100).content_hash,), anchor=(3,))
    store.catalog.add_many([neighbour, record])
    entries = [build_entry(1, context=(3, *neighbour.token_ids)), build_entry(7), build_entry(8, namespace="t")]
    for entry in entries:
        store.put(entry)
    held = store.bytes_held["disk"]
    store.close()
    path = tmp_path / "catalog.sqlite"
    if fault == "missing":
        path.unlink()
    elif fault == "empty":
        path.write_bytes(b"")
    elif fault == "of an earlier version":
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 1")
        connection.close()
    elif fault == "overwritten":
        path.write_bytes(os.urandom(path.stat().st_size))
    else:
        data = bytearray(path.read_bytes())
        data[4096:] = b"\xff" * (len(data) - 4096)
        path.write_bytes(data)
    again = open_disk(tmp_path)
    assert again.bytes_held["disk"] == held == file_bytes(tmp_path)
    for entry in entries:
        assert same(again.get(entry.key, check_of(entry)), entry)
    found = again.catalog.get(record.content_hash)
    assert found == record
    assert again.catalog.context_hash(found) == entries[0].context_hash
    assert again.catalog.get(neighbour.content_hash) is None
    assert [t for _, _, t in again.catalog.texts(FINGERPRINT, "")] == [record.text]


def test_a_rebuild_skips_what_is_no_chunk_file(tmp_path: Path) -> None:
    store, good, bad = open_disk(tmp_path), build_entry(1), build_entry(2)
    store.put(good)
    store.put(bad)
    store.close()
    store.folder.path(bad.key).write_bytes(b"not a chunk")
    (tmp_path / "chunks" / "zz").mkdir()
    (tmp_path / "chunks" / "zz" / "notes.txt").write_text("hello")
    (tmp_path / "catalog.sqlite").unlink()
    again = open_disk(tmp_path)
    assert list(again.keys()) == [good.key]
    assert again.bytes_held["disk"] == again.folder.size(good.key)
    assert not again.folder.path(bad.key).exists()
    assert (tmp_path / "chunks" / "zz" / "notes.txt").exists()


def test_a_chunk_given_another_context_is_not_described_by_the_old_file(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    record = store.catalog.add(build_record(1))
    store.catalog.replace(dataclasses.replace(record, anchor_ids=(5,)))
    assert not store.put(build_entry(1))
    assert store.stats.put_failures == {"context": 1}
    assert record.content_hash not in store
    assert store.put(build_entry(1, context=(5,)))


def test_two_stores_of_one_folder_share_entries_and_budget(tmp_path: Path) -> None:
    size = chunk_file.num_bytes(chunk_file.dump(build_entry(1), created=1234567890.123456)) + 40
    a, b = open_disk(tmp_path, 5 * size), open_disk(tmp_path, 5 * size)
    for number in range(20):
        entry = build_entry(number)
        writer, reader = (a, b) if number % 2 else (b, a)
        assert writer.put(entry)
        assert same(reader.get(entry.key, check_of(entry)), entry)
        assert a.bytes_held == b.bytes_held == {"disk": file_bytes(tmp_path)}
        assert file_bytes(tmp_path) <= 5 * size
    assert len(a) == len(b) >= 4


def test_a_smaller_budget_at_opening_is_kept_at_once(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    for number in range(10):
        store.put(build_entry(number))
    store.close()
    again = open_disk(tmp_path, 5000)
    assert 0 < again.bytes_held["disk"] == file_bytes(tmp_path) <= 5000


def test_use_counts_outlive_a_restart(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    hot, cold = build_entry(1), build_entry(2)
    for entry in (hot, cold):
        store.put(entry)
    for _ in range(5):
        store.get(hot.key, check_of(hot))
    store.close()
    size = file_bytes(tmp_path)
    again = open_disk(tmp_path, size - 1)
    assert list(again.keys()) == [hot.key]


def test_signed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = build_entry(1)
    plain = open_disk(tmp_path)
    plain.put(entry)
    monkeypatch.setenv("KVBOOST_STORE_SECRET", "s3cret")
    signed = open_disk(tmp_path)
    assert signed.get(entry.key, check_of(entry)) is None
    assert signed.stats.rejected == {"unsigned": 1}
    signed.put(entry)
    assert same(signed.get(entry.key, check_of(entry)), entry)
    assert same(plain.get(entry.key, check_of(entry)), entry)
    other = open_disk(tmp_path, secret=b"another")
    assert other.get(entry.key, check_of(entry)) is None


def test_a_file_holds_no_pickle_and_tells_what_it_is(tmp_path: Path) -> None:
    store, entry = open_disk(tmp_path), build_entry(1, namespace="t")
    store.put(entry)
    data = store.folder.path(entry.key).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    header = json.loads(metadata["header"])
    assert metadata["format"] == "kvboost-rag chunk"
    assert (header["key"], header["namespace"], header["fingerprint"]) == (entry.key, "t", FINGERPRINT)
    assert tuple(header["token_ids"]) == entry.token_ids


def test_the_same_entry_always_takes_the_same_bytes() -> None:
    times = (1_800_000_000.0, 1_800_000_000.1, 1_800_000_000.123456, 2_000_000_000.999)
    assert len({chunk_file.num_bytes(chunk_file.dump(build_entry(1), created=time)) for time in times}) == 1


def test_a_forged_seal_in_the_text_is_not_taken_for_the_seal(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    record = dataclasses.replace(build_record(1), text='x","seal":"' + "0" * 72 + '"')
    store.catalog.add(record)
    entry = dataclasses.replace(build_entry(1), meta={'a","seal":"' + "0" * 72: "b"})
    assert store.put(entry)
    assert same(store.get(entry.key, check_of(entry)), entry)


def test_a_file_system_that_does_not_say_its_size_needs_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of 0 bytes would keep nothing, and evict what is there, even for a command that only looks."""
    entry, disk = build_entry(1), open_disk(tmp_path)
    assert disk.put(entry)
    disk.close()
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(total=0))
    with pytest.raises(ValueError, match=r"does not say its size.*--disk-budget"):
        DiskStore(tmp_path)
    for opened in (DiskStore(tmp_path, BUDGET), options.open_disk(tmp_path)):
        assert entry.key in opened
        opened.close()


def test_other_threads_go_on_while_a_write_waits_for_another_program(tmp_path: Path) -> None:
    store = TieredStore(MemoryStore(BUDGET), open_disk(tmp_path))
    other = sqlite3.connect(store.catalog.database.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    entry, at_once = build_entry(1), threading.Event()
    store.put(entry)  # written by a thread of the store's own, when the other program lets it

    def use() -> None:
        for _ in range(50):
            store.pin(entry.key)
            assert store.catalog.version().last_seq == 0
            assert store.get(entry.key, check_of(entry)) is not None
            store.unpin(entry.key)
            time.sleep(0.001)
        at_once.set()

    threading.Thread(target=use, daemon=True).start()
    assert at_once.wait(10)
    with waiting_at_most(0.05):
        for _ in range(3):  # 0.05 seconds in all
            with pytest.raises(StoreBusyError, match="locked"):
                store.catalog.add(build_record(2))
    other.execute("ROLLBACK")
    store.close()
    assert entry.key in store.tiers[-1]
