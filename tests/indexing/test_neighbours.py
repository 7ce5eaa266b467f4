"""Neighbours by embedding: the index against a plain search, the rules, rewarming, and groups."""

import importlib.util
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_rag.indexing.embeddings import load_embedder, unit_vectors
from kvboost_rag.indexing.neighbour_groups import group_chunks, group_contexts
from kvboost_rag.indexing.neighbours import NeighbourRules, choose_contexts, plan_rewarm
from kvboost_rag.indexing.vector_index import VectorIndex

DIM = 8


def some_vectors(num, seed=0):
    raw = np.random.default_rng(seed).normal(size=(num, DIM)).astype(np.float32)
    return raw / np.linalg.norm(raw, axis=1, keepdims=True)


def exact_vectors(num, seed=0):
    """Quarters, whose products are exact in float32: no rounding decides a rank."""
    return (np.random.default_rng(seed).integers(-4, 5, size=(num, DIM)) / 4).astype(np.float32)


def obvious_nearest(vectors_by_key, query, count):
    scored = [(-round(float(vector @ query), 5), key) for key, vector in vectors_by_key.items()]
    return [key for _, key in sorted(scored)[:count]]


def index_of(vectors_by_key, **options):
    index = VectorIndex(**options)
    index.add(list(vectors_by_key), np.stack(list(vectors_by_key.values())))
    return index


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "remove"]), st.lists(st.integers(0, 30), min_size=1, max_size=8)), max_size=12
    ),
    st.integers(1, 6),
)
def test_index_equals_a_plain_search_after_any_changes(changes, count):
    rows, index, held = exact_vectors(31), VectorIndex(), {}
    for step, (action, ids) in enumerate(changes):
        keys = [f"k{i}" for i in ids]
        if action == "add":
            vectors = np.roll(rows, step, axis=0)[ids]
            index.add(keys, vectors)
            held.update(zip(keys, vectors, strict=True))
        else:
            assert index.remove(keys) == len({key for key in keys if held.pop(key, None) is not None})
    assert len(index) == len(held)
    for query in exact_vectors(3, seed=1):
        got = [hit.key for hit in index.nearest(query[None], count)[0]]
        assert got == obvious_nearest(held, query, count)


def test_the_order_of_adding_does_not_matter_even_among_equals():
    same = np.tile(some_vectors(1), (6, 1))
    forward, backward = VectorIndex(), VectorIndex()
    forward.add(list("abcdef"), same)
    for key in "fedcba":
        backward.add([key], same[:1])
    assert forward.nearest(same[:1], 3) == backward.nearest(same[:1], 3)
    assert [hit.key for hit in forward.nearest(same[:1], 3)[0]] == ["a", "b", "c"]


def test_wrong_shapes_are_refused():
    index = index_of({"a": some_vectors(1)[0]})
    with pytest.raises(ValueError, match="another embedding model"):
        index.add(["b"], np.ones((1, 3), dtype=np.float32))
    with pytest.raises(ValueError, match="one vector each"):
        index.add(["b", "c"], some_vectors(1))
    with pytest.raises(KeyError):
        index.vectors(["nobody"])


@pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="faiss is not installed")
def test_beyond_the_limit_the_graph_finds_nearly_all():
    vectors = {f"k{i}": v for i, v in enumerate(some_vectors(1500))}
    exact, graph = index_of(vectors), index_of(vectors, exact_limit=1000)
    gone = [f"k{i}" for i in range(400)]
    late = {f"late{i}": v for i, v in enumerate(some_vectors(50, seed=7))}
    for index in (exact, graph):
        index.nearest(some_vectors(1), 1)
        index.remove(gone)
        index.add(list(late), np.stack(list(late.values())))
    assert graph._graph is not None
    queries = some_vectors(40, seed=3)
    pairs = list(zip(exact.nearest(queries, 5), graph.nearest(queries, 5), strict=True))
    shared = sum(len({h.key for h in a} & {h.key for h in b}) for a, b in pairs)
    assert shared >= 0.95 * 200
    assert not {hit.key for _, hits in pairs for hit in hits} & set(gone)


def test_without_the_library_the_search_stays_exact_and_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "faiss", None)
    vectors = {f"k{i}": v for i, v in enumerate(exact_vectors(30))}
    index = index_of(vectors, exact_limit=10)
    for query in exact_vectors(3, seed=5):
        assert [h.key for h in index.nearest(query[None], 4)[0]] == obvious_nearest(vectors, query, 4)
    assert caplog.text.count("kvboost-rag[faiss]") == 1


def on_a_line(*angles):
    """Unit vectors whose cosine falls with the difference of their angles (in degrees)."""
    radians = np.deg2rad(np.array(angles, dtype=np.float32))
    return np.stack([np.cos(radians), np.sin(radians)], axis=1)


def line_index(angles):
    index = VectorIndex()
    index.add(list(angles), on_a_line(*angles.values()))
    return index


ANGLES = {"a": 0, "b": 2, "c": 5, "d": 9, "e": 60, "f": 63}
TOKENS = dict.fromkeys(ANGLES, 100)


def test_neighbours_are_the_most_similar_others_nearest_last():
    chosen = choose_contexts(line_index(ANGLES), ["a", "e"], TOKENS, NeighbourRules(count=3))
    assert chosen == {"a": (("d", "c", "b"),), "e": (("c", "d", "f"),)}
    assert choose_contexts(line_index(ANGLES), ["a"], TOKENS, NeighbourRules(count=0)) == {"a": ((),)}
    assert choose_contexts(line_index({"a": 0}), ["a"], TOKENS, NeighbourRules()) == {"a": ((),)}


def test_what_stands_before_a_chunk_in_its_document_stands_nearest():
    index, rules = line_index(ANGLES), NeighbourRules(count=4)
    places = {"a": ("e", "f"), "b": ("f", "f"), "c": ("c", "a")}
    chosen = choose_contexts(index, ["a", "b", "c", "d"], TOKENS, rules, places)
    assert chosen["a"] == (("c", "b", "e", "f"),)  # two similar ones, the head, the one before
    assert chosen["b"] == (("d", "c", "a", "f"),)  # the head is the one before
    assert chosen["c"] == (("d", "b", "a"),) or chosen["c"][0][-1] == "a"  # a chunk that comes twice, the head itself
    assert chosen["d"] == choose_contexts(index, ["d"], TOKENS, rules)["d"]
    short = choose_contexts(index, ["a"], TOKENS, NeighbourRules(count=4, max_tokens=250), places)
    assert short == {"a": (("e", "f"),)}


def test_further_contexts_are_the_next_similar_chunks():
    index = line_index(ANGLES)
    two = choose_contexts(index, ["a"], TOKENS, NeighbourRules(count=2, contexts=2))
    assert two == {"a": (("c", "b"), ("e", "d"))}
    beside = choose_contexts(index, ["a"], TOKENS, NeighbourRules(count=2, contexts=2), {"a": ("e", "f")})
    assert beside == {"a": (("e", "f"), ("c", "b"))}
    many = choose_contexts(index, ["a"], TOKENS, NeighbourRules(count=3, contexts=4))["a"]
    assert many == (("d", "c", "b"), ("f", "e"))  # no more than there are chunks for
    with pytest.raises(ValueError, match="contexts=0"):
        NeighbourRules(contexts=0)


def test_a_changed_predecessor_and_a_missing_context_are_worth_encoding_again():
    index, rules = line_index(ANGLES), NeighbourRules(count=2)
    plain = choose_contexts(index, list(ANGLES), TOKENS, rules)
    moved = plan_rewarm(index, plain, TOKENS, rules, {"a": ("e", "f")})
    assert moved.changes == {"a": (("e", "f"),)}
    assert plan_rewarm(index, plain | moved.changes, TOKENS, rules, {"a": ("e", "f")}).changes == {}
    wider = plan_rewarm(index, plain, TOKENS, NeighbourRules(count=2, contexts=2))
    assert set(wider.changes) == set(ANGLES)


def test_a_neighbour_that_does_not_fit_is_passed_over():
    tokens = TOKENS | {"b": 900}
    chosen = choose_contexts(line_index(ANGLES), ["a"], tokens, NeighbourRules(count=2, max_tokens=250))
    assert chosen == {"a": (("d", "c"),)}
    with pytest.raises(ValueError, match="count=-1"):
        NeighbourRules(count=-1)


def test_rewarming_changes_what_is_worth_it_only():
    index, rules = line_index(ANGLES), NeighbourRules(count=2)
    best = choose_contexts(index, list(ANGLES), TOKENS, rules)
    assert plan_rewarm(index, best, TOKENS, rules).changes == {}
    current = best | {"a": (("d", "b"),), "e": (("a", "b"),), "f": (("deleted", "e"),), "gone": (("a",),)}
    plan = plan_rewarm(index, current, TOKENS, rules)
    assert plan.changes == {"e": best["e"], "f": best["f"]}
    assert (plan.num_chunks, plan.num_different) == (6, 3)
    assert plan.changed_ratio == pytest.approx(2 / 6)
    assert set(plan_rewarm(index, current, TOKENS, rules, min_gain=0).changes) == {"a", "e", "f"}


def test_groups_are_chains_of_similar_chunks():
    groups = group_chunks(line_index(ANGLES), list(ANGLES), TOKENS, size=4)
    assert groups == [("a", "b", "c", "d"), ("e", "f")]
    before = {"a": (), "b": ("a",), "c": ("a", "b"), "d": ("a", "b", "c"), "e": (), "f": ("e",)}
    assert group_contexts(groups) == {key: (context,) for key, context in before.items()}
    both = group_contexts(groups, contexts=2)
    assert (both["a"], both["c"]) == (((), ("d", "c", "b")), (("a", "b"), ("d",)))
    assert group_contexts([("x",)], contexts=2) == {"x": ((),)}


def test_a_chunk_left_alone_joins_where_there_is_room():
    angles = {"a": 0, "b": 1, "x": 50, "c": 2}
    tokens = dict.fromkeys(angles, 100) | {"x": 500}
    groups = group_chunks(line_index(angles), list(angles), tokens, size=4, max_tokens=800)
    assert groups == [("a", "b", "c", "x")]
    assert group_chunks(line_index(angles), list(angles), tokens, size=4, max_tokens=400) == [("a", "b", "c"), ("x",)]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(100, 600))
def test_groups_hold_every_chunk_once_within_their_bounds(num, size, max_tokens):
    vectors = {f"k{i}": v for i, v in enumerate(some_vectors(num, seed=num))}
    tokens = {key: 50 + 40 * (i % 5) for i, key in enumerate(vectors)}
    groups = group_chunks(index_of(vectors), list(vectors), tokens, size, max_tokens)
    assert sorted(key for group in groups for key in group) == sorted(vectors)
    for group in groups:
        assert len(group) <= size
        assert len(group) == 1 or sum(tokens[key] for key in group) <= max_tokens


class LangChainLike:
    def embed_documents(self, texts):
        return [[3.0, 4.0] for _ in texts]


class LlamaIndexLike:
    def get_text_embedding_batch(self, texts):
        return [[3.0, 4.0] for _ in texts]


@pytest.mark.parametrize("model", [LangChainLike(), LlamaIndexLike(), lambda texts: np.full((len(texts), 2), [3, 4])])
def test_embedders_of_every_kind_give_unit_vectors(model):
    vectors = load_embedder(model)(["one", "two"])
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, [[0.6, 0.8]] * 2, rtol=1e-6)
    assert len(load_embedder(model)([])) == 0


def test_embeddings_that_cannot_be_used():
    with pytest.raises(TypeError, match="cannot embed with int"):
        load_embedder(3)
    with pytest.raises(ValueError, match="one embedding each"):
        unit_vectors([[1.0]], 2)
    with pytest.raises(ValueError, match="NaN"):
        unit_vectors([[float("nan")]], 1)


@pytest.mark.model
def test_the_default_model_knows_what_is_similar():
    vectors = load_embedder()(["A whale sings.", "Whales make songs.", "Copper prices fell."])
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.3
