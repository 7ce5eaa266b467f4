"""From a question to a prompt with the passages that are nearest to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvboost_rag.indexing.corpus import CorpusError

if TYPE_CHECKING:
    from kvboost_rag.engine import KVBoost

INSTRUCTION = "Answer the question in one or two sentences, using the documents."


@dataclass(frozen=True)
class Passage:
    """A chunk that goes into the prompt; `sources` are where its text comes from."""

    content_hash: str
    text: str
    sources: tuple[str, ...]


def messages_for(question: str, passages: Sequence[Passage]) -> list[dict[str, str]]:
    """The prompt of `ask` and `demo`. Nothing is put around a passage: its text is found verbatim."""
    documents = "\n\n".join(passage.text for passage in passages)
    return [{"role": "user", "content": f"{INSTRUCTION}\n\n{documents}\n\nQuestion: {question}"}]


class PassageSearch:
    """Searches the chunks of the engine's model and namespace by their embeddings.

    Raises:
        CorpusError: nothing has been warmed for them.
    """

    def __init__(self, engine: KVBoost) -> None:
        catalog, namespace = engine.store.catalog, engine.config.namespace
        chunks = [(key, text) for _, key, text in catalog.texts(engine.registry.fingerprint, namespace)]
        if not chunks:
            where = f" in namespace {namespace!r}" if namespace else ""
            raise CorpusError(
                f"nothing has been warmed for {engine.name} ({engine.model.dtype}){where}: kvboost-rag warm PATH"
            )
        self._catalog, self._similar, self._texts, self._namespace = catalog, engine.similar, dict(chunks), namespace

    def nearest(self, question: str, count: int) -> list[Passage]:
        """The `count` passages nearest to the question, the nearest last, next to the question."""
        hits = self._similar.search(question, count, self._namespace)
        found = [key for key in reversed(hits) if key in self._texts]
        return [Passage(key, self._texts[key], self._catalog.sources.of_chunk(key)) for key in found]
