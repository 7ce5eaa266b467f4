"""Which collection a vector store is: the same after it was closed and opened, or dumped and loaded, and no other's."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

from langchain_core.vectorstores import VectorStore

from langchain_kvboost.changes import gone

logger = logging.getLogger(__name__)

_OWN = "store-"
"""Begins names that were made up for stores that have none (in memory, FAISS)."""
_SOURCE = "langchain:"
_SHOWN = 200
"""Documents of a collection that are looked for, at most."""
_LIVE: WeakValueDictionary[str, VectorStore] = WeakValueDictionary()


def source_prefix(name: str) -> str:
    """What the source ids of a collection's documents begin with."""
    return f"{_SOURCE}{name}:"


def named(vectorstore: VectorStore) -> str | None:
    """The name that a store's own collection has, and where it lies, or None.

    Collections of one name in two places (two folders of Chroma, say) are two.
    """
    collection: Any = getattr(vectorstore, "_collection", None)
    if isinstance(getattr(collection, "id", None), uuid.UUID):  # Chroma's, which goes with it for good
        return f"{collection.name}@{collection.id}"
    for attribute in ("collection_name", "_collection_name", "index_name"):
        name = getattr(vectorstore, attribute, None)
        if isinstance(name, str) and name:
            return f"{name}{_place(vectorstore)}"
    return None


def found_again(vectorstore: VectorStore, sources: Iterable[str]) -> str:
    """The name under which a store without one added its documents before; a new one if it did not, or who it was
    cannot be told.

    Args:
        sources: ids of everything in the namespace.
    """
    held = {name: ids for name, ids in _collections(sources) if _holds_some(vectorstore, ids)}
    for name in [name for name in held if _LIVE.get(name) not in (None, vectorstore)]:
        del held[name]  # another store's that is in use and has the same ids
    if len(held) > 1:
        logger.warning(
            "%d collections have documents of this %s: deleting evicts what is added from now on; "
            "give name= to KVBoostVectorStore where a store is to go on with what it had",
            len(held),
            type(vectorstore).__name__,
        )
    name = next(iter(held)) if len(held) == 1 else f"{_OWN}{uuid.uuid4().hex}"
    _LIVE[name] = vectorstore
    return name


def _collections(sources: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Names that were made up, and ids of documents of each."""
    found: dict[str, list[str]] = {}
    for source in sources:
        if source.startswith(_SOURCE + _OWN):
            name, _, document_id = source.removeprefix(_SOURCE).partition(":")
            found.setdefault(name, []).append(document_id)
    yield from found.items()


def _holds_some(vectorstore: VectorStore, ids: list[str]) -> bool:
    some = ids[:_SHOWN]
    try:
        return len(gone(vectorstore, some)) < len(some)
    except NotImplementedError:
        return False


def _place(vectorstore: VectorStore) -> str:
    """Where a store with a named collection lies: Qdrant's client and SQL engines say so. Empty where nobody does."""
    options = getattr(getattr(vectorstore, "client", None), "init_options", None)
    if isinstance(options, dict):
        where: Any = {key: options.get(key) for key in ("location", "url", "host", "port", "path", "prefix")}
        if where["location"] == ":memory:":  # it goes with the object
            where = f"memory of {id(vectorstore.client)}"  # type: ignore[attr-defined]
    else:
        where = getattr(getattr(vectorstore, "_engine", None), "url", None)
    return "" if where is None else f"@{hashlib.sha256(str(where).encode()).hexdigest()[:16]}"
