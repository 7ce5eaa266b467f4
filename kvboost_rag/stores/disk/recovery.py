"""Bringing the account of a disk store's files in line with the files themselves."""

from __future__ import annotations

import logging

from kvboost_rag.kv.keys import record_context_hash
from kvboost_rag.stores.base import EntryInfo
from kvboost_rag.stores.catalog.catalog import Catalog
from kvboost_rag.stores.catalog.database import StoreError
from kvboost_rag.stores.disk import chunk_file
from kvboost_rag.stores.disk.chunk_file import USELESS, ChunkFileError, ChunkHeader
from kvboost_rag.stores.disk.file_table import FileTable, Reservation
from kvboost_rag.stores.disk.folder import StoreFolder

logger = logging.getLogger(__name__)


def rebuild(folder: StoreFolder, table: FileTable, catalog: Catalog, secret: bytes | None) -> int:
    """Enter every chunk file into the catalog and the account of bytes; returns how many could not be used.

    Only headers are read, each under a seal of its own (and a signature, where there is a secret): payloads are
    verified when they are asked for, as always. Sources (which document a chunk came from) are not in the files; they
    are linked again when the same documents are warmed.
    """
    num_bad = 0
    with table.database.transaction():
        for key in folder.list_keys():
            num_bad += not _try_enter(folder, table, catalog, key, secret)
    return num_bad


def reconcile(folder: StoreFolder, table: FileTable, catalog: Catalog, secret: bytes | None) -> None:
    """Make rows and files agree by name, after a process died between touching the one and the other.

    Inside a transaction no other process can publish or remove a file, so what differs is left over.
    """
    with table.database.transaction():
        rows, files = {info.key for info in table.infos()}, set(folder.list_keys())
        for key in rows - files:
            table.remove(key)
        for key in files - rows:
            _try_enter(folder, table, catalog, key, secret)


def _try_enter(folder: StoreFolder, table: FileTable, catalog: Catalog, key: str, secret: bytes | None) -> bool:
    """`enter`, or remove a file that is of no use, or leave alone one that is somebody else's."""
    try:
        enter(folder, table, catalog, key, secret)
    except ChunkFileError as error:
        if error.reason in USELESS:
            folder.remove(key)
        logger.warning("%s is not entered into the catalog: %s", folder.path(key), error)
        return False
    except (OSError, ValueError, StoreError) as error:
        logger.warning("%s is not entered into the catalog: %s", folder.path(key), error)
        return False
    return True


def enter(folder: StoreFolder, table: FileTable, catalog: Catalog, key: str, secret: bytes | None) -> None:
    """Enter one chunk file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a chunk file of this key, or its record contradicts its hashes.
    """
    header, num_bytes = chunk_file.read_head(folder.read_head(key), secret)
    if folder.size(key) != num_bytes:
        raise ChunkFileError("truncated", f"{folder.size(key)} bytes, {num_bytes} by its head")
    if header.key != key:
        raise ChunkFileError("swapped", f"holds {header.key[:16]}")
    if header.record is not None:
        if record_context_hash(header.record, header.neighbour_tokens) != header.context_hash:
            raise ChunkFileError("corrupt", "the encoding context does not have its hash")
        catalog.restore(header.record, header.neighbour_tokens)
    table.add(_info_of(header, num_bytes))


def settle(
    folder: StoreFolder, table: FileTable, catalog: Catalog, reservation: Reservation, secret: bytes | None
) -> None:
    """Close a reservation whose writer failed or died: its file counts if it got its name, else nothing does."""
    with table.database.transaction():
        size = folder.size(reservation.key)
        if size is None:
            table.remove(reservation.key)
        elif size != table.bytes_of(reservation.key):
            try:
                enter(folder, table, catalog, reservation.key, secret)
            except (OSError, ValueError):
                folder.remove(reservation.key)
                table.remove(reservation.key)
        table.release(reservation)


def _info_of(header: ChunkHeader, num_bytes: int) -> EntryInfo:
    """What is known of a file by its header."""
    return EntryInfo(
        key=header.key,
        namespace=header.namespace,
        fingerprint=header.fingerprint,
        num_tokens=len(header.token_ids),
        num_bytes=num_bytes,
        created=header.created,
        last_used=header.created,
        meta=header.meta,
        context_hash=header.context_hash,
    )
