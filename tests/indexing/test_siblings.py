"""What stands before a chunk in its document belongs into its encoding context, whatever way the document came in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvboost_rag import KVBoost
from kvboost_rag.config import EncodingConfig
from kvboost_rag.indexing.neighbours import NeighbourRules

MakeEngine = Callable[..., KVBoost]
WORDS = ("tide", "apple", "clock")
TEXTS = [f"Part {n} of the story about the {WORDS[n % 3]}." for n in range(8)]
OTHERS = [f"Note {n} on the {WORDS[n % 3]}." for n in range(6)]


def count_words(texts: Sequence[str]) -> np.ndarray:
    return np.array([[text.count(word) + 0.01 for word in WORDS] for text in texts])


@pytest.fixture
def engine(make_engine: MakeEngine) -> KVBoost:
    return make_engine(encoding=EncodingConfig(embedder=count_words, neighbours=4))


def behind(engine: KVBoost, text: str) -> list[str]:
    catalog = engine.store.catalog
    record = catalog.get(engine.registry.describe(text, "").content_hash)
    assert record is not None
    known = catalog.get_many(record.neighbours)
    return [known[key].text for key in record.contexts[0]]


@pytest.mark.parametrize("way", ["source", "place"])
def test_the_head_and_the_chunk_before_stand_nearest(engine: KVBoost, way: str) -> None:
    engine.warm(OTHERS)
    if way == "source":
        engine.index.add("story", TEXTS)
    else:
        engine.index.place(TEXTS)
        engine.warm(TEXTS)
    assert behind(engine, TEXTS[5])[2:] == [TEXTS[0], TEXTS[4]]
    assert behind(engine, TEXTS[1])[3:] == [TEXTS[0]]
    assert TEXTS[5] not in behind(engine, TEXTS[5])
    assert len(set(behind(engine, TEXTS[5]))) == 4


def test_it_can_be_left_out(make_engine: MakeEngine) -> None:
    settings = EncodingConfig(embedder=count_words, neighbours=2, siblings=False)
    with_rules, plain = make_engine(encoding=settings), make_engine(encoding=settings)
    with_rules.index.add("story", TEXTS)
    plain.warm(TEXTS)
    assert [behind(with_rules, t) for t in TEXTS] == [behind(plain, t) for t in TEXTS]


def test_a_changed_predecessor_is_seen_by_rewarm(engine: KVBoost) -> None:
    rules = NeighbourRules(4)
    engine.index.add("story", TEXTS)
    assert engine.similar.replan("", rules).changes == {}
    moved = [*TEXTS[:4], "A new part about the tide.", *TEXTS[4:]]
    engine.index.add("story", moved)
    plan = engine.similar.replan("", rules)
    key = engine.registry.describe(TEXTS[4], "").content_hash
    assert key in plan.changes
    engine.similar.apply(plan, "")
    assert behind(engine, TEXTS[4])[-1] == "A new part about the tide."
    assert engine.similar.replan("", rules).changes == {}


def test_places_go_with_their_chunks(engine: KVBoost) -> None:
    engine.index.place(TEXTS)
    engine.warm(TEXTS)
    engine.evict([TEXTS[2]])
    keys = [engine.registry.describe(text, "").content_hash for text in TEXTS]
    places = engine.store.catalog.sources.places(engine.registry.fingerprint, "", keys)
    assert keys[2] not in places
    assert keys[3] not in places
    assert places[keys[4]] == (keys[0], keys[3])
