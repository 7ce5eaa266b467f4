"""Files and rows that nobody of ours wrote, secrets, full disks, forks, clocks: always one miss, never the end."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest
import torch

from kvboost_rag.cli.inspect import inspect
from kvboost_rag.kv.keys import content_hash
from kvboost_rag.stores import DiskStore, MemoryStore, StoreError, TieredStore
from kvboost_rag.stores.disk import chunk_file
from kvboost_rag.stores.disk.seal import seal
from kvboost_rag.stores.maintenance import evict_all, evict_unused
from kvboost_rag.stores.verify import gc, verify
from tests.stores.conftest import FINGERPRINT, build_entry, build_record, check_of, same

BUDGET = 1_000_000
GOOD, BAD = build_entry(1), build_entry(50)


def with_header(data: bytes, change, sealed: bool = True) -> bytes:
    """A chunk file whose inner header text is changed; with seals that fit, as an attacker without the secret could."""
    length = int.from_bytes(data[:8], "little")
    layout = json.loads(data[8 : 8 + length])
    meta = layout["__metadata__"]
    meta["header"] = change(meta["header"])
    if sealed:
        meta["header_seal"] = seal([meta["header"].encode()], None).decode()
        meta["seal"] = "0" * 72
    head = json.dumps(layout, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    whole = len(head).to_bytes(8, "little") + head + data[8 + length :]
    if sealed:
        at = whole.index(b'"seal":"') + 8
        before, after = whole[:at], whole[at + 72 :]
        whole = before + seal([before, after], None) + after
    return whole


def replaced(old: str, new: str):
    def change(header: str) -> str:
        assert old in header
        return header.replace(old, new, 1)

    return change


CHANGES = {
    "a comma became a point": (replaced("[50,51", "[50.51"), False),
    "a float among the ids": (replaced("[50,51", "[50.51"), True),
    "infinity": (replaced("[50,51", "[Infinity"), True),
    "10^400": (replaced("[50,51", "[1" + "0" * 400), True),
    "10^9000": (replaced("[50,51", "[1" + "0" * 9000), True),
    "negative": (replaced("[50,51", "[-1"), True),
    "ids as text": (replaced("[50,51,52,53,54]", '"ids"'), True),
    "ids nested deeply": (replaced("[50,51", "[" * 100_000), True),
    "half a character": (replaced('"namespace":""', '"namespace":"\\ud800"'), True),
    "no object": (lambda header: "[]", True),
    "no JSON": (lambda header: "{", True),
    "created in the year 10^12": (replaced('"created_ms":', '"created_ms":9999999999999999999'), True),
}


@pytest.mark.parametrize("rebuild", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_header_is_one_miss(tmp_path: Path, change: str, rebuild: bool) -> None:
    store = DiskStore(tmp_path, BUDGET)
    assert store.put(GOOD)
    assert store.put(BAD)
    path = store.folder.path(BAD.key)
    path.write_bytes(with_header(path.read_bytes(), *CHANGES[change]))
    if rebuild:
        store.close()
        (tmp_path / "catalog.sqlite").unlink()
        store = DiskStore(tmp_path, BUDGET)
    assert store.get(BAD.key, check_of(BAD)) is None
    assert same(store.get(GOOD.key, check_of(GOOD)), GOOD)
    assert BAD.key not in store
    gc(store)
    assert {p.what for p in verify(store).problems} <= {"unknown chunk"}


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_sparse_file(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(40 << 30)


def a_sparse_file_with_a_head(path: Path) -> None:
    path.write_bytes(b"".join(chunk_file.dump(BAD, time.time())))
    with open(path, "r+b") as file:
        file.truncate(40 << 30)


def a_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("rebuild", [False, True])
@pytest.mark.parametrize(
    "make", [a_pipe, a_link_to_a_device, a_sparse_file, a_sparse_file_with_a_head, a_folder], ids=lambda f: f.__name__
)
def test_what_is_no_chunk_file_is_one_miss_and_is_not_read(tmp_path: Path, make, rebuild: bool) -> None:
    store = DiskStore(tmp_path, BUDGET)
    store.catalog.add_many([build_record(1), build_record(50)])
    store.put(GOOD)
    store.put(BAD)
    path = store.folder.path(BAD.key)
    path.unlink()
    make(path)
    if rebuild:
        store.close()
        (tmp_path / "catalog.sqlite").unlink()
        store = DiskStore(tmp_path, BUDGET)
    assert store.get(BAD.key, check_of(BAD)) is None
    assert store.stats.misses == 1
    assert same(store.get(GOOD.key, check_of(GOOD)), GOOD)
    verify(store)
    gc(store)
    assert same(store.get(GOOD.key, check_of(GOOD)), GOOD)
    store.close()


def test_a_rebuild_believes_only_signed_records(tmp_path: Path) -> None:
    """An attacker's files would put a text of theirs in front of a victim's document."""
    attacker = DiskStore(tmp_path, BUDGET)
    attacker.catalog.add_many([build_record(100), dataclasses.replace(build_record(1), text="forged")])
    attacker.put(build_entry(1))
    attacker.close()
    (tmp_path / "catalog.sqlite").unlink()
    store = DiskStore(tmp_path, BUDGET, secret=b"s3cret")
    assert len(store.catalog) == 0
    assert list(store.entries()) == []
    assert store.folder.path(build_entry(1).key).exists()  # somebody else's: left alone
    store.catalog.add(build_record(1))
    assert store.put(build_entry(1))
    store.close()
    (tmp_path / "catalog.sqlite").unlink()
    again = DiskStore(tmp_path, BUDGET, secret=b"s3cret")
    assert again.catalog.get(build_entry(1).key) == build_record(1)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE files SET key = 'zz' || substr(key, 3)",
        "UPDATE files SET key = x'ff' WHERE seq = 1",
        "UPDATE files SET meta = '{'",
        "UPDATE files SET namespace = CAST(x'ff' AS TEXT)",
        "UPDATE chunks SET content_hash = 'zz' || substr(content_hash, 3)",
        "UPDATE chunks SET text = CAST(x'ff' AS TEXT)",
        "UPDATE sources SET source_id = CAST(x'fffe' AS TEXT)",
        "UPDATE contexts SET neighbour = CAST(x'ff' AS TEXT)",
        "UPDATE anchors SET token_ids = 'text'",
    ],
)
def test_damaged_rows_are_dropped_and_tools_go_on(tmp_path: Path, damage: str) -> None:
    store = DiskStore(tmp_path, BUDGET)
    neighbour, record = build_record(100), build_record(1, (build_record(100).content_hash,))
    store.catalog.add_many([neighbour, record])
    store.put(build_entry(100))
    store.put(build_entry(1, context=neighbour.token_ids))
    store.catalog.sources.link(FINGERPRINT, "", "a.md", [neighbour.content_hash, record.content_hash])
    with store.catalog.database.transaction() as db:
        db.execute(damage)
    list(store.entries())
    list(store.catalog.texts(FINGERPRINT, ""))
    store.catalog.get_many(store.catalog.hashes())
    store.close()
    again = DiskStore(tmp_path, BUDGET)
    verify(again)
    gc(again)
    assert verify(again).problems == []
    evict_all(again)
    assert len(again) == len(again.catalog) == 0
    assert again.bytes_held == {"disk": 0}


def test_a_rebuild_killed_before_its_end_is_done_again(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, BUDGET)
    store.catalog.add(build_record(1))
    store.put(GOOD)
    store.close()
    (tmp_path / "catalog.sqlite").unlink()
    child = os.fork()
    if child == 0:
        from kvboost_rag.stores.disk import recovery

        recovery.rebuild = lambda *args: os._exit(9)
        DiskStore(tmp_path, BUDGET)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    again = DiskStore(tmp_path, BUDGET)
    assert again.catalog.get(GOOD.key) == build_record(1)
    assert same(again.get(GOOD.key, check_of(GOOD)), GOOD)


def test_a_forked_child_leaves_the_parents_store_alone(tmp_path: Path) -> None:
    store = TieredStore(MemoryStore(BUDGET), DiskStore(tmp_path, BUDGET))
    store.put(GOOD)
    store.flush()
    owners = sorted((tmp_path / "owners").iterdir())
    child = os.fork()
    if child == 0:
        try:
            assert store.is_inherited
            assert same(store.get(GOOD.key, check_of(GOOD)), GOOD)
            assert store.put(BAD)  # without the thread that stayed in the parent
            store.flush()
            store.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sorted((tmp_path / "owners").iterdir()) == owners
    assert DiskStore(tmp_path, BUDGET).get(BAD.key, check_of(BAD)) is not None
    assert sorted((tmp_path / "owners").iterdir())[0] or owners
    assert same(store.get(BAD.key, check_of(BAD)), BAD)
    assert store.put(build_entry(200))
    store.close()
    assert not [path for path in owners if path.exists()]


@pytest.mark.parametrize("make", [lambda folder: DiskStore(folder, BUDGET), lambda folder: MemoryStore(BUDGET)])
def test_a_clock_that_ran_ahead_hides_nothing_from_evicting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make
) -> None:
    real = time.time
    store = make(tmp_path)
    monkeypatch.setattr(time, "time", lambda: real() + 1e9)
    store.put(GOOD)
    store.get(GOOD.key, check_of(GOOD))
    store.flush()
    monkeypatch.setattr(time, "time", real)
    assert evict_unused(store, 0).num_entries == 1
    assert len(store) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root")
@pytest.mark.parametrize("tool", ["evict all", "evict unused", "gc", "read", "inspect"])
def test_tools_work_on_a_full_disk_and_free_space(
    tmp_path: Path, tool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this container may not mount")
    try:
        store = DiskStore(tmp_path / "kv", 10**9)
        entries = [large_entry(n) for n in range(10)]
        store.catalog.add_many([large_record(n) for n in range(10)])
        assert all(store.put(entry) for entry in entries)
        store.close()
        fill_up(tmp_path / "ballast")
        store = DiskStore(tmp_path / "kv", 10**9)
        assert len(store.catalog) == 10
        assert all(same(store.get(entry.key, check_of(entry)), entry) for entry in entries)
        assert verify(store).problems == []
        fill_up(tmp_path / "more")
        if tool == "inspect":  # the command, beside an open store and as the first to open it
            for _ in range(2):
                inspect(tmp_path / "kv", True)
                assert re.search(r"\(defa.*│ +10 │ +10 │ +0 │", capsys.readouterr().out)
                store.close()
        elif tool == "read":
            assert not store.put(large_entry(11))
            with pytest.raises(StoreError, match="no room for the catalog"):
                store.catalog.add_many([large_record(n) for n in range(20, 3000)])
        else:
            if tool == "gc":
                path = store.folder.path(entries[0].key)
                path.write_bytes(path.read_bytes()[:-9])
                gc(store)
            else:
                evict_all(store) if tool == "evict all" else evict_unused(store, 0)
                assert len(store) == 0
            assert os.statvfs(tmp_path).f_bavail * 4096 > 100_000
            assert tool == "gc" or store.put(large_entry(12))
        store.close()
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def large_entry(number: int):
    ids = tuple(range(number * 100, number * 100 + 50))
    key = content_hash(FINGERPRINT, "", ids)
    tensors = {"keys": torch.arange(40_000, dtype=torch.float32) + number}
    return dataclasses.replace(build_entry(1), key=key, token_ids=ids, tensors=tensors)


def large_record(number: int):
    entry = large_entry(number)
    return dataclasses.replace(build_record(1), content_hash=entry.key, token_ids=entry.token_ids, text="x" * 2000)


def fill_up(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                pass


def test_errors_of_sqlite_come_out_as_what_they_mean(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, BUDGET)
    with pytest.raises(StoreError, match="cannot be used"):
        store.catalog.database.read("SELECT * FROM nowhere")
    store.close()
    with sqlite3.connect(tmp_path / "catalog.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="version 99"):
        DiskStore(tmp_path, BUDGET)
    (tmp_path / "catalog.sqlite").unlink()
    (tmp_path / "catalog.sqlite").symlink_to("/dev/full")
    with pytest.raises(StoreError, match="not a regular file"):
        DiskStore(tmp_path, BUDGET)
