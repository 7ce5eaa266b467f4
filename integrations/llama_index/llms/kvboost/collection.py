"""Which documents are whose: collections of documents, what tells documents apart, and what a docstore still holds."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import FilterOperator, MetadataFilter, MetadataFilters

_RANDOM = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_PLACES = ("file_path", "url", "URL", "source")
_PARTS = ("page_label", "page", "row", "sheet_name", "start_char_idx")
_KEPT_IN = "kvboost"
PAGE = 500
"""Documents that a vector store is asked for at once."""


def collection_of(docstore: Any) -> str:
    """The identity of a docstore, kept in it from the first time on; a new one for None or one that cannot keep it."""
    fresh = uuid.uuid4().hex
    kept = getattr(docstore, "_kvstore", None)  # where every docstore of LlamaIndex keeps all that it holds
    if kept is None:
        return fresh
    if (found := kept.get("identity", collection=_KEPT_IN)) is None:
        found = {"collection": fresh}
        kept.put("identity", found, collection=_KEPT_IN)
    return str(found["collection"])


def source_name(ref_doc_id: str, nodes: Sequence[BaseNode]) -> str:
    """What a document is called: its id, and before a random one what finds the same document again."""
    if not _RANDOM.fullmatch(ref_doc_id):
        return ref_doc_id
    source = nodes[0].source_node
    metadata = (source.metadata if source is not None else None) or nodes[0].metadata
    place = next((f"{name} {metadata[name]}" for name in _PLACES if metadata.get(name)), None)
    if place is None:
        parts = sorted({node.hash for node in nodes})
    else:
        parts = [place, *(f"{name} {metadata[name]}" for name in _PARTS if name in metadata)]
    return f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}#{ref_doc_id}"


def ref_doc_id_of(name: str) -> str:
    """The id inside a name that `source_name` made."""
    before, mark, after = name.rpartition("#")
    return after if mark and _RANDOM.fullmatch(after) and len(before) == 32 else name


def former(names: Iterable[str], coming: Collection[str]) -> list[str]:
    """Of known names those of documents that come again under another random id."""
    again = {name.partition("#")[0] for name in coming if ref_doc_id_of(name) != name}
    return [n for n in names if n not in coming and ref_doc_id_of(n) != n and n.partition("#")[0] in again]


def held_ids(holder: Any, known: Iterable[str]) -> set[str]:
    """Of known document ids those that a docstore or a vector store holds, or that nodes belong to.

    Args:
        holder: a docstore, a vector store that keeps the texts itself, or nodes.

    Raises:
        ValueError: the vector store keeps no texts, or cannot be asked for them.
    """
    ids = set(known)
    if hasattr(holder, "stores_text"):
        return _in_vector_store(holder, ids)
    if not hasattr(holder, "get_all_document_hashes"):
        return ids & {node.ref_doc_id for node in holder}
    listed = set(holder.get_all_document_hashes().values()) | set(holder.get_all_ref_doc_info() or ())
    # Of documents with equal texts and metadata the listing names one.
    return {i for i in ids if i in listed or holder.get_document_hash(i) is not None}


def _in_vector_store(store: Any, ids: Collection[str]) -> set[str]:
    """Which documents have nodes there. Asked for by id: a listing of all may be cut (Qdrant's)."""
    if not store.stores_text:
        raise ValueError("this vector store keeps no texts: give the index' docstore to KVWarm.sync")
    held: set[str] = set()
    wanted = sorted(ids)
    for start in range(0, len(wanted), PAGE):
        left = set(wanted[start : start + PAGE])
        while left and (found := left & {node.ref_doc_id for node in _nodes_of(store, left)}):
            held |= found
            left -= found
    return held


def _nodes_of(store: Any, ref_doc_ids: Collection[str]) -> Sequence[BaseNode]:
    some = MetadataFilter(key="ref_doc_id", value=sorted(ref_doc_ids), operator=FilterOperator.IN)
    try:
        nodes: Sequence[BaseNode] = store.get_nodes(None, MetadataFilters(filters=[some]))
    except NotImplementedError:
        name = type(store).__name__
        raise ValueError(f"{name} cannot list its nodes: give the nodes themselves to KVWarm.sync") from None
    return nodes
