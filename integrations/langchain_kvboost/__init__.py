"""KVBoost-RAG for LangChain. Part of the distribution `kvboost-rag`, whose version it carries."""

from kvboost_rag import __version__
from langchain_kvboost.chat import ChatKVBoost
from langchain_kvboost.llm import KVBoostLLM

__all__ = ["ChatKVBoost", "KVBoostLLM", "__version__"]
