"""What a chunk file says of itself: parsed from JSON that anybody may have written, so nothing is taken for granted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost_rag.datamodels import ChunkRecord, StoreEntry

LAST_TOKEN = 2**31 - 1
LATEST_S = 2.0**40


@dataclass(frozen=True)
class ChunkHeader:
    """The header of a chunk file.

    Attributes:
        record, neighbour_tokens: for the catalog; None and () for exact blocks and for chunks it did not know.
        created: seconds since the epoch.
    """

    key: str
    namespace: str
    fingerprint: str
    token_ids: tuple[int, ...]
    context_hash: str
    meta: Mapping[str, str]
    record: ChunkRecord | None
    neighbour_tokens: tuple[tuple[int, ...], ...]
    created: float


def header_text(
    entry: StoreEntry, created: float, record: ChunkRecord | None, neighbour_tokens: Sequence[tuple[int, ...]]
) -> str:
    """The header as JSON."""
    header: dict[str, Any] = {
        "key": entry.key,
        "namespace": entry.namespace,
        "fingerprint": entry.fingerprint,
        "token_ids": entry.token_ids,
        "context_hash": entry.context_hash,
        "meta": dict(entry.meta),
        "created_ms": round(created * 1000),  # as many digits always, so that the same entry takes the same bytes
    }
    if record is not None:
        header["record"] = {
            "text": record.text,
            "anchor_ids": record.anchor_ids,
            "separator_ids": record.separator_ids,
            "neighbours": record.neighbours,
            "forward_tokens": record.forward_tokens,
            "splits": record.splits,
            "mixture": record.mixture,
            "neighbour_tokens": list(neighbour_tokens),
        }
    return json.dumps(header, separators=(",", ":"), ensure_ascii=True)


def parse_header(text: str) -> ChunkHeader:
    """The inverse of `header_text`.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: it is none.
    """
    header = json.loads(text)
    key, fingerprint, namespace = (_text(header[name]) for name in ("key", "fingerprint", "namespace"))
    token_ids = _ids(header["token_ids"])
    record: ChunkRecord | None = None
    neighbour_tokens: tuple[tuple[int, ...], ...] = ()
    if "record" in header:
        known = header["record"]
        record = ChunkRecord(
            key,
            fingerprint,
            namespace,
            _text(known["text"]),
            token_ids,
            _ids(known["anchor_ids"]),
            tuple(_text(neighbour) for neighbour in _list(known["neighbours"])),
            _ids(known["separator_ids"]),
            _whole(known["forward_tokens"], LAST_TOKEN),
            _ids(known.get("splits", [])),
            _text(known.get("mixture", "")),
        )
        neighbour_tokens = tuple(_ids(ids) for ids in _list(known["neighbour_tokens"]))
        if {len(neighbour_tokens), sum(record.splits or (len(record.neighbours),))} != {len(record.neighbours)}:
            raise ValueError("not one list of token ids for each neighbour, or not each in a context")
    return ChunkHeader(
        key=key,
        namespace=namespace,
        fingerprint=fingerprint,
        token_ids=token_ids,
        context_hash=_text(header["context_hash"]),
        meta={_text(name): _text(value) for name, value in header["meta"].items()},
        record=record,
        neighbour_tokens=neighbour_tokens,
        created=_whole(header["created_ms"], int(LATEST_S * 1000)) / 1000,
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where a text belongs")
    value.encode()  # half a character would be refused by the catalog
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} where a list belongs")
    return value


def _whole(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("a number that is none of ours")
    return value


def _ids(value: object) -> tuple[int, ...]:
    return tuple(_whole(i, LAST_TOKEN) for i in _list(value))
