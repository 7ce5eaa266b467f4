"""KVBoost-RAG for LangChain. Part of the distribution `kvboost-rag`, whose version it carries."""

from kvboost_rag import __version__
from langchain_kvboost.callbacks import KVBoostPrefetchHandler
from langchain_kvboost.chat import ChatKVBoost
from langchain_kvboost.embeddings import KVBoostEmbeddings
from langchain_kvboost.llm import KVBoostLLM
from langchain_kvboost.retriever import KVBoostRetriever
from langchain_kvboost.vectorstore import KVBoostVectorStore
from langchain_kvboost.warmer import KVBoostWarmer

__all__ = [
    "ChatKVBoost",
    "KVBoostEmbeddings",
    "KVBoostLLM",
    "KVBoostPrefetchHandler",
    "KVBoostRetriever",
    "KVBoostVectorStore",
    "KVBoostWarmer",
    "__version__",
]
