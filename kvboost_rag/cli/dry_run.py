"""What `kvboost-rag warm` would do, found out without loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost_rag.cli.console import console
from kvboost_rag.cli.indexing import ChunkPlan, empty_sources, gone_of, split_sources

if TYPE_CHECKING:
    from kvboost_rag.cli.model_choice import ModelChoice
    from kvboost_rag.cli.options import StoreChoice
    from kvboost_rag.indexing.corpus import Corpus
    from kvboost_rag.indexing.preview import Preview


def dry_run(
    model: ModelChoice, store: StoreChoice, namespace: str, corpus: Corpus, plan: ChunkPlan, folders: Sequence[Path]
) -> None:
    """Print it. Needs the tokenizer only; the model's fingerprint is the one that the store was last warmed with."""
    from kvboost_rag.cli.known_models import recall_fingerprint
    from kvboost_rag.indexing.preview import preview_sources
    from kvboost_rag.models.load import load_tokenizer
    from kvboost_rag.prompt.tokens import PromptTokens
    from kvboost_rag.stores import DiskStore
    from kvboost_rag.stores.budget import UNLIMITED

    tokens = PromptTokens(load_tokenizer(model.name))
    fingerprint = recall_fingerprint(store.folder, model)
    chunks = split_sources(tokens.count, corpus.texts, plan.chunk_tokens)
    if fingerprint is None:
        console.print(f"{model.name} has not been warmed in {store.folder}: everything is new", highlight=False)
        _print(preview_sources(tokens, None, ("", namespace), chunks))
        return

    def gone(known: list[str]) -> list[str]:
        return gone_of(known, list(chunks), empty_sources(corpus), folders)

    disk = DiskStore(store.folder, UNLIMITED)
    try:
        _print(preview_sources(tokens, disk, (fingerprint, namespace), chunks, gone))
    finally:
        disk.close()


def _print(preview: Preview) -> None:
    for name in ("new", "changed", "gone"):
        for source in getattr(preview, name):
            console.print(f"{name:10s} {source}", highlight=False, soft_wrap=True)
    num_tokens = sum(preview.num_tokens[text] for text in preview.to_encode)
    console.print(
        f"dry run: {len(preview.new)} files new, {len(preview.changed)} changed, {len(preview.unchanged)} unchanged, "
        f"{len(preview.gone)} gone; {len(preview.to_encode)} chunks with {num_tokens:,} tokens would be encoded, "
        f"{len(preview.num_tokens) - len(preview.to_encode)} are stored, {len(preview.to_forget)} would be forgotten",
        highlight=False,
    )
