"""KVBoost-RAG for LlamaIndex. Part of the distribution `kvboost-rag`, whose version it carries."""

from kvboost_rag import __version__
from llama_index.llms.kvboost.base import KVBoostLLM

__all__ = ["KVBoostLLM", "__version__"]
