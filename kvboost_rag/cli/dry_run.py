"""What `kvboost-rag warm` would do, found out without loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost_rag.cli.console import console
from kvboost_rag.cli.indexing import ChunkPlan, empty_sources, gone_of, split_sources

if TYPE_CHECKING:
    from kvboost_rag.cli.model_choice import ModelChoice
    from kvboost_rag.cli.options import StoreChoice
    from kvboost_rag.indexing.corpus import Corpus
    from kvboost_rag.prompt.tokens import PromptTokens
    from kvboost_rag.stores import DiskStore


@dataclass(frozen=True)
class Preview:
    """Sources by what would happen to them, and the chunks to encode and to forget."""

    new: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    gone: tuple[str, ...]
    num_to_encode: int
    tokens_to_encode: int
    num_stored: int
    num_to_forget: int


def dry_run(
    model: ModelChoice, store: StoreChoice, namespace: str, corpus: Corpus, plan: ChunkPlan, folders: Sequence[Path]
) -> None:
    """Print it. Needs the tokenizer only; the model's fingerprint is the one that the store was last warmed with."""
    from kvboost_rag.cli.known_models import recall_fingerprint
    from kvboost_rag.models.load import load_tokenizer
    from kvboost_rag.prompt.tokens import PromptTokens
    from kvboost_rag.stores import DiskStore
    from kvboost_rag.stores.budget import UNLIMITED

    tokens = PromptTokens(load_tokenizer(model.name))
    fingerprint = recall_fingerprint(store.folder, model)
    chunks = split_sources(tokens.count, corpus.texts, plan.chunk_tokens)
    if fingerprint is None:
        console.print(f"{model.name} has not been warmed in {store.folder}: everything is new", highlight=False)
        _print(_preview(tokens, None, "", namespace, chunks, [], folders))
        return
    disk = DiskStore(store.folder, UNLIMITED)
    try:
        _print(_preview(tokens, disk, fingerprint, namespace, chunks, empty_sources(corpus), folders))
    finally:
        disk.close()


def _preview(
    tokens: PromptTokens,
    disk: DiskStore | None,
    fingerprint: str,
    namespace: str,
    chunks: dict[str, list[str]],
    empty: Sequence[str],
    folders: Sequence[Path],
) -> Preview:
    from kvboost_rag.kv.keys import content_hash

    num_tokens: dict[str, int] = {}
    groups: dict[str, list[str]] = {"new": [], "changed": [], "unchanged": []}
    lost: dict[str, set[str]] = {}
    for source, texts in chunks.items():
        ids = [tokens.document_ids(text.strip()) for text in texts]
        keys = [content_hash(fingerprint, namespace, i) for i in ids]
        num_tokens |= dict(zip(keys, map(len, ids), strict=True))
        held = disk.catalog.sources.chunks_of(namespace, source, fingerprint) if disk is not None else ()
        groups["new" if not held else "unchanged" if list(held) == keys else "changed"].append(source)
        lost[source] = set(held) - set(keys)
    gone: list[str] = []
    if disk is not None:
        known = [source for _, source in disk.catalog.sources.all(namespace)]
        gone = gone_of(known, list(chunks), empty, folders)
        lost |= {source: set(disk.catalog.sources.chunks_of(namespace, source)) for source in gone}
    missing = [key for key in num_tokens if disk is None or key not in disk]
    return Preview(
        tuple(groups["new"]),
        tuple(groups["changed"]),
        tuple(groups["unchanged"]),
        tuple(gone),
        len(missing),
        sum(num_tokens[key] for key in missing),
        len(num_tokens) - len(missing),
        0 if disk is None else len(disk.catalog.sources.only_of(lost)),
    )


def _print(preview: Preview) -> None:
    for name in ("new", "changed", "gone"):
        for source in getattr(preview, name):
            console.print(f"{name:10s} {source}", highlight=False, soft_wrap=True)
    console.print(
        f"dry run: {len(preview.new)} files new, {len(preview.changed)} changed, {len(preview.unchanged)} unchanged, "
        f"{len(preview.gone)} gone; {preview.num_to_encode} chunks with {preview.tokens_to_encode:,} tokens would be "
        f"encoded, {preview.num_stored} are stored, {preview.num_to_forget} would be forgotten",
        highlight=False,
    )
