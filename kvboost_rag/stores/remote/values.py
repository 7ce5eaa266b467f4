"""A stored entry as immutable values: parts, and a manifest that is written last and names the digest of each part."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvboost_rag.kv.keys import hash_fields
from kvboost_rag.stores.disk import seal
from kvboost_rag.stores.disk.seal import SEAL_DIGITS, Piece

PART_BYTES = 4 << 20
MOST_PARTS = 1 << 16


class ManifestError(ValueError):
    """Bytes that are no manifest of ours; `reason` as for chunk files."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Manifest:
    """What a value consists of: the file of `disk.chunk_file` cut into parts.

    Attributes:
        digests: SHA-256 of each part.
        head: what `Store.info` tells of the entry.
    """

    num_bytes: int
    digests: tuple[str, ...]
    head: dict[str, object]


def variant(context_hash: str, setting: str) -> str:
    """Names one value among those of a chunk: KV of another context or codec is another value, never a new version."""
    return hash_fields("remote value", context_hash.encode(), setting.encode())[:32]


def parts_of(pieces: Sequence[Piece]) -> Iterator[bytes]:
    """The bytes of `pieces` in parts of `PART_BYTES`; one part is copied at a time."""
    part = bytearray()
    for piece in pieces:
        left = memoryview(piece)
        while left:
            taken = left[: PART_BYTES - len(part)]
            part += taken
            left = left[len(taken) :]
            if len(part) == PART_BYTES:
                yield bytes(part)
                part.clear()
    if part:
        yield bytes(part)


def write_manifest(manifest: Manifest, secret: bytes | None) -> bytes:
    """The manifest's bytes, sealed."""
    body = {"num_bytes": manifest.num_bytes, "digests": manifest.digests, "head": manifest.head}
    text = json.dumps(body, separators=(",", ":")).encode()
    return seal.seal([text], secret) + text


def read_manifest(data: bytes, secret: bytes | None) -> Manifest:
    """The inverse of `write_manifest`.

    Raises:
        ManifestError: `corrupt`, or `unsigned` where there is a secret.
    """
    text = data[SEAL_DIGITS:]
    if (fault := seal.fault(data[:SEAL_DIGITS], [text], secret)) is not None:
        raise ManifestError(fault)
    try:
        body = json.loads(text)
        manifest = Manifest(int(body["num_bytes"]), tuple(map(str, body["digests"])), dict(body["head"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ManifestError("corrupt") from error
    if not 0 <= manifest.num_bytes <= len(manifest.digests) * PART_BYTES or len(manifest.digests) > MOST_PARTS:
        raise ManifestError("corrupt")
    return manifest


def digest(part: bytes) -> str:
    """SHA-256 of a part."""
    return hashlib.sha256(part).hexdigest()
