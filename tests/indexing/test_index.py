"""Automatic neighbours and the life of documents, seen from the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.config import ConfigError, EncodingConfig
from kvboost_rag.indexing.embeddings import load_embedder
from kvboost_rag.indexing.source_texts import SourceTexts
from kvboost_rag.models.errors import ModelLoadError

WORDS = ["apple", "pear", "plum", "tide", "wave", "moon"]
FRUIT = ["An apple tree with a pear.", "The pear is no apple or plum.", "A plum and an apple."]
SEA = ["The tide follows the moon.", "A wave and the tide.", "A moon over every wave."]
TEXTS = [*FRUIT, *SEA]


class WordEmbedder:
    """Counts words; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        self.asked += texts
        return np.array([[text.count(word) + 0.001 for word in WORDS] for text in texts])


MakeEngine = Callable[..., KVBoost]


@pytest.fixture
def embedder() -> WordEmbedder:
    return WordEmbedder()


@pytest.fixture
def make_engine(make_engine: MakeEngine, embedder: WordEmbedder) -> MakeEngine:
    def make(store: Any = None, neighbours: int = 2, **encoding: Any) -> KVBoost:
        encoding = {"embedder": embedder, "neighbours": neighbours} | encoding
        return make_engine(store=store, encoding=EncodingConfig(**encoding))

    return make


def behind(engine: KVBoost, text: str, namespace: str = "") -> list[str]:
    catalog = engine.store.catalog
    record = catalog.get(engine.registry.describe(text, namespace).content_hash)
    assert record is not None
    return [known.text for key in record.neighbours if (known := catalog.get(key))]


def kv_bytes(engine: KVBoost, text: str) -> bytes:
    record = engine.store.catalog.get(engine.registry.describe(text, "").content_hash)
    assert record is not None
    fetched = engine.fetcher.load(record)
    assert fetched is not None
    return b"".join(t.numpy().tobytes() for t in (*fetched.kv.keys, *fetched.kv.values))


def test_two_contexts_of_four_neighbours_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBOOST_NEIGHBOURS")
    monkeypatch.delenv("KVBOOST_CONTEXTS")
    assert (EncodingConfig().resolve().neighbours, EncodingConfig().resolve().contexts) == (4, 2)
    assert EncodingConfig(groups=True).resolve().contexts == 1  # what is asked for there is cheapness
    assert EncodingConfig(groups=True, contexts=2).resolve().contexts == 2
    monkeypatch.setenv("KVBOOST_NEIGHBOURS", "1")
    assert EncodingConfig().resolve().neighbours == 1
    monkeypatch.setenv("KVBOOST_NEIGHBOURS", "some")
    with pytest.raises(ConfigError, match="KVBOOST_NEIGHBOURS='some'"):
        EncodingConfig()
    with pytest.raises(ConfigError, match="neighbours=-1"):
        EncodingConfig(neighbours=-1)


def test_warm_chooses_the_most_similar_chunks_nearest_last(make_engine: MakeEngine, embedder: WordEmbedder) -> None:
    engine = make_engine()
    report = engine.warm(TEXTS)
    assert report.num_encoded == len(TEXTS)
    assert {frozenset(behind(engine, t)) for t in FRUIT} == {frozenset({*FRUIT} - {t}) for t in FRUIT}
    vectors = embedder.embed(TEXTS)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for i, text in enumerate(TEXTS):
        cosines = [float(vectors[i] @ vectors[TEXTS.index(other)]) for other in behind(engine, text)]
        assert len(cosines) == 2
        assert cosines[0] <= cosines[1] + 1e-5
        assert cosines[-1] == pytest.approx(max(c for j, c in enumerate(vectors @ vectors[i]) if j != i))


def test_contexts_are_kept_whatever_comes_later(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm(FRUIT[:1])  # nothing similar is known yet, and that stays so
    engine.warm(FRUIT[1:2])
    before, bits = {t: behind(engine, t) for t in FRUIT[:2]}, kv_bytes(engine, FRUIT[1])
    assert before == {FRUIT[0]: [], FRUIT[1]: [FRUIT[0]]}
    engine.warm(TEXTS)
    for key in list(engine.store.keys()):
        engine.store.delete(key)
    assert engine.warm(TEXTS).num_encoded == len(TEXTS)
    assert {t: behind(engine, t) for t in FRUIT[:2]} == before
    assert kv_bytes(engine, FRUIT[1]) == bits
    again = engine.warm(TEXTS)
    assert (again.num_encoded, again.encoded_tokens) == (0, 0)


def test_a_restart_embeds_nothing_and_knows_the_old_chunks(
    make_engine: MakeEngine, embedder: WordEmbedder, tmp_path: Path
) -> None:
    first = make_engine(tmp_path)
    first.warm(FRUIT)
    first.close()
    embedder.asked.clear()
    second = make_engine(tmp_path)
    assert second.warm(FRUIT).num_encoded == 0
    assert embedder.asked == []
    second.warm(["Another apple, another plum."])
    assert len(embedder.asked) == 1
    assert set(behind(second, "Another apple, another plum.")) < set(FRUIT)


def test_namespaces_are_no_neighbours_of_each_other(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm(FRUIT, namespace="a")
    engine.warm(FRUIT[:1], namespace="b")
    assert behind(engine, FRUIT[0], "b") == []


def test_numbers_none_and_texts_beat_the_setting(make_engine: MakeEngine, embedder: WordEmbedder) -> None:
    engine = make_engine()
    engine.warm(SEA[:1], neighbours=None)
    engine.warm(SEA[1:2], neighbours=0)
    assert embedder.asked == []
    engine.warm(FRUIT, neighbours=1)
    assert [len(behind(engine, t)) for t in FRUIT] == [1, 1, 1]
    engine.warm(FRUIT[:1], neighbours=[SEA[:2]])
    assert behind(engine, FRUIT[0]) == SEA[:2]
    for wrong in ("some", -1, [FRUIT[1]]):
        with pytest.raises((ValueError, TypeError), match="neighbours"):
            engine.warm(FRUIT[:1], neighbours=wrong)  # type: ignore[arg-type]


def test_given_embeddings_are_taken_and_kept(make_engine: MakeEngine, embedder: WordEmbedder, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, neighbours=1)
    # By these vectors, fruit belongs to the sea.
    engine.warm([FRUIT[0], SEA[0], FRUIT[1], SEA[1]], embeddings=[[9.0, 0], [8.0, 0], [0, 5.0], [0, 1.0]])
    assert behind(engine, FRUIT[0]) == [SEA[0]]
    assert behind(engine, FRUIT[1]) == [SEA[1]]
    engine.close()
    again = make_engine(tmp_path, neighbours=1)
    again.warm([FRUIT[2]], embeddings=[[0.1, 7.0]])
    assert behind(again, FRUIT[2]) in ([FRUIT[1]], [SEA[1]])
    assert embedder.asked == []
    with pytest.raises(ValueError, match="2 texts need one embedding each"):
        again.warm(SEA[1:], embeddings=[[1.0, 0.0]])


def test_without_an_embedding_model_chunks_are_encoded_alone_and_that_is_said_once(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Any) -> None:
        raise ModelLoadError("no embedding model: offline")

    monkeypatch.setattr("kvboost_rag.indexing.retrieval.MiniLM.__init__", refuse)
    engine = make_engine(embedder=None)
    with caplog.at_level(logging.WARNING):
        assert engine.warm(FRUIT[:2]).num_encoded == 2
        assert engine.warm(FRUIT).num_encoded == 1
    assert [
        r.getMessage().count("without neighbours") for r in caplog.records if r.name.endswith("similar_chunks")
    ] == [1]
    assert behind(engine, FRUIT[0]) == []


def test_an_unchanged_source_costs_nothing_and_a_changed_one_its_changes(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = engine.index.add("sea", SEA)
    assert (first.num_added, first.num_kept, first.warm.num_encoded) == (3, 0, 3)
    same = engine.index.add("sea", SEA)
    assert (same.num_added, same.num_kept, same.warm.encoded_tokens, same.num_forgotten) == (0, 3, 0, 0)
    changed = engine.index.update("sea", [SEA[0], "A wave and the moon.", SEA[2]])
    assert (changed.num_added, changed.num_kept, changed.num_removed, changed.num_forgotten) == (1, 2, 1, 1)
    assert engine.registry.known_texts("").key_of(SEA[1]) is None
    assert engine.index.sources() == ["sea"]
    assert len(engine.index.chunks_of("sea")) == 3


def test_a_changed_chunk_is_not_encoded_behind_its_old_version(make_engine: MakeEngine) -> None:
    engine = make_engine(neighbours=1)
    engine.index.add("doc", [FRUIT[0], SEA[0]])
    changed = FRUIT[0] + " And a pear."
    engine.index.add("doc", [changed, SEA[0]])
    assert behind(engine, changed) == [SEA[0]]
    assert engine.registry.describe(changed, "").content_hash in engine.store


def test_a_shared_chunk_lives_until_its_last_source_goes(make_engine: MakeEngine) -> None:
    engine = make_engine(neighbours=0)
    engine.index.add("a", [FRUIT[0], SEA[0]])
    assert engine.index.add("b", [SEA[0], FRUIT[1], FRUIT[1]]).warm.num_encoded == 1
    assert engine.index.delete("a") == 1
    assert engine.registry.known_texts("").key_of(SEA[0]) is not None
    assert engine.registry.known_texts("").key_of(FRUIT[0]) is None
    assert engine.index.update("b", [FRUIT[1]]).num_forgotten == 1
    assert engine.index.delete("b") == 1
    assert (engine.index.sources(), len(engine.store), len(engine.store.catalog)) == ([], 0, 0)
    for call in (lambda: engine.index.delete("a"), lambda: engine.index.update("a", FRUIT)):
        with pytest.raises(KeyError, match="no source 'a'"):
            call()


def test_sources_added_together_are_each_others_neighbours(make_engine: MakeEngine, embedder: WordEmbedder) -> None:
    engine = make_engine(neighbours=1)
    report = engine.index.add_many({f"s{i}": SourceTexts([text]) for i, text in enumerate(FRUIT[:2])})
    assert (report.num_added, report.warm.num_encoded) == (2, 2)
    assert [behind(engine, text) for text in FRUIT[:2]] == [[FRUIT[1]], [FRUIT[0]]]
    embedder.asked.clear()
    engine.index.add_many({"x": SourceTexts([SEA[0], ""], [[1.0, 0], [5, 5]]), "y": SourceTexts(SEA[1:2], [[1, 0.1]])})
    assert behind(engine, SEA[0]) == [SEA[1]]
    assert embedder.asked == []
    with pytest.raises(ValueError, match="some of the sources"):
        engine.index.add_many({"p": SourceTexts(SEA[2:], [[1.0, 0.0]]), "q": SourceTexts(SEA[:1])})
    assert engine.index.delete_many(["s0", "s1", "x", "unknown"]) == 3
    assert engine.index.sources() == ["y"]


def test_a_chunk_that_moves_between_sources_stays_and_one_that_all_lose_goes(make_engine: MakeEngine) -> None:
    engine = make_engine(neighbours=0)
    engine.index.add_many({"a": SourceTexts([FRUIT[0], SEA[0]]), "b": SourceTexts([SEA[0]])})
    moved = engine.index.add_many({"a": SourceTexts([FRUIT[1]]), "b": SourceTexts([FRUIT[0]])})
    assert (moved.num_added, moved.num_removed, moved.num_forgotten, moved.warm.num_encoded) == (2, 3, 1, 1)
    known = engine.registry.known_texts("")
    assert [known.key_of(text) is not None for text in (FRUIT[0], FRUIT[1], SEA[0])] == [True, True, False]


def test_later_chunks_are_known_and_go_with_their_source(make_engine: MakeEngine) -> None:
    engine = make_engine(neighbours=0)
    engine.index.add_many({"a": SourceTexts(FRUIT[:1], later=SEA[:1])})
    assert (len(engine.store), len(engine.store.catalog)) == (1, 2)
    assert engine.index.delete("a") == 2


def test_sources_of_namespaces_are_apart(make_engine: MakeEngine) -> None:
    engine = make_engine(neighbours=0)
    engine.index.add("doc", FRUIT[:1], namespace="a")
    engine.index.add("doc", FRUIT[:1], namespace="b")
    assert engine.index.delete("doc", namespace="a") == 1
    assert (engine.index.sources(namespace="a"), engine.index.sources(namespace="b")) == ([], ["doc"])
    assert len(engine.store) == 1


def test_what_is_deleted_is_in_no_file(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.index.add("fruit", FRUIT)
    engine.index.add("sea", SEA)
    engine.store.flush()
    key = engine.index.chunks_of("fruit")[0]
    vector = np.float32(
        engine.similar._space("", load_embedder(engine.encoding.embedder).space).index.vectors([key])[0]
    )

    def anywhere(data: bytes) -> bool:
        return any(data in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())

    assert anywhere(FRUIT[0].encode())
    assert anywhere(vector.tobytes())
    assert engine.index.delete("fruit") == 3
    assert not anywhere(FRUIT[0].encode())
    assert not anywhere(vector.tobytes())
    assert not anywhere(key.encode())
    assert engine.warm([FRUIT[1]]).num_encoded == 1
    assert not set(behind(engine, FRUIT[1])) & set(FRUIT)


class Crash(RuntimeError):
    pass


@pytest.mark.parametrize("stage", ["encode", "forget"])
def test_a_crash_in_the_middle_is_made_good_by_calling_again(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    engine = make_engine(tmp_path)
    engine.index.add("doc", FRUIT)

    def crash(*args: Any) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(engine.fetcher if stage == "encode" else engine.registry, stage, crash)
        with pytest.raises(Crash):
            engine.index.add("doc", SEA)
    engine.close()
    again = make_engine(tmp_path)
    known = set(again.store.catalog.hashes())
    assert known == set(again.index.chunks_of("doc")), "a chunk without a source would never be deleted"
    report = again.index.add("doc", SEA)
    assert report.num_forgotten == (0 if stage == "encode" else 3)
    assert report.warm.num_encoded == 3
    assert set(again.store.catalog.hashes()) == set(again.index.chunks_of("doc")) == set(again.store.keys())
    assert len(again.store) == 3


def test_texts_are_taken_out_of_the_search_one_by_one(make_engine: MakeEngine, tmp_path: Path) -> None:
    """By this process and by another one; the twin is a search that was built anew."""
    engine = make_engine(tmp_path, neighbours=0)
    engine.index.add("fruit", FRUIT)
    engine.index.add("sea", SEA)
    search, prompt = engine.registry.known_texts(""), "\n\n".join(TEXTS)

    def found() -> list[str]:
        current = engine.registry.known_texts("")
        assert current is search, "nothing is built anew"
        anew = make_engine(tmp_path, neighbours=0).registry.known_texts("")
        matches = current.find(prompt)
        assert matches == anew.find(prompt)
        return [prompt[m.start : m.end] for m in matches]

    assert found() == TEXTS
    engine.index.update("fruit", FRUIT[:1])
    assert found() == [FRUIT[0], *SEA]
    other = make_engine(tmp_path, neighbours=0)
    other.index.delete("sea")
    other.index.add("late", SEA[:1])
    assert found() == [FRUIT[0], SEA[0]]
    engine.evict([SEA[0], FRUIT[0]])
    assert found() == []


def test_bad_input_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.index.add("doc", FRUIT)
    for source, texts, embeddings in [("", SEA, None), ("doc", [SEA[0], 7], None), ("doc", SEA, [[1.0, 2.0]])]:
        with pytest.raises((TypeError, ValueError)):
            engine.index.add(source, texts, embeddings)
    assert len(engine.index.chunks_of("doc")) == 3
    assert len(engine.store.catalog) == 3


def test_empty_chunks_are_left_out_with_their_embeddings(make_engine: MakeEngine) -> None:
    engine = make_engine(neighbours=1)
    engine.index.add("doc", [FRUIT[0], " \n", SEA[0]], [[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]])
    assert behind(engine, FRUIT[0]) == [SEA[0]]


def test_a_preview_tells_what_would_be_done_and_does_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.index.add("doc", FRUIT)
    change = engine.index.preview("doc", [FRUIT[0], SEA[0]])
    assert (change.to_encode, set(change.to_forget)) == ((SEA[0],), set(FRUIT[1:]))
    assert len(engine.store.catalog) == 3


def test_an_answer_from_indexed_documents_hits(make_engine: MakeEngine) -> None:
    engine = make_engine(min_chunk_tokens=1)
    engine.index.add("doc", FRUIT)
    prompt = "\n\n".join([*FRUIT, "What is a pear?"])
    result = engine.generate(prompt, params=GenerationParams(max_new_tokens=2), strict=True)
    assert sum(s.hit.value == "approximate" for s in result.segments) == 3
