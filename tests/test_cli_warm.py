"""`warm` and `rewarm`: in step with a folder, in several processes, without weights; stopped, killed and gone on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from contextlib import suppress

import numpy as np
import pytest

from kvboost_rag import cli
from kvboost_rag.cli.jobs import JobError, encode_in_processes, worker_specs
from kvboost_rag.cli.options import StoreChoice
from kvboost_rag.cli.session import ModelChoice
from kvboost_rag.cli.watch import FolderWatch
from kvboost_rag.config import EncodingConfig
from kvboost_rag.engine import KVBoost
from kvboost_rag.models.load import load_model
from kvboost_rag.stores import open_store

WORDS = ("store", "tide", "apple", "clock")


class Words:
    """An embedder that counts a few words."""

    def embed(self, texts):
        return np.array([[text.count(word) + 0.01 for word in WORDS] for text in texts])


@pytest.fixture(scope="module")
def model_folder(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    loaded = tiny_model("llama", num_hidden_layers=2, max_position_embeddings=4096)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("kvboost_rag.retrieval.MiniLM", Words)

    def run_command(*arguments):
        monkeypatch.setattr("sys.argv", ["kvboost-rag", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        captured = capsys.readouterr()
        return exit_info.value.code or 0, captured.out, captured.err

    return run_command


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
    assert after["encoded"] >= second["encode"], "chunks encoded behind forgotten ones are encoded again"
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
    names = [os.path.basename(source) for _, source in catalog(lambda store: store.catalog.sources())]
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


@pytest.fixture
def job(model_folder, tmp_path):
    """Specs of two processes and the units of ten known chunks, none encoded."""
    texts = [f"Chunk number {n} tells of the {WORDS[n % 4]}. " * 5 for n in range(10)]
    encoding = EncodingConfig(neighbours=0)
    with KVBoost(load_model(model_folder), store=tmp_path / "kv", encoding=encoding) as engine:
        keys = engine.warm(texts, encode=False).content_hashes
        assert len(engine.store) == 0
    specs = worker_specs(ModelChoice(model_folder), StoreChoice(tmp_path / "kv"), "", encoding, 2)
    return specs, [(key,) for key in keys], tmp_path / "kv"


def keys_in(folder):
    store = open_store(folder)
    try:
        return set(store.keys())
    finally:
        store.close()


def test_a_dying_process_does_not_lose_the_rest(job):
    specs, units, folder = job
    killed = []

    def kill_one(state):
        if state.num_done and not killed:
            killed.append(state.pids[0])
            os.kill(state.pids[0], signal.SIGKILL)

    state = encode_in_processes(specs, units, kill_one)
    assert killed
    assert keys_in(folder) == {key for (key,) in units}
    assert state.num_encoded + state.num_already_stored == len(units)


def test_all_processes_die_and_the_next_run_goes_on(job):
    specs, units, folder = job

    def kill_all(state):
        if state.num_done:
            for pid in state.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    with pytest.raises(JobError, match=r"of 10 chunks were not encoded"):
        encode_in_processes(specs, units, kill_all)
    before = keys_in(folder)
    assert 0 < len(before) < len(units)
    state = encode_in_processes(specs[:1], units)
    assert state.num_already_stored == len(before)
    assert keys_in(folder) == {key for (key,) in units}


def test_ctrl_c_lets_each_process_finish_its_chunk(job):
    specs, units, folder = job
    pids = set()

    def interrupt(state):
        pids.update(state.pids)
        if state.num_done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_in_processes(specs, units, interrupt)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert 0 < len(keys_in(folder)) < len(units)
    assert encode_in_processes(specs, units).num_done == len(units)


def test_a_model_that_cannot_be_loaded_is_named(job, tmp_path):
    specs, units, _ = job
    broken = [specs[0].__class__(ModelChoice(str(tmp_path / "none/x")), *list(vars(specs[0]).values())[1:])]
    with pytest.raises(JobError, match="no such folder"):
        encode_in_processes(broken, units)


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
