"""`kvboost-rag inspect`: what a store holds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvboost_rag.cli import options
from kvboost_rag.cli.console import bytes_text, console, seconds_text

if TYPE_CHECKING:
    from kvboost_rag.stores import Catalog, EntryInfo, Store


def inspect(
    store: options.Store = None,
    sources: Annotated[bool, typer.Option("--sources", help="List every source and its chunks, too.")] = False,
) -> None:
    """Show what a store holds, by namespace and model.

    Example: kvboost-rag inspect --store ~/kv --sources
    """
    disk = options.open_disk(store)
    whole = options.with_shared(disk)
    try:
        entries = list(disk.entries())
        console.print(f"store      {disk.folder.root}", highlight=False)
        console.print(f"disk       {bytes_text(sum(disk.bytes_held.values()))}", highlight=False)
        print_shared(whole)
        if not entries and not len(disk.catalog):
            console.print("It is empty.")
            return
        console.print(entry_table(entries, disk.catalog))
        if sources:
            console.print(source_table(disk.catalog))
    finally:
        whole.close()


def print_shared(store: Store) -> None:
    """What machines share, if they do; that it cannot be reached is no reason to show nothing else."""
    from kvboost_rag.stores import StoreError
    from kvboost_rag.stores.verify import shared_of

    remote = shared_of(store)
    if remote is None:
        return
    try:
        held = list(remote.entries())
        what = f"{bytes_text(sum(info.num_bytes for info in held))} in {len(held):,} entries"
    except StoreError as error:
        what = str(error)
    console.print(f"shared     {what}", highlight=False)


def entry_table(entries: Iterable[EntryInfo], catalog: Catalog) -> Table:
    """One line for each namespace and model: chunks, exact prefix blocks, tokens, bytes."""
    table = Table("namespace", "model fingerprint", title="held", title_justify="left")
    for column in ("chunks known", "chunks held", "prefix blocks", "tokens", "bytes", "last used"):
        table.add_column(column, justify="right")
    groups: dict[tuple[str, str], list[EntryInfo]] = defaultdict(list)
    for entry in entries:
        groups[entry.namespace, entry.fingerprint].append(entry)
    known: dict[tuple[str, str], set[str]] = defaultdict(set)
    for record in catalog.get_many(catalog.hashes()).values():
        known[record.namespace, record.fingerprint].add(record.content_hash)
    for group in sorted({*groups, *known}):
        held = groups[group]
        num_chunks = sum(entry.key in known[group] for entry in held)
        used = max((entry.last_used for entry in held), default=0.0)
        table.add_row(
            group[0] or "(default)",
            group[1][:12],
            f"{len(known[group]):,}",
            f"{num_chunks:,}",
            f"{len(held) - num_chunks:,}",
            f"{sum(entry.num_tokens for entry in held):,}",
            bytes_text(sum(entry.num_bytes for entry in held)),
            f"{seconds_text(max(0.0, time.time() - used))} ago" if used else "never",
        )
    return table


def source_table(catalog: Catalog) -> Table:
    """One line for each source."""
    table = Table("namespace", "source", title="sources", title_justify="left")
    table.add_column("chunks", justify="right")
    for namespace, source in catalog.sources.all():
        table.add_row(namespace or "(default)", source, f"{len(catalog.sources.chunks_of(namespace, source)):,}")
    return table
