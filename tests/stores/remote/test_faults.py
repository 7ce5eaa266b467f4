"""Connections that are slow or cut, nodes that die, passwords, certificates: misses that are counted, nothing else."""

from __future__ import annotations

import dataclasses
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_rag.config import GenerationParams
from kvboost_rag.datamodels import SegmentKind
from kvboost_rag.engine import KVBoost
from kvboost_rag.stores import StoreError, Tiers
from kvboost_rag.stores.remote.room import Room
from kvboost_rag.stores.remote.store import RemoteStore
from tests.stores.conftest import build_entry, check_of, same
from tests.stores.remote import servers
from tests.stores.remote.connecting import connect
from tests.stores.remote.proxy import Proxy
from tests.stores.test_engine import DOCUMENTS, PROMPT


def large(number: int) -> Any:
    return dataclasses.replace(
        build_entry(number), tensors={"keys": torch.arange(2_500_000, dtype=torch.float32) + number}
    )


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[RemoteStore, RemoteStore, Proxy]]:
    """A store over a proxy, one past it, and the proxy."""
    with servers.valkey(tmp_path / "server") as server:
        proxy = Proxy(server.port)
        through, direct = connect(f"redis://127.0.0.1:{proxy.port}"), connect(server.url)
        yield through, direct, proxy
        proxy.cut_answers_after = proxy.cut_requests_after = None
        through.close()
        direct.close()
        proxy.close()


def test_a_connection_cut_in_the_middle_of_an_answer_is_a_miss(proxied: Any) -> None:
    through, direct, proxy = proxied
    entry = large(1)
    assert direct.put(entry)
    proxy.cut_answers_after = 5_000_000
    assert through.get(entry.key, check_of(entry)) is None
    assert through.stats.rejected == {"unreachable": 1}
    assert proxy.num_cut >= 1
    proxy.cut_answers_after = None
    time.sleep(0.4)  # the circuit is closed again
    assert same(through.get(entry.key, check_of(entry)), entry)


def test_a_connection_cut_in_the_middle_of_writing_leaves_nothing_that_is_served(proxied: Any) -> None:
    through, direct, proxy = proxied
    entry = large(2)
    proxy.cut_requests_after = 3_000_000  # every attempt at a part is cut
    assert not through.put(entry)
    assert through.stats.put_failures == {"unreachable": 1}
    assert proxy.num_cut >= 1
    assert entry.key not in direct
    assert direct.get(entry.key, check_of(entry)) is None
    proxy.cut_requests_after = None
    time.sleep(0.4)
    assert through.put(entry)
    assert same(direct.get(entry.key, check_of(entry)), entry)
    proxy.cut()
    assert same(through.get(entry.key, check_of(entry)), entry), "another attempt, another connection"


@pytest.mark.parametrize("writing", [True, False])
def test_a_node_killed_while_it_is_written_to_and_read_from(tmp_path: Path, writing: bool) -> None:
    with servers.valkey_cluster(tmp_path) as nodes:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port}"
        store, entries = connect(url), [large(n) for n in range(12)]
        if not writing:
            assert all(store.put(entry) for entry in entries)
        killer = threading.Timer(0.3, nodes[2].kill)
        killer.start()
        for _ in range(3):
            for entry in entries:
                if writing:
                    store.put(entry)
                found = store.get(entry.key, check_of(entry))
                assert found is None or same(found, entry)
        killer.join()
        assert sum(store.stats.rejected.values()) + sum(store.stats.put_failures.values()) > 0, "nobody noticed"
        store.close()


def test_a_replica_takes_over_and_serves_what_its_master_had(tmp_path: Path) -> None:
    with servers.valkey_cluster(tmp_path, replicas=1) as nodes:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port}"
        store, entries = connect(url), [build_entry(n) for n in range(30)]
        assert all(store.put(entry) for entry in entries)
        servers.wait_for_replicas(nodes)
        nodes[1].kill()
        servers.wait_until_whole(nodes[0])
        deadline = time.monotonic() + 30
        while not all(same(store.get(entry.key, check_of(entry)), entry) for entry in entries):
            assert time.monotonic() < deadline, "what was replicated is not served"
            time.sleep(0.2)
        assert all(store.put(build_entry(n)) for n in range(30, 60))
        store.close()


def test_tls_is_spoken_and_certificates_are_checked(tmp_path: Path) -> None:
    """The packaged server is built without TLS, so something else speaks it in front of the server."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 "
        f"-keyout {key} -out {certificate}".split(),
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with servers.valkey(tmp_path / "server", "--requirepass", "right") as server:
        proxy = Proxy(server.port, context)
        entry, address = build_entry(1), f"127.0.0.1:{proxy.port}"
        trusting = connect(f"rediss://:right@{address}?ssl_ca_certs={certificate}")
        assert trusting.put(entry)
        assert same(trusting.get(entry.key, check_of(entry)), entry)
        for url in (f"rediss://:right@{address}", f"rediss://:wrong@{address}?ssl_ca_certs={certificate}"):
            other = connect(url)
            assert other.get(entry.key, check_of(entry)) is None
            assert other.stats.rejected == {"unreachable": 1}
            with pytest.raises(StoreError):
                other.delete(entry.key)
            other.close()
        trusting.close()
        proxy.close()


def test_a_shared_store_that_is_slow_is_not_asked_for_what_is_computed_sooner(tiny_model: Any, tmp_path: Path) -> None:
    with servers.valkey(tmp_path / "server") as server:
        first = KVBoost(tiny_model("llama"), store=Tiers(tmp_path / "1", shared=server.url))
        first.warm(DOCUMENTS)
        expected = first.generate(PROMPT, params=GenerationParams(max_new_tokens=2), repair="none", strict=True).text
        first.close()
        proxy = Proxy(server.port)
        second = KVBoost(
            tiny_model("llama"), store=Tiers(tmp_path / "2", shared=f"redis://127.0.0.1:{proxy.port}"), metrics=True
        )
        second.warm(["Something else, which is encoded here so that the time that takes is known."])
        proxy.delay_s = 0.2
        choices = []
        for number in range(2):
            shown = DOCUMENTS[:2] if number == 0 else DOCUMENTS
            prompt = PROMPT if number else "\n\n".join([*shown, "What does the store hold?"])
            result = second.generate(
                prompt, documents=shown, params=GenerationParams(max_new_tokens=2), repair="none", strict=True
            )
            choices += [s.disk_choice for s in result.segments if s.kind is SegmentKind.DOCUMENT]
        assert choices == ["load", "load", None, None, "recompute"]
        assert result.text == expected
        assert second.store.tier_stats["remote"].hits == 2
        proxy.delay_s = 0.0
        second.close()
        proxy.close()


def test_bytes_under_way_are_bounded(tmp_path: Path) -> None:
    with servers.valkey(tmp_path / "server") as server:
        entries = [large(n) for n in range(6)]
        store = connect(server.url, in_flight_bytes=25_000_000)  # two of them
        assert all(store.put(entry) for entry in entries)
        plain, most = store.backend.get, []

        def get(key: str, names: Any) -> Any:
            most.append(store.room.taken)
            return plain(key, names)

        store.backend.get = get  # type: ignore[method-assign]
        found: list[bool] = []
        threads = [
            threading.Thread(target=lambda e=e: found.append(same(store.get(e.key, check_of(e)), e))) for e in entries
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 6
        assert 0 < max(most) <= 25_000_000
        assert store.room.taken == 0
        store.close()


def test_room() -> None:
    room = Room(10, 0.05)
    with room.of(6), room.of(4):
        assert room.taken == 10
        with pytest.raises(TimeoutError, match="10 of 10"), room.of(1):
            pass
    with room.of(1000):  # alone
        assert room.taken == 10
    assert room.taken == 0
