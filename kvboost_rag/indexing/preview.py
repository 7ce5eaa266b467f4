"""What indexing documents would do, found out without a model and without remembering anything."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kvboost_rag.datamodels import GIVEN
from kvboost_rag.kv.keys import content_hash
from kvboost_rag.prompt.segments import canonical_text
from kvboost_rag.prompt.tokens import PromptTokens
from kvboost_rag.stores.base import Store


@dataclass(frozen=True)
class Preview:
    """Sources by what would happen to them, and chunks.

    Attributes:
        num_tokens: of each distinct chunk by its text, in order.
        to_encode: texts of chunks that are not stored.
        to_forget: content hashes of known chunks that no source would have any more.
    """

    new: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    gone: tuple[str, ...]
    num_tokens: Mapping[str, int]
    to_encode: tuple[str, ...]
    to_forget: tuple[str, ...]


def preview_sources(
    tokens: PromptTokens,
    store: Store | None,
    place: tuple[str, str],
    sources: Mapping[str, Sequence[str]],
    gone_of: Callable[[list[str]], Collection[str]] = lambda known: (),
) -> Preview:
    """What would be done if `sources` were indexed.

    Args:
        store: None: nothing has been stored yet.
        place: the model's fingerprint and the namespace.
        sources: chunk texts by source id; empty ones are passed over.
        gone_of: which of the known sources would be forgotten.
    """
    fingerprint, namespace = place
    ids_of = {
        text: tokens.document_ids(text) for texts in sources.values() for text in map(canonical_text, texts) if text
    }
    keys = {text: content_hash(fingerprint, namespace, ids) for text, ids in ids_of.items()}
    wanted = {
        source: [keys[text] for text in dict.fromkeys(map(canonical_text, texts)) if text]
        for source, texts in sources.items()
    }
    links = store.catalog.sources if store is not None else None
    held = {source: links.chunks_of(namespace, source, fingerprint) if links is not None else () for source in wanted}
    lost = {source: set(held[source]) - set(wanted[source]) for source in wanted}
    gone = sorted(gone_of([name for _, name in links.all(namespace)])) if links is not None else []
    if links is not None:
        lost |= {source: set(links.chunks_of(namespace, source)) for source in gone}
    unchanged = tuple(
        source for source in wanted if held[source] and list(dict.fromkeys(held[source])) == wanted[source]
    )
    return Preview(
        new=tuple(source for source in wanted if not held[source]),
        changed=tuple(source for source in wanted if held[source] and source not in unchanged),
        unchanged=unchanged,
        gone=tuple(gone),
        num_tokens={text: len(ids) for text, ids in ids_of.items()},
        to_encode=tuple(text for text, key in keys.items() if store is None or not _is_indexed(store, key)),
        to_forget=tuple(links.only_of(lost)) if links is not None else (),
    )


def _is_indexed(store: Store, key: str) -> bool:
    """Whether the chunk's KV is stored, and not only since it was given with a call."""
    info = store.info(key)
    return info is not None and GIVEN not in info.meta
