"""One stored entry as the bytes of one safetensors file that describes and seals itself.

The file's metadata hold `format`, `format_version`, `header` (JSON: key, namespace, fingerprint, token ids, context
hash, meta, and the chunk's catalog record with its neighbours' token ids, so that a catalog can be rebuilt from the
files alone) and `seal`: a CRC-32C over all the rest of the file and, where a secret is set, an HMAC-SHA256.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import safetensors.torch
from safetensors import SafetensorError

from kvboost_rag.datamodels import ChunkRecord, StoreEntry

FORMAT = "kvboost-rag chunk"
FORMAT_VERSION = 3
EARLIER_VERSIONS = ("1", "2")
USELESS = ("corrupt", "truncated", "swapped", "outdated")
"""Reasons for which a file can only be removed. Foreign, later and unsigned files are left alone."""
SECRET_VARIABLE = "KVBOOST_STORE_SECRET"

CRC_DIGITS = 8
SIGNATURE_DIGITS = 64
SEAL_DIGITS = CRC_DIGITS + SIGNATURE_DIGITS
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""What safetensors itself accepts."""
_SEAL_FIELD = b'"seal":"'
"""Cannot occur inside a JSON string: there the quotes would be escaped."""


class ChunkFileError(ValueError):
    """Bytes that are not a usable chunk file. `reason` is short, for counters."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class ChunkHeader:
    """What a chunk file says of itself.

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


def secret_from_environment() -> bytes | None:
    """The key of the HMAC, from `KVBOOST_STORE_SECRET`; None where it is unset or empty."""
    return os.environ.get(SECRET_VARIABLE, "").encode() or None


def dump(
    entry: StoreEntry,
    created: float,
    record: ChunkRecord | None = None,
    neighbour_tokens: Sequence[tuple[int, ...]] = (),
    secret: bytes | None = None,
) -> bytes:
    """The bytes of the file. `entry.tensors` must be contiguous CPU tensors that share no memory."""
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
            "neighbour_tokens": list(neighbour_tokens),
        }
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "header": json.dumps(header, separators=(",", ":"), ensure_ascii=True),
        "seal": "0" * SEAL_DIGITS,
    }
    data = safetensors.torch.save(dict(entry.tensors), metadata=metadata)
    start = _seal_start(data)
    return b"".join((data[:start], _seal(data, start, secret), data[start + SEAL_DIGITS :]))


def load(data: bytes, secret: bytes | None = None) -> tuple[StoreEntry, ChunkHeader]:
    """The entry in a file's bytes, after checking the seal.

    Raises:
        ChunkFileError: with reason `truncated`, `foreign`, `version`, `outdated`, `corrupt` or `unsigned`.
    """
    header = read_header(data)
    _check_seal(data, secret)
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ChunkFileError("corrupt", str(error)) from error
    entry = StoreEntry(
        header.key, header.namespace, header.fingerprint, header.token_ids, header.context_hash, tensors, header.meta
    )
    return entry, header


def read_header(data: bytes) -> ChunkHeader:
    """The header in the first bytes of a file (at least `header_bytes` of them). Does not check the seal.

    Raises:
        ChunkFileError: with reason `truncated`, `foreign`, `version`, `outdated` or `corrupt`.
    """
    if len(data) < LENGTH_BYTES:
        raise ChunkFileError("truncated", f"{len(data)} bytes")
    end = LENGTH_BYTES + header_bytes(data)
    if len(data) < end:
        raise ChunkFileError("truncated", f"{len(data)} bytes, the header alone takes {end}")
    try:
        metadata = json.loads(data[LENGTH_BYTES:end]).get("__metadata__", {})
        found = metadata.get("format"), metadata.get("format_version")
    except (ValueError, AttributeError) as error:
        raise ChunkFileError("corrupt", f"unreadable header: {error}") from error
    if found[0] != FORMAT:
        raise ChunkFileError("foreign", f"not written by this program (format {found[0]!r})")
    if found[1] in EARLIER_VERSIONS:
        raise ChunkFileError("outdated", f"format version {found[1]}, written by an earlier version of this program")
    if found[1] != str(FORMAT_VERSION):
        raise ChunkFileError("version", f"format version {found[1]}, this program reads {FORMAT_VERSION}")
    try:
        return _parse(json.loads(metadata["header"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ChunkFileError("corrupt", f"unreadable header: {error!r}") from error


def header_bytes(data: bytes) -> int:
    """Length of the JSON header that follows the first `LENGTH_BYTES` bytes. Raises ChunkFileError if absurd."""
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise ChunkFileError("corrupt", f"header of {length} bytes")
    return length


def _parse(header: dict[str, Any]) -> ChunkHeader:
    key, fingerprint, namespace = header["key"], header["fingerprint"], header["namespace"]
    token_ids = tuple(header["token_ids"])
    record: ChunkRecord | None = None
    neighbour_tokens: tuple[tuple[int, ...], ...] = ()
    if "record" in header:
        known = header["record"]
        anchor_ids, neighbours = tuple(known["anchor_ids"]), tuple(known["neighbours"])
        separator_ids, forward = tuple(known["separator_ids"]), int(known.get("forward_tokens", 0))
        record = ChunkRecord(
            key, fingerprint, namespace, known["text"], token_ids, anchor_ids, neighbours, separator_ids, forward
        )
        neighbour_tokens = tuple(tuple(ids) for ids in known["neighbour_tokens"])
    return ChunkHeader(
        key=key,
        namespace=namespace,
        fingerprint=fingerprint,
        token_ids=token_ids,
        context_hash=header["context_hash"],
        meta=dict(header["meta"]),
        record=record,
        neighbour_tokens=neighbour_tokens,
        created=header["created_ms"] / 1000,
    )


def _seal_start(data: bytes) -> int:
    end = LENGTH_BYTES + header_bytes(data)
    field = data.find(_SEAL_FIELD, LENGTH_BYTES, end)
    if field < 0 or field + len(_SEAL_FIELD) + SEAL_DIGITS > end:
        raise ChunkFileError("corrupt", "no seal")
    return field + len(_SEAL_FIELD)


def _check_seal(data: bytes, secret: bytes | None) -> None:
    start = _seal_start(data)
    found = data[start : start + SEAL_DIGITS]
    if found[:CRC_DIGITS] != _checksum(data, start, found[CRC_DIGITS:]):
        raise ChunkFileError("corrupt", "the checksum does not match")
    if secret is not None and not hmac.compare_digest(found, _seal(data, start, secret)):
        raise ChunkFileError("unsigned", f"not signed with the secret in {SECRET_VARIABLE}")


def _seal(data: bytes, start: int, secret: bytes | None) -> bytes:
    """Checksum and signature of a file whose seal starts at `start`; the checksum covers the signature too."""
    signature = b"0" * SIGNATURE_DIGITS
    if secret is not None:
        signing = hmac.new(secret, data[:start], "sha256")
        signing.update(data[start + SEAL_DIGITS :])
        signature = signing.hexdigest().encode()
    return _checksum(data, start, signature) + signature


def _checksum(data: bytes, start: int, signature: bytes) -> bytes:
    checksum = 0
    for part in (data[:start], signature, data[start + SEAL_DIGITS :]):
        checksum = google_crc32c.extend(checksum, part)
    return f"{checksum:08x}".encode()
