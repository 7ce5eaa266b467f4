"""Vectors of one embedding model lie in one space, whoever embedded; those of another are never compared with them."""

import numpy as np
import pytest
import torch

from kvboost_rag import KVBoost
from kvboost_rag.cli.indexing import ChunkPlan, index_sources
from kvboost_rag.config import EncodingConfig
from kvboost_rag.indexing.corpus import SourceText
from kvboost_rag.indexing.embeddings import ModelVectors, embedding_space, load_embedder
from kvboost_rag.indexing.neighbours import NeighbourRules
from kvboost_rag.indexing.retrieval import MiniLM
from kvboost_rag.stores import MemoryStore

SUBJECTS = ("The river", "A clock", "Her garden", "This engine", "Our library", "Some harbour")

TEXTS = [f"{subject} {verb} number {i}. " * 4 for i, subject in enumerate(SUBJECTS) for verb in ("opens", "closes")]


class Letters(torch.nn.Module):
    """A model with weights: letters counted and projected."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.projection = torch.nn.Linear(26, 12, bias=False)

    def embed(self, texts):
        counts = [[text.lower().count(chr(97 + i)) for i in range(26)] for text in texts]
        return self.projection(torch.tensor(counts).float()).detach().numpy()


class Wrapper:
    """As both frameworks' local embedding classes: the network lies inside."""

    def __init__(self, model):
        self._model = model

    def embed_documents(self, texts):
        return self._model.embed(texts).tolist()


def make(tiny_model, embedder):
    encoding = EncodingConfig(neighbours=2, embedder=embedder)
    return KVBoost(tiny_model(), store=MemoryStore(1 << 26), encoding=encoding, profile=None)


def contexts(engine):
    catalog = engine.store.catalog
    return {r.text: [catalog.get(n).text for n in r.neighbours] for r in catalog.get_many(catalog.hashes()).values()}


def best(engine):
    """The neighbours that every chunk would get now."""
    catalog = engine.store.catalog
    plan = engine.similar.replan("", NeighbourRules(2))
    texts = {key: catalog.get(key).text for key in catalog.hashes()}
    chosen = contexts(engine) | {texts[k]: [texts[n] for n in v] for k, v in plan.changes.items()}
    return {text: set(near) for text, near in chosen.items()}


def test_half_by_the_command_line_and_half_by_python_is_like_all_at_once(tiny_model):
    half, plan = len(TEXTS) // 2, ChunkPlan(512, 2)
    with make(tiny_model, Letters()) as whole, make(tiny_model, Wrapper(Letters())) as parts:
        whole.warm(TEXTS)
        index_sources(parts, [SourceText(f"s{i}", t) for i, t in enumerate(TEXTS[:half])], plan)
        parts.warm(TEXTS[half:])
        expected, got = contexts(whole), contexts(parts)
        assert [got[t.strip()] for t in TEXTS[half:]] == [expected[t.strip()] for t in TEXTS[half:]]
        assert any(n in {t.strip() for t in TEXTS[:half]} for t in TEXTS[half:] for n in got[t.strip()])
        parts.similar.apply(parts.similar.replan("", NeighbourRules(2)), "")
        changed = {t: set(n) for t, n in contexts(parts).items()}
        worse = [t for t in changed if changed[t] != set(expected[t])]
        assert len(worse) < half / 2  # what a rewarm leaves is not worth encoding again


def test_one_model_is_one_space_and_another_is_another():
    spaces = [embedding_space(m) for m in (Letters(), Wrapper(Letters()), Letters(seed=1))]
    assert spaces[0] == spaces[1] != spaces[2]
    assert load_embedder(Wrapper(Letters())).space == spaces[0]


def test_functions_and_named_objects_have_spaces_of_their_own():
    class Remote:
        def __init__(self, name):
            self.model_name = name

        def embed(self, texts):
            return np.ones((len(texts), 2))

    spaces = {embedding_space(m) for m in (Remote("a"), Remote("b"), len, print)}
    assert len(spaces) == 4
    assert embedding_space(Remote("a")) in spaces


@pytest.mark.parametrize("named", [True, False])
def test_brought_vectors_are_compared_with_their_own_model_only(tiny_model, named):
    rows = Letters().embed(TEXTS[:4])
    given = ModelVectors.made_by(Letters(), rows) if named else rows
    with make(tiny_model, Letters()) as engine:
        engine.warm(TEXTS[:4], embeddings=given, neighbours=0)
        engine.warm(TEXTS[:4], embeddings=given, neighbours=2)
        engine.warm(TEXTS[4:5])
        assert len(contexts(engine)[TEXTS[4].strip()]) == (2 if named else 0)


def test_vectors_of_two_models_in_one_call_are_refused(tiny_model):
    from kvboost_rag.indexing.source_texts import SourceTexts

    rows = Letters().embed(TEXTS[:1])
    sources = {n: SourceTexts([TEXTS[i]], ModelVectors(rows, n)) for i, n in enumerate(("one", "two"))}
    with make(tiny_model, Letters()) as engine, pytest.raises(ValueError, match="2 models: one, two"):
        engine.index.add_many(sources)


@pytest.mark.model
def test_sentence_transformers_and_the_command_line_agree():
    pytest.importorskip("sentence_transformers")
    assert load_embedder().space == embedding_space(MiniLM())
