"""KVBoost-RAG for LangChain. Part of the distribution `kvboost-rag`, whose version it carries."""

from kvboost_rag import __version__

__all__ = ["__version__"]
