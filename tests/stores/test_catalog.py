"""The catalog: records, contexts, sources, several connections, damage."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from kvboost_rag.stores import Catalog, StoreError
from tests.stores.conftest import FINGERPRINT, build_record


@pytest.fixture(params=["memory", "file"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Catalog:
    return Catalog(":memory:" if request.param == "memory" else tmp_path / "catalog.sqlite")


def test_the_first_record_of_a_hash_wins(catalog: Catalog) -> None:
    neighbour = catalog.add(build_record(100))
    first = build_record(1, (neighbour.content_hash,), anchor=(7, 8))
    assert catalog.add(first) == first
    assert catalog.add(build_record(1)) == first
    assert catalog.get(first.content_hash) == first
    assert catalog.get("0" * 64) is None
    assert len(catalog) == 2


def test_records_may_name_each_other_as_neighbours(catalog: Catalog) -> None:
    a, b = build_record(1), build_record(50)
    a, b = (
        dataclasses.replace(a, neighbours=(b.content_hash,)),
        dataclasses.replace(b, neighbours=(a.content_hash,)),
    )
    assert catalog.add_many([a, b, a]) == [a, b, a]
    assert catalog.get_many([a.content_hash, b.content_hash]) == {a.content_hash: a, b.content_hash: b}


def test_context_ids_are_the_anchor_then_the_neighbours_in_order(catalog: Catalog) -> None:
    far, near = catalog.add_many([build_record(200), build_record(100)])
    record = catalog.add(build_record(1, (far.content_hash, near.content_hash), anchor=(7, 8)))
    assert catalog.contexts(record)[0] == (7, 8, *far.token_ids, *near.token_ids)


@pytest.mark.parametrize("fault", ["unknown", "itself", "namespace", "hash"])
def test_records_that_cannot_be_kept_are_refused_whole(catalog: Catalog, fault: str) -> None:
    other_namespace = catalog.add(build_record(100, namespace="other"))
    bad = build_record(1)
    neighbours = {"unknown": ("ab" * 32,), "itself": (bad.content_hash,), "namespace": (other_namespace.content_hash,)}
    bad = dataclasses.replace(bad, neighbours=neighbours.get(fault, ()))
    if fault == "hash":
        bad = dataclasses.replace(bad, token_ids=(1, 2, 3))
    with pytest.raises(ValueError, match=r"neighbour|content_hash"):
        catalog.add_many([build_record(2), bad])
    assert len(catalog) == 1


def test_forgetting_a_chunk_gives_its_dependents_a_context_without_it(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "c.sqlite")
    far, near = catalog.add_many([build_record(100), build_record(200)])
    record = catalog.add(build_record(1, (far.content_hash, near.content_hash), anchor=(3,)))
    assert catalog.forget([far.content_hash], [("", "nobody")], ["ab" * 32]) == (record.content_hash,)
    assert catalog.get(far.content_hash) is None
    assert catalog.contexts(catalog.get(record.content_hash))[0] == (3, *near.token_ids)
    assert set(catalog.erasures.pending()) == {far.content_hash, record.content_hash, "ab" * 32}
    assert catalog.forget([record.content_hash, near.content_hash]) == ()
    assert catalog.database.read("SELECT count(*) FROM chunks") == [(0,)]
    assert catalog.database.read("SELECT count(*) FROM anchors") == [(0,)]
    catalog.close()
    assert b"text 100" not in b"".join(p.read_bytes() for p in tmp_path.iterdir())


def test_a_deleted_chunk_can_come_back_with_another_context(catalog: Catalog) -> None:
    neighbour = catalog.add(build_record(100))
    catalog.add(build_record(1, (neighbour.content_hash,)))
    catalog.forget([neighbour.content_hash])
    seen = catalog.version()
    back = catalog.add(build_record(100, anchor=(3,)))
    assert catalog.get(back.content_hash) == back
    assert [h for _, h, _ in catalog.texts(FINGERPRINT, "", after=seen.last_seq)] == [back.content_hash]


def test_arrays_go_with_their_chunk_and_do_not_come_back(catalog: Catalog) -> None:
    gone, kept = (r.content_hash for r in catalog.add_many([build_record(1), build_record(50)]))
    arrays = catalog.arrays("embedding/x", FINGERPRINT, "", np.float32)
    arrays.put({gone: np.ones(3), kept: np.zeros(3)})
    catalog.forget([gone])
    arrays.put({gone: np.ones(3)})
    assert arrays.keys() == [kept]
    assert catalog.orphan_arrays() == []
    catalog.add(build_record(1))
    arrays.put({gone: np.ones(3)})
    assert set(arrays.keys()) == {gone, kept}


def test_a_signed_catalog_believes_only_what_is_signed(tmp_path: Path) -> None:
    plain, signed = Catalog(tmp_path / "c.sqlite"), Catalog(tmp_path / "c.sqlite", b"s3cret")
    forged = plain.add(build_record(100))
    assert signed.get(forged.content_hash) is None
    assert signed.damaged == {forged.content_hash}
    mine = signed.add(build_record(1))
    assert plain.get(mine.content_hash) == mine
    with plain.database.transaction() as db:  # encoded after the attacker's text?
        db.execute("INSERT INTO contexts VALUES (?, 0, ?)", (mine.content_hash, forged.content_hash))
    assert signed.get(mine.content_hash) is None
    assert signed.add(build_record(1)) == mine


def test_replace_gives_another_context_and_refuses_unknown_chunks(catalog: Catalog) -> None:
    a, b = catalog.add_many([build_record(1), build_record(50)])
    again = dataclasses.replace(a, neighbours=(b.content_hash,), anchor_ids=(4,))
    catalog.replace(again)
    assert catalog.get(a.content_hash) == again
    assert catalog.dependents(b.content_hash) == (a.content_hash,)
    with pytest.raises(KeyError):
        catalog.replace(build_record(77))


def test_texts_come_in_order_by_namespace_and_only_once(catalog: Catalog) -> None:
    records = catalog.add_many([build_record(n) for n in range(2500)])
    catalog.add(build_record(1, namespace="other"))
    found = list(catalog.texts(FINGERPRINT, ""))
    assert [(h, t) for _, h, t in found] == [(r.content_hash, r.text) for r in records]
    assert list(catalog.texts(FINGERPRINT, "", after=found[1999][0])) == found[2000:]
    assert list(catalog.texts("another model", "")) == []
    assert catalog.namespaces() == ("", "other")


def test_the_version_tells_of_another_processes_changes(tmp_path: Path) -> None:
    here, there = Catalog(tmp_path / "c.sqlite"), Catalog(tmp_path / "c.sqlite")
    before = here.version()
    record = there.add(build_record(1))
    added = here.version()
    assert added.last_seq > before.last_seq
    assert added.removals == before.removals
    there.forget([record.content_hash])
    assert here.version().removals == added.removals + 1
    assert here.get(record.content_hash) is None


def test_sources_share_chunks_until_the_last_lets_go(catalog: Catalog) -> None:
    a, b, c = (r.content_hash for r in catalog.add_many([build_record(n) for n in (1, 50, 100)]))
    assert catalog.sources.link(FINGERPRINT, "", "one.md", [a, b, a]) == ()
    assert catalog.sources.link(FINGERPRINT, "", "two.md", [b]) == ()
    assert catalog.sources.chunks_of("", "one.md") == (a, b, a)
    assert catalog.sources.all() == [("", "one.md"), ("", "two.md")]
    assert catalog.sources.of_chunk(b) == ("one.md", "two.md")
    assert catalog.sources.link(FINGERPRINT, "", "one.md", [c]) == (a,)
    assert catalog.sources.unlink("", "two.md") == (b,)
    assert catalog.sources.unlink("", "two.md") == ()
    assert catalog.sources.unlink("", "one.md") == (c,)
    assert catalog.sources.all() == []


def test_a_source_of_another_model_or_namespace_is_left_alone(catalog: Catalog) -> None:
    a, b = (r.content_hash for r in catalog.add_many([build_record(1), build_record(50)]))
    catalog.sources.link(FINGERPRINT, "", "doc", [a])
    assert catalog.sources.link("model-b", "", "doc", [b]) == ()
    assert catalog.sources.link(FINGERPRINT, "namespace", "doc", []) == ()
    assert catalog.sources.chunks_of("", "doc", FINGERPRINT) == (a,)
    assert set(catalog.sources.unlink("", "doc")) == {a, b}


def test_deleting_a_namespace_leaves_nothing_of_it_in_the_file(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "c.sqlite")
    kept = catalog.add(build_record(1))
    gone = catalog.add_many([build_record(n, namespace="namespace-x", anchor=(99,)) for n in range(300, 340)])
    catalog.sources.link(FINGERPRINT, "namespace-x", "secret.md", [gone[0].content_hash])
    assert set(catalog.forget_namespaces(["namespace-x"])) == {r.content_hash for r in gone}
    assert catalog.database.wipe_log()
    assert catalog.get(kept.content_hash) == kept
    files = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert b"namespace-x" not in files
    assert b"secret.md" not in files
    assert b"text 310" not in files
    assert b"text 1 " in files


@pytest.mark.parametrize(
    "damage",
    [
        "token_ids = zeroblob(20)",
        "token_ids = 'text'",
        "token_ids = 1e300",
        "text = CAST(x'ff00fe' AS TEXT)",
        "text = x'ff'",
        "text = 'another'",
        "namespace = CAST(x'ff' AS TEXT)",
        "anchor = 'none'",
        "digest = 'text'",
        "digest = x''",
    ],
)
def test_a_damaged_row_counts_as_unknown_and_can_be_added_again(catalog: Catalog, damage: str) -> None:
    record = catalog.add(build_record(1, anchor=(5,)))
    with catalog.database.transaction() as db:
        db.execute(f"UPDATE chunks SET {damage}")
    assert catalog.get(record.content_hash) is None
    assert catalog.damaged == {record.content_hash}
    assert len(list(catalog.texts(FINGERPRINT, ""))) <= 1
    assert catalog.add(record) == record
    assert catalog.get(record.content_hash) == record


def test_a_catalog_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    Catalog(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match="version 99"):
        Catalog(path)
    assert path.exists()
