"""Warming on Ray: the KV of plain warming, whoever dies meanwhile. Each encoding is noted in a file by who does it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

pytestmark = pytest.mark.slow

from kvboost_rag.config import EncodingConfig  # noqa: E402
from kvboost_rag.engine import KVBoost  # noqa: E402
from kvboost_rag.indexing import retrieval  # noqa: E402
from kvboost_rag.indexing.ray import ActorPool, RayWarmError, warm_dataset  # noqa: E402
from kvboost_rag.indexing.source_texts import SourceTexts  # noqa: E402
from kvboost_rag.stores import open_store  # noqa: E402

ROOT = Path(__file__).parents[2]
WORDS = ("store", "tide", "clock")
TEXTS = [f"Chunk {n} says that the {w} of number {n * n} is kept." for n in range(8) for w in WORDS]
ROWS = [{"text": text, "doc": f"doc {n // 6}"} for n, text in enumerate(TEXTS)]
POOL = ActorPool(2, num_cpus=0.5)


class Words:
    """An embedder that counts a few words."""

    def embed(self, texts: Any) -> Any:
        return np.array([[text.count(word) + 0.01 for word in WORDS] for text in texts])


@contextmanager
def opened(model: str, folder: Path, pause_s: float = 0.0, note: Path | None = None) -> Iterator[KVBoost]:
    """An engine that writes a line for every chunk that it encodes, once it is stored."""
    from kvboost_rag.models.load import load_model, with_digests

    retrieval.MiniLM = Words  # type: ignore[misc,assignment]
    store = open_store(folder, memory_bytes=10**7, disk_bytes=10**9)
    encoding = EncodingConfig(neighbours=2)
    with KVBoost(with_digests(load_model(model)), store=store, encoding=encoding) as engine:
        if note is not None:
            watch(engine, pause_s, note)
        yield engine


def watch(engine: Any, pause_s: float, note: Path) -> None:
    plain = engine.fetcher.encode_many

    def encode_many(records: Any) -> Any:
        time.sleep(pause_s)
        found = plain(records)
        engine.store.flush()
        with note.open("a") as file:
            file.writelines(f"{os.getpid()} {record.content_hash}\n" for record in records)
        return found

    engine.fetcher.encode_many = encode_many


def encodings(note: Path) -> Counter[str]:
    return Counter(line.split()[1] for line in note.read_text().splitlines()) if note.exists() else Counter()


def contents(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    store = open_store(folder)
    found = {}
    for key in store.catalog.hashes():
        entry = store.load(key)[0]
        assert entry is not None, "a chunk is lost"
        found[key] = entry.tensors
    store.close()
    return found


@pytest.fixture(autouse=True)
def small_embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "MiniLM", Words)  # and back afterwards


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=10**8,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}},
    )
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def plain(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("plain") / "kv"
    with pytest.MonkeyPatch.context() as patch, opened(model_folder, folder) as engine:
        patch.setattr(retrieval, "MiniLM", Words)
        documents: dict[str, list[str]] = {}
        for row in ROWS:
            documents.setdefault(row["doc"], []).append(row["text"])
        engine.index.add_many({name: SourceTexts(texts) for name, texts in documents.items()})
        assert any(r.neighbours for r in engine.store.catalog.get_many(engine.store.catalog.hashes()).values())
    return contents(folder)


def assert_same(found: dict[str, dict[str, torch.Tensor]], plain: dict[str, dict[str, torch.Tensor]]) -> None:
    assert found.keys() == plain.keys()
    for key, tensors in plain.items():
        assert found[key].keys() == tensors.keys()
        assert all(torch.equal(found[key][name], tensor) for name, tensor in tensors.items())


def test_actors_store_the_bits_of_plain_warming_and_a_second_run_nothing(
    cluster: None, model_folder: str, tmp_path: Path, plain: Any
) -> None:
    opening = partial(opened, model_folder, tmp_path / "kv", 0.0, tmp_path / "note")
    seen = []
    report = warm_dataset(ray.data.from_items(ROWS), opening, POOL, source="doc", progress=seen.append)
    assert (report.num_encoded, report.num_already_stored, report.num_failed) == (24, 0, 0)
    assert report.num_bytes > 0
    assert [state.num_done for state in seen][-1] == seen[-1].num_chunks == 24
    assert seen[-1].tokens_done == seen[-1].num_tokens == report.chunk_tokens
    assert_same(contents(tmp_path / "kv"), plain)
    again = warm_dataset(ROWS, opening, POOL, source="doc")
    assert (again.num_encoded, again.num_already_stored) == (0, 24)
    assert set(encodings(tmp_path / "note").values()) == {1}


def test_an_actor_that_is_killed_costs_the_chunk_it_was_at(
    cluster: None, model_folder: str, tmp_path: Path, plain: Any
) -> None:
    note = tmp_path / "note"
    killed = []

    def kill_one(state: Any) -> None:
        if not killed:
            killed.append(int(note.read_text().splitlines()[-1].split()[0]))
            os.kill(killed[0], signal.SIGKILL)

    opening = partial(opened, model_folder, tmp_path / "kv", 0.1, note)
    report = warm_dataset(ROWS, opening, POOL, source="doc", progress=kill_one)
    assert killed
    assert report.num_encoded + report.num_already_stored == 24
    assert_same(contents(tmp_path / "kv"), plain)
    assert set(encodings(note).values()) == {1}, "a chunk was encoded again after it was stored"


DRIVER = """
import sys
sys.path.insert(0, {root!r})
import ray
from functools import partial
from pathlib import Path
from tests.indexing import test_ray as here
if __name__ == "__main__":
    folder = Path({folder!r})
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
    opening = partial(here.opened, {model!r}, folder / "kv", 0.2, folder / "note")
    print(here.warm_dataset(here.ROWS, opening, here.POOL, source="doc").num_encoded)
"""


def test_a_driver_that_is_killed_and_started_again_encodes_the_rest(
    cluster: None, model_folder: str, tmp_path: Path, plain: Any
) -> None:
    note = tmp_path / "note"
    code = DRIVER.format(root=str(ROOT), folder=str(tmp_path), model=model_folder)
    # A Ray of its own, which ends with it.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "RAY_ADDRESS": "local",
        "KVBOOST_FULL_BELOW": "0",
    }
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_until(lambda: sum(encodings(note).values()) >= 4, driver, tmp_path / "log")
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    pids = {int(line.split()[0]) for line in note.read_text().splitlines()}
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))  # Ray ends a dead driver's actors
    before = encodings(note)
    assert 4 <= len(before) < 24
    report = warm_dataset(ROWS, partial(opened, model_folder, tmp_path / "kv", 0.0, note), POOL, source="doc")
    assert report.num_encoded + report.num_already_stored == 24
    assert report.num_already_stored >= len(before)
    assert_same(contents(tmp_path / "kv"), plain)
    assert set(encodings(note).values()) == {1}


def wait_until(done: Callable[[], bool], process: Any = None, log: Path | None = None, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        said = log.read_text() if log is not None else ""
        assert process is None or process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


@contextmanager
def broken_in_actors(model: str, folder: Path, driver: int) -> Iterator[KVBoost]:
    with opened(model, folder) as engine:
        if os.getpid() != driver:

            def encode_many(records: Any) -> Any:
                raise OSError("the cable is out")

            engine.fetcher.encode_many = encode_many
        yield engine


def test_what_no_actor_can_encode_is_said(cluster: None, model_folder: str, tmp_path: Path) -> None:
    opening = partial(broken_in_actors, model_folder, tmp_path / "kv", os.getpid())
    with pytest.raises(RayWarmError, match="3 of 3 chunks were not encoded: OSError: the cable is out"):
        warm_dataset([{"text": text} for text in TEXTS[:3]], opening, ActorPool(num_cpus=0.5, attempts=1))


def test_the_command(cluster: None, model_folder: str, tmp_path: Path, run: Any) -> None:
    for number, text in enumerate(TEXTS[:3]):
        (tmp_path / f"{number}.txt").write_text(text * 5)
    command = ("warm", *sorted(tmp_path.glob("*.txt")), "--model", model_folder, "--store", tmp_path / "kv")
    ours = ("--neighbours", 0, "--ray", "auto", "--jobs", 2, "--actor-cpus", 0.5)
    code, out, err = run(*command, *ours)
    assert code == 0, err
    assert "3 files, 3 chunks" in out
    assert "3 encoded, 0 stored already" in out
    assert "0 encoded, 3 stored already" in run(*command, *ours)[1]
    assert "neither --jobs, --ray nor" in run(*command, *ours, "--shard", "0/2")[2]


@pytest.mark.parametrize("wrong", [{"num_actors": 0}, {"attempts": 0}, {"num_gpus": -1}, {"num_cpus": -0.5}])
def test_a_pool_of_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected one actor"):
        ActorPool(**wrong)
