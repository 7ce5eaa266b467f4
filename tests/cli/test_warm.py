"""`warm` and `rewarm`: in step with a folder, in several processes, without weights; stopped, killed and gone on."""

from __future__ import annotations

import os
import re
import shutil
import time

import numpy as np
import pytest

from kvboost_rag.cli.watch import FolderWatch
from kvboost_rag.stores import open_store

WORDS = ("store", "tide", "apple", "clock")


class Words:
    """An embedder that counts a few words."""

    def embed(self, texts):
        return np.array([[text.count(word) + 0.01 for word in WORDS] for text in texts])


@pytest.fixture(autouse=True)
def small_embedder(monkeypatch):
    monkeypatch.setattr("kvboost_rag.indexing.retrieval.MiniLM", Words)


@pytest.fixture
def documents(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    for number, word in enumerate(WORDS):
        (folder / f"{word}.txt").write_text(f"The {word} of number {number}. " * 9)
    return folder


@pytest.fixture
def warm(run, documents, model_folder):
    def run_warm(*more, neighbours=1):
        where = ("--model", model_folder, "--chunk-tokens", 64, "--neighbours", neighbours)
        return run("warm", documents, *where, *more)

    return run_warm


@pytest.fixture
def catalog(tmp_path):
    """`catalog(read)`: what `read` says of the default store, opened and closed again."""

    def look(read):
        store = open_store(tmp_path / "cache" / "stores" / "default")
        try:
            return read(store)
        finally:
            store.close()

    return look


def neighbours_of(store):
    return {key: store.catalog.get(key).neighbours for key in store.catalog.hashes()}


def summary(output):
    found = re.findall(r"(\d+) files, (\d+) chunks, .*: (\d+) encoded, (\d+) stored already, (\d+) dropped", output)
    assert found, output
    return [dict(zip(("files", "chunks", "encoded", "stored", "dropped"), map(int, f), strict=True)) for f in found]


def forecast(output):
    found = re.search(
        r"(\d+) files new, (\d+) changed, (\d+) unchanged, (\d+) gone; (\d+) chunks with .*, (\d+) are stored, (\d+)",
        output,
    )
    assert found, output
    names = ("new", "changed", "unchanged", "gone", "encode", "stored", "forget")
    return dict(zip(names, map(int, found.groups()), strict=True))


def test_a_dry_run_loads_no_weights_changes_nothing_and_is_right(warm, documents, catalog, monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    with monkeypatch.context() as patch:
        patch.setattr("kvboost_rag.models.load.load_model", refuse)
        code, out, err = warm("--dry-run")
        assert code == 0, err
        first = forecast(out)
        assert not (tmp_path / "cache" / "stores").exists()
    done = summary(warm()[1])[0]
    assert (first["new"], first["encode"]) == (done["files"], done["encoded"])
    (documents / "tide.txt").write_text("The tide comes back. " * 9)
    (documents / "clock.txt").unlink()
    (documents / "apple.txt").write_text("")
    (documents / "moon.txt").write_text("The moon is new. " * 9)
    with monkeypatch.context() as patch:
        patch.setattr("kvboost_rag.models.load.load_model", refuse)
        second = forecast(warm("--dry-run")[1])
    assert catalog(lambda store: len(store.catalog)) == done["chunks"]
    assert {k: second[k] for k in ("new", "changed", "unchanged", "gone")} == {
        "new": 1,
        "changed": 1,
        "unchanged": 1,
        "gone": 2,
    }
    after = summary(warm()[1])[0]
    assert after["encoded"] >= second["encode"], "chunks encoded after forgotten ones are encoded again"
    assert after["dropped"] == second["forget"]


def test_watch_follows_files_and_ends_at_ctrl_c(warm, documents, monkeypatch, catalog):
    hidden = documents.with_name("unmounted")

    def change_file():
        (documents / "tide.txt").write_text("Another tide. " * 9)

    def add_file():
        (documents / "new.txt").write_text("A new apple. " * 9)

    def remove_file():
        (documents / "clock.txt").unlink()
        (documents / "store.txt").write_bytes(b"\0\1")  # no text any more

    def unmount():
        documents.rename(hidden)

    def mount():
        hidden.rename(documents)

    def stop():
        raise KeyboardInterrupt

    steps = iter([change_file, None, None, add_file, None, remove_file, None, unmount, None, mount, None, None, stop])

    def sleep(_):
        step = next(steps)
        if step is not None:
            step()

    monkeypatch.setattr("kvboost_rag.cli.watch.watch.__defaults__", (sleep,))
    code, out, err = warm("--watch")
    assert code == 0, err
    reports = summary(out)
    assert [r["files"] for r in reports] == [4, 1, 1, 0], "the unmounted folder changes nothing"
    assert reports[1]["encoded"] > 0
    assert reports[1]["dropped"] > 0
    assert reports[3]["dropped"] > 0
    assert "missing" in out
    assert "stopped watching" in out
    names = [os.path.basename(source) for _, source in catalog(lambda store: store.catalog.sources.all())]
    assert sorted(names) == ["apple.txt", "new.txt", "tide.txt"]


def test_a_file_that_is_still_written_to_waits(tmp_path):
    watch = FolderWatch([tmp_path])
    file = tmp_path / "a.txt"
    for length in (1, 2, 3):
        file.write_text("x" * length)
        assert watch.poll() is None
    changes = watch.poll()
    assert changes is not None
    assert [path.name for path in changes.changed.values()] == ["a.txt"]
    assert watch.poll() is not None, "until it is dealt with"
    watch.done()
    assert watch.poll() is None
    shutil.rmtree(tmp_path)
    assert watch.poll() is None
    assert watch.poll() is None


def test_several_processes_write_each_chunk_once(warm, catalog):
    code, out, err = warm("--jobs", 2)
    assert code == 0, err
    done = summary(out)[0]
    assert done["encoded"] == done["chunks"]
    assert re.search(r"\d\.\d tokens forwarded per document token", out)
    assert catalog(lambda store: set(store.keys()) == set(store.catalog.hashes()))
    again = summary(warm("--jobs", 2)[1])[0]
    assert (again["encoded"], again["stored"]) == (0, done["chunks"])
    assert summary(warm()[1])[0]["encoded"] == 0


def test_rewarm_reassigns_where_it_is_worth_it(warm, run, documents, model_folder, catalog):
    arguments = ("rewarm", "--model", model_folder, "--neighbours", 1)
    code, _, err = run(*arguments)
    assert code == 1
    assert "nothing has been warmed" in err
    for word in WORDS:  # one chunk each, about nothing that the others are about
        (documents / f"{word}.txt").write_text(f"The {word} stands alone.")
    warm()
    assert "no need" in run(*arguments)[1]
    (documents / "late.txt").write_text("The store is not alone.")
    (documents / "later.txt").write_text("The clock is not alone.")
    warm()
    before = catalog(neighbours_of)
    code, out, err = run(*arguments, "--dry-run", "--need", 1)
    assert code == 0, err
    found = re.search(r"(\d+) would get other neighbours, (\d+) \(\d+%\) are worth", out)
    assert found, out
    assert int(found[2]) > 0
    assert catalog(neighbours_of) == before
    code, out, err = run(*arguments, "--need", 1)
    assert code == 0, err
    assert f"{found[2]} chunks encoded again" in out
    after = catalog(neighbours_of)
    assert sum(after[key] != before[key] for key in after) == int(found[2])
    assert "no need" in run(*arguments, "--need", 1)[1]
    assert summary(warm()[1])[0]["encoded"] == 0, "what was reassigned was encoded again at once"


def test_watch_settles_within_two_looks_of_real_time(tmp_path):
    watch = FolderWatch([tmp_path])
    (tmp_path / "a.txt").write_text("a")
    deadline = time.monotonic() + 5
    while (changes := watch.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert changes is not None


def test_shards_on_machines_with_a_shared_store_encode_each_chunk_once(warm, tmp_path, monkeypatch, documents):
    pytest.importorskip("obstore")
    assert warm("--store", tmp_path / "whole")[0] == 0
    monkeypatch.setenv("KVBOOST_SHARED_STORE", f"file://{tmp_path}/objects")
    encoded, known = [], []
    for index in range(3):
        code, out, err = warm("--store", tmp_path / f"machine-{index}", "--shard", f"{index}/3")
        assert code == 0, err
        encoded.append(int(re.search(r"(\d+) encoded", out)[1]))
    assert " 0 encoded" in warm("--store", tmp_path / "machine-0", "--shard", "1/3")[1]
    monkeypatch.delenv("KVBOOST_SHARED_STORE")
    for name in ("whole", "machine-0", "machine-2"):
        store = open_store(tmp_path / name)
        known.append({r.text: r.neighbours for r in store.catalog.get_many(store.catalog.hashes()).values()})
        store.close()
    assert known[0] == known[1] == known[2]
    assert sum(encoded) == len(known[0])
    assert max(encoded) < len(known[0])


@pytest.mark.parametrize("shard", ["3/3", "1", "a/b", "-1/3", "1/0"])
def test_a_shard_that_is_none_is_refused(warm, shard):
    code, _, err = warm("--shard", shard)
    assert code == 1
    assert "expected I/N" in err
