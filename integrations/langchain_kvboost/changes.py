"""What can change a vector store besides adding and deleting by id, and how its documents' KV keeps in step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

PAGE = 200
CHANGES = re.compile(r"_*a?(add|create|upsert|update|insert|merge|delete|remove|drop|reset|clear|truncate|set)(_|$)")
"""Names of methods that add, change or remove. What merely looks like one is refused as well: it can be called on the
wrapped store itself."""


def refuse_unknown_change(vectorstore: VectorStore, name: str) -> None:
    """Raise where a method of the wrapped store would change documents without their KV.

    Raises:
        AttributeError: the message says what to call instead.
    """
    if CHANGES.match(name) and callable(getattr(type(vectorstore), name, None)):
        kind = type(vectorstore).__name__
        raise AttributeError(
            f"{kind}.{name} may change documents whose KV this wrapper would not hear of: call it as "
            f".vectorstore.{name}(…), then .sync_deleted(), and add what is new with add_documents"
        )


def gone(vectorstore: VectorStore, document_ids: Sequence[str]) -> list[str]:
    """Which of the ids the store does not hold; all of them where its collection is not there any more."""
    missing = []
    for at in range(0, len(document_ids), PAGE):
        page = list(document_ids[at : at + PAGE])
        held = {document.id for document in _held(vectorstore, page)}
        missing += [document_id for document_id in page if document_id not in held]
    return missing


def _held(vectorstore: VectorStore, page: list[str]) -> Iterable[Document]:
    try:
        return vectorstore.get_by_ids(page)
    except NotImplementedError:
        raise
    except Exception as error:
        if _is_gone(error):
            return ()
        raise


def _is_gone(error: Exception) -> bool:
    """A collection that was deleted: every store has an error of its own for it."""
    text = f"{type(error).__name__}: {error}".lower()
    return "notfound" in text or "not found" in text or "does not exist" in text or "not initialized" in text
