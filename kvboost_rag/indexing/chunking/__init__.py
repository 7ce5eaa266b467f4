"""Text to chunk texts. Texts that are cut already need none of this: they are taken as they are."""

from kvboost_rag.indexing.chunking.base import Chunker, CountTokens, TextChunk
from kvboost_rag.indexing.chunking.code import CodeChunker, language_of
from kvboost_rag.indexing.chunking.fixed import FixedChunker
from kvboost_rag.indexing.chunking.semantic import SemanticChunker

__all__ = ["Chunker", "CodeChunker", "CountTokens", "FixedChunker", "SemanticChunker", "TextChunk", "language_of"]
