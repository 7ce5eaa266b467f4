"""KVBoost-RAG for LlamaIndex. Part of the distribution `kvboost-rag`, whose version it carries."""

from llama_index.llms.kvboost.base import KVBoostLLM
from llama_index.llms.kvboost.embeddings import KVBoostEmbeddings
from llama_index.llms.kvboost.prefetch import (
    KVPrefetchEventHandler,
    KVPrefetchPostprocessor,
    KVPrefetchRetriever,
    prefetch,
)
from llama_index.llms.kvboost.warm import KVWarm

from kvboost_rag import __version__

__all__ = [
    "KVBoostEmbeddings",
    "KVBoostLLM",
    "KVPrefetchEventHandler",
    "KVPrefetchPostprocessor",
    "KVPrefetchRetriever",
    "KVWarm",
    "__version__",
    "prefetch",
]
