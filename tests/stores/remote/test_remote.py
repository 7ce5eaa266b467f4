"""One store for many machines, over real servers: what is served is whole, whatever happens to them."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from kvboost_rag.stores import DiskStore, MemoryStore, StoreError, TieredStore
from kvboost_rag.stores.maintenance import delete_namespace, forget
from kvboost_rag.stores.remote import values
from kvboost_rag.stores.remote.redis import RedisBackend
from kvboost_rag.stores.remote.shared import SharedStore
from kvboost_rag.stores.remote.store import RemoteStore
from tests.stores.conftest import build_entry, build_record, check_of, same
from tests.stores.remote import servers
from tests.stores.remote.connecting import connect


def large(number: int):
    return dataclasses.replace(
        build_entry(number), tensors={"keys": torch.arange(2_500_000, dtype=torch.float32) + number}
    )


def test_what_was_put_comes_back_and_others_miss(remote: RemoteStore) -> None:
    entries = [build_entry(n) for n in range(5)] + [large(50)]
    assert all(remote.put(entry) for entry in entries)
    assert all(same(remote.get(entry.key, check_of(entry)), entry) for entry in entries)
    assert sorted(info.key for info in remote.entries()) == sorted(entry.key for entry in entries)
    other = dataclasses.replace(check_of(entries[0]), namespace="other")
    assert remote.get(entries[0].key, other) is None
    assert remote.get("ab" * 32, other) is None
    assert remote.stats.hits == 6
    assert len(remote.backend.names(large(50).key)) == 1 + 3


def test_other_contexts_and_codecs_are_other_values(remote: RemoteStore) -> None:
    plain = build_entry(1)
    coded = dataclasses.replace(build_entry(1, version=1), meta={"setting": "k8v8"})
    elsewhere = build_entry(1, context=(5, 6), version=2)
    for entry in (plain, coded, elsewhere):
        assert remote.put(entry)
    assert same(remote.get(coded.key, dataclasses.replace(check_of(coded), setting="k8v8")), coded)
    assert remote.get(coded.key, dataclasses.replace(check_of(coded), setting="k8v4")) is None
    assert same(remote.get(elsewhere.key, check_of(elsewhere)), elsewhere)
    assert remote.delete(plain.key)
    assert remote.backend.names(plain.key) == []
    assert not remote.delete(plain.key)


def test_a_value_without_all_its_parts_is_a_miss_and_can_be_put_again(remote: RemoteStore, url: str) -> None:
    entry = large(1)
    remote.put(entry)
    names = [name for name in remote.backend.names(entry.key) if name.startswith("p-")]
    remove(remote, entry.key, names[1])
    assert entry.key not in remote
    assert remote.get(entry.key, check_of(entry)) is None
    assert remote.stats.rejected == {"truncated": 1}
    assert remote.put(entry)
    assert same(remote.get(entry.key, check_of(entry)), entry)


def remove(remote: RemoteStore, key: str, name: str) -> None:
    if isinstance(remote.backend, RedisBackend):
        remote.backend._client.delete(f"kvboost:{{{key}}}:{name}")
        remote.backend._client.srem(f"kvboost:{{{key}}}", name)
    else:
        remote.backend._api.delete(remote.backend._store, f"{key[:2]}/{key}/{name}")


@pytest.mark.parametrize("damage", ["manifest", "part"])
def test_damaged_values_are_never_served(remote: RemoteStore, damage: str) -> None:
    entry = build_entry(1)
    remote.put(entry)
    name = next(n for n in remote.backend.names(entry.key) if n.startswith("m-" if damage == "manifest" else "p-"))
    data = bytearray(remote.backend.get(entry.key, [name])[0])
    data[-3] ^= 4
    remove(remote, entry.key, name)
    assert remote.backend.create(entry.key, name, bytes(data))
    assert remote.get(entry.key, check_of(entry)) is None
    assert sum(remote.stats.rejected.values()) == 1


def test_a_secret_is_asked_for(remote: RemoteStore, url: str) -> None:
    entry = build_entry(1)
    remote.put(entry)
    signed = connect(url, secret=b"s3cret")
    assert signed.get(entry.key, check_of(entry)) is None
    assert signed.stats.rejected == {"unsigned": 1}
    signed.close()


def test_two_writers_write_one_value(remote: RemoteStore, url: str) -> None:
    entry, other = large(1), connect(url)
    threads = [threading.Thread(target=store.put, args=(entry,)) for store in (remote, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(remote.backend.names(entry.key)) == 1 + 3
    assert same(other.get(entry.key, check_of(entry)), entry)
    other.close()


def machine(folder: Path, url: str) -> TieredStore:
    """What one machine has: memory over its own disk over what all share."""
    return TieredStore(MemoryStore(10**8), SharedStore(DiskStore(folder, 10**8), connect(url)))


def test_cold_on_one_machine_is_warm_on_another(remote: RemoteStore, url: str, tmp_path: Path) -> None:
    first, second = machine(tmp_path / "1", url), machine(tmp_path / "2", url)
    entry = large(1)
    first.put(entry)
    first.flush()
    assert second.tier_of(entry.key) == "remote"
    assert same(second.get(entry.key, check_of(entry)), entry)
    assert second.tier_stats["remote"].hits == 1
    assert second.tier_of(entry.key) == "memory"
    second.tiers[0].delete(entry.key)
    assert second.tier_of(entry.key) == "disk"
    first.close()
    second.close()


def test_deleting_reaches_what_is_shared(remote: RemoteStore, url: str, tmp_path: Path) -> None:
    first = machine(tmp_path / "1", url)
    neighbour, record = build_record(100), build_record(1, (build_record(100).content_hash,))
    first.catalog.add_many([neighbour, record])
    first.put(build_entry(100))
    first.put(build_entry(1, context=neighbour.token_ids))
    first.put(build_entry(7, namespace="acme"))
    first.flush()
    assert len(held(remote)) == 3
    forget(first, [neighbour.content_hash])
    assert held(remote) == {build_entry(7, namespace="acme").key}
    first.tiers[0].delete(build_entry(7, namespace="acme").key)
    delete_namespace(first, "acme")
    assert held(remote) == set()
    left = [name for key in list(remote.backend.keys()) for name in remote.backend.names(key)]
    assert len(left) == 2, "tombstones, and nothing else"
    first.close()


def held(remote: RemoteStore) -> set[str]:
    return {info.key for info in remote.entries()}


def test_a_server_that_is_gone_costs_misses_and_is_not_waited_for(tmp_path: Path) -> None:
    with servers.valkey(tmp_path / "server") as server:
        store = machine(tmp_path / "kv", server.url)
        entry, record = build_entry(1), store.catalog.add(build_record(1))
        store.put(entry)
        store.flush()
        server.kill()
        assert same(store.get(entry.key, check_of(entry)), entry)
        remote = store.tiers[1].tiers[1]
        for number in range(2, 30):
            assert store.get(build_entry(number).key, check_of(build_entry(number))) is None
        assert remote._guard.is_open
        assert remote.stats.rejected["unreachable"] == 28
        assert store.put(build_entry(50))
        store.flush()
        assert remote.stats.put_failures == {"unreachable": 1}
        assert same(store.get(build_entry(50).key, check_of(build_entry(50))), build_entry(50))
        with pytest.raises(StoreError, match="remote store"):
            forget(store, [record.content_hash])
        with pytest.raises(StoreError, match="cannot delete"):
            store.delete(record.content_hash)
        assert store.catalog.get(record.content_hash) == record
        server.process = servers.subprocess.Popen(server.process.args, stdout=servers.subprocess.DEVNULL)
        servers.wait_for(server.port)
        time.sleep(0.4)
        assert forget(store, [record.content_hash]).num_chunks == 1
        assert store.catalog.erasures.pending() == []
        store.close()


def test_a_wrong_password_and_a_full_server(tmp_path: Path) -> None:
    with servers.valkey(tmp_path / "a", "--requirepass", "right") as server:
        wrong = connect(server.url.replace("redis://", "redis://:wrong@"))
        assert not wrong.put(build_entry(1))
        assert wrong.stats.put_failures == {"unreachable": 1}
        right = connect(server.url.replace("redis://", "redis://:right@"))
        assert right.put(build_entry(1))
    for policy in ("noeviction", "allkeys-lru"):
        with servers.valkey(tmp_path / policy, "--maxmemory", "40mb", "--maxmemory-policy", policy) as server:
            store = connect(server.url)
            entries = [large(n) for n in range(8)]
            kept = [entry for entry in entries if store.put(entry)]
            assert kept
            assert (len(kept) < 8) == (policy == "noeviction")
            found = [(entry, store.get(entry.key, check_of(entry))) for entry in entries]
            assert all(got is None or same(got, entry) for entry, got in found)
            assert any(got is not None for _, got in found) or policy == "allkeys-lru"


def test_a_cluster_that_loses_a_node_under_many_clients(tmp_path: Path) -> None:
    """Wrong answers 0, hung requests 0; what lay on the other nodes is served on."""
    with servers.valkey_cluster(tmp_path) as nodes:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port}"
        entries = [build_entry(n) for n in range(60)]
        writer = connect(url)
        assert all(writer.put(entry) for entry in entries)
        wrong: list[str] = []
        slowest: list[float] = []

        def use(seed: int) -> None:
            store = connect(url)
            for i in range(60):
                entry, start = entries[(seed * 7 + i * 11) % 60], time.monotonic()
                found = store.get(entry.key, check_of(entry))
                slowest.append(time.monotonic() - start)
                if found is not None and not same(found, entry):
                    wrong.append(entry.key)
            store.close()

        threads = [threading.Thread(target=use, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        nodes[2].kill()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
        assert len(slowest) == 16 * 60
        assert max(slowest) < 30


def test_parts_are_cut_anywhere() -> None:
    pieces = [os.urandom(n) for n in (0, 1, values.PART_BYTES - 1, values.PART_BYTES + 1, 5)]
    parts = list(values.parts_of(pieces))
    assert b"".join(parts) == b"".join(pieces)
    assert [len(part) for part in parts[:-1]] == [values.PART_BYTES] * 2
