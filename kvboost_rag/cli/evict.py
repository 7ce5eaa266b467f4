"""`kvboost-rag evict`: take things out of a store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from kvboost_rag.cli import options
from kvboost_rag.cli.console import bytes_text, console

if TYPE_CHECKING:
    from kvboost_rag.stores import Store
    from kvboost_rag.stores.maintenance import Removed

SECONDS_A_DAY = 86_400


def evict(
    store: options.Store = None,
    source: Annotated[
        str | None, typer.Option(help="Forget this source (a file, or an id of `inspect --sources`): text and KV.")
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            min=0, callback=options.finite, help="Remove KV that was not used for so many days; the text stays known."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Forget everything; with --namespace, everything of that namespace.")
    ] = False,
    namespace: Annotated[
        str | None, typer.Option(help="Whose chunks. Default: the unnamed one; for --all: all.")
    ] = None,
) -> None:
    """Remove a source, what is unused, or everything. Processes that run keep what they hold in memory.

    Example: kvboost-rag evict --older-than 30
    """
    from kvboost_rag.config import ConfigError

    given = [source is not None, older_than is not None, everything]
    if sum(given) != 1:
        raise ConfigError("say what to remove: one of --source ID, --older-than DAYS, --all")
    if older_than is not None and namespace is not None:
        raise ConfigError("--older-than goes through all namespaces; leave --namespace out")
    disk = options.with_shared(options.open_disk(store))
    try:
        before = disk.bytes_held["disk"]
        if source is not None:
            removed = _evict_source(disk, namespace or "", source)
        else:
            removed = _evict_by(disk, older_than, namespace)
        after = disk.bytes_held["disk"]
    finally:
        disk.close()
    reset = f", {removed.num_reset:,} encoded after them reset" if removed.num_reset else ""
    console.print(
        f"{removed.num_chunks:,} chunks forgotten{reset}, KV of {removed.num_entries:,} entries removed; "
        f"{bytes_text(after)} on disk ({bytes_text(before)} before)",
        highlight=False,
    )


def _evict_source(disk: Store, namespace: str, source: str) -> Removed:
    from kvboost_rag.stores import StoreError
    from kvboost_rag.stores.maintenance import delete_source

    for name in (source, os.path.realpath(os.path.expanduser(source))):
        try:
            return delete_source(disk, namespace, name)
        except KeyError:
            continue
    where = f" in namespace {namespace!r}" if namespace else ""
    raise StoreError(f"no source {source!r}{where}: kvboost-rag inspect --sources lists them")


def _evict_by(disk: Store, older_than_days: float | None, namespace: str | None) -> Removed:
    from kvboost_rag.stores.maintenance import delete_namespace, evict_all, evict_unused

    if older_than_days is not None:
        return evict_unused(disk, older_than_days * SECONDS_A_DAY)
    return evict_all(disk) if namespace is None else delete_namespace(disk, namespace)
