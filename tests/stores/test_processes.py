"""Several processes on one folder, and processes that are killed at any moment."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kvboost_rag.stores import DiskStore
from kvboost_rag.stores.disk.folder import StoreFolder
from kvboost_rag.stores.disk.owner_lock import living_owners
from kvboost_rag.stores.verify import verify
from tests.stores.conftest import build_entry, build_record, check_of, same
from tests.stores.test_disk import file_bytes

WRITER = Path(__file__).with_name("writer.py")
BUDGET = 15_000


def start_writer(folder: Path, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(WRITER), str(folder), str(BUDGET), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_killed_while_writing_never_leave_a_bad_entry(tmp_path: Path) -> None:
    """Children are forked from this process, which has imported everything: an interpreter's start takes seconds."""
    rng = random.Random(0)
    for round_number in range(200):
        opened, tell = os.pipe()
        child = forked(lambda n=round_number, tell=tell: write_until_killed(tmp_path, n, tell))
        os.close(tell)
        assert os.read(opened, 1) == b"."
        time.sleep(rng.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(opened)
        if round_number % 20 == 19:
            check_all(tmp_path)
    check_all(tmp_path)
    assert file_bytes(tmp_path) > BUDGET // 2


def forked(work) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return child


def write_until_killed(folder: Path, seed: int, tell: int) -> None:
    rng = random.Random(seed)
    store = DiskStore(folder, BUDGET)
    os.write(tell, b".")
    while True:
        number = rng.randrange(30)
        store.catalog.add(build_record(number))
        store.put(build_entry(number))
        if rng.random() < 0.1:
            store.delete(build_entry(rng.randrange(30)).key)


def check_all(folder: Path) -> None:
    """The account is exact, every entry is whole, nothing is left in staging."""
    store = DiskStore(folder, BUDGET)
    assert verify(store).problems == []
    assert store.bytes_held["disk"] == file_bytes(folder) <= BUDGET
    assert not list((folder / "staging").iterdir())
    for number in range(30):
        entry = build_entry(number)
        found = store.get(entry.key, check_of(entry))
        assert found is None or same(found, entry)
    assert not store.stats.rejected
    store.close()


def test_processes_that_share_a_folder_serve_only_whole_entries_within_one_budget(tmp_path: Path) -> None:
    watcher = DiskStore(tmp_path, BUDGET)
    writers = [start_writer(tmp_path, seed) for seed in range(2)]
    try:
        for writer in writers:
            assert writer.stdout.readline() == "ready\n"
        end = time.monotonic() + 2
        while time.monotonic() < end:
            assert watcher.bytes_held["disk"] <= BUDGET
            for number in range(30):
                entry = build_entry(number)
                found = watcher.get(entry.key, check_of(entry))
                assert found is None or same(found, entry)
        writers[0].kill()
        time.sleep(0.2)
        assert writers[1].poll() is None
    finally:
        for writer in writers:
            writer.kill()
        said = [writer.communicate()[0] for writer in writers]
    assert said == ["", ""]
    assert watcher.stats.hits > 0
    assert not watcher.stats.rejected.keys() - {"vanished"}
    watcher.close()
    check_all(tmp_path)


def test_a_forked_child_uses_a_connection_of_its_own(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1_000_000)
    store.catalog.add_many([build_record(n) for n in (1, 2, 3)])
    store.put(build_entry(1))
    parents = store.catalog.database._connection

    def work() -> None:
        fine = store.put(build_entry(2)) and len(store) == 2
        os._exit(0 if fine and store.catalog.database._connection is not parents else 3)

    child = forked(work)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.put(build_entry(3))
    assert len(store) == 3
    assert verify(store).problems == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root")
def test_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("this container may not mount")
    try:
        store = DiskStore(tmp_path, 10**9)
        large = torch.arange(50_000, dtype=torch.float32)
        entries = [dataclasses.replace(build_entry(n), tensors={"keys": large + n}) for n in range(60)]
        kept = [entry for entry in entries if store.put(entry)]
        assert 0 < len(kept) < 60
        assert store.stats.put_failures == {"disk_full": 60 - len(kept)}
        assert all(same(store.get(e.key, check_of(e)), e) for e in kept)
        for entry in kept[: len(kept) // 2]:
            assert store.delete(entry.key)
        assert store.put(entries[-1])
        assert store.bytes_held["disk"] == file_bytes(tmp_path)
        store.close()
        again = DiskStore(tmp_path, 10**9)
        assert {p.what for p in verify(again).problems} == {"unknown chunk"}  # they were never in the catalog
        again.close()
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_what_a_process_stages_that_opens_while_the_dead_are_cleared_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens right after the living were listed: its name is not among them, and its file is its own all the same."""
    folder = StoreFolder(tmp_path)
    opened: list[StoreFolder] = []
    staged: list[Path] = []

    def list_then_open(owners: Path) -> set[str]:
        alive = living_owners(owners)
        opened.append(StoreFolder(tmp_path))
        staged.append(opened[0].stage([b"its chunk"]))
        return alive

    monkeypatch.setattr("kvboost_rag.stores.disk.folder.living_owners", list_then_open)
    folder.clear_after_dead_owners()
    assert staged[0].read_bytes() == b"its chunk"
