"""One stored entry as the bytes of one safetensors file that describes and seals itself.

The file's metadata hold `format`, `format_version`, `header` (JSON: key, namespace, fingerprint, token ids, context
hash, meta, and the chunk's catalog record with its neighbours' token ids, so that a catalog can be rebuilt from the
files alone), `header_seal` over that, and `seal` over all the rest of the file (`disk.seal`). What is read of a file is
believed after its seal, never before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from kvboost_rag.datamodels import ChunkRecord, StoreEntry
from kvboost_rag.stores.disk import seal
from kvboost_rag.stores.disk.chunk_header import ChunkHeader, header_text, parse_header
from kvboost_rag.stores.disk.seal import SEAL_DIGITS, SECRET_VARIABLE, Piece

FORMAT = "kvboost-rag chunk"
FORMAT_VERSION = 4
EARLIER_VERSIONS = ("1", "2", "3")
USELESS = ("corrupt", "truncated", "swapped", "outdated")
"""Reasons for which a file can only be removed. Foreign, later and unsigned files are left alone."""

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""What safetensors itself accepts."""
_SEAL_FIELD = b'"seal":"'
"""Cannot occur inside a JSON string: there the quotes would be escaped."""

_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
"""What JSON that anybody may have written can raise."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class ChunkFileError(ValueError):
    """Bytes that are not a usable chunk file. `reason` is short, for counters."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def dump(
    entry: StoreEntry,
    created: float,
    record: ChunkRecord | None = None,
    neighbour_tokens: Sequence[tuple[int, ...]] = (),
    secret: bytes | None = None,
) -> list[Piece]:
    """The file in pieces to be written one after the other: its head, then the tensors' own memory, not copied.

    Args:
        entry: its tensors contiguous and on the CPU.
    """
    # Wide elements first, so that all are aligned.
    tensors = sorted(entry.tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    payload = [tensor.reshape(-1).view(torch.uint8).numpy().data for _, tensor in tensors]
    text = header_text(entry, created, record, neighbour_tokens)
    layout: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "format_version": str(FORMAT_VERSION),
            "header": text,
            "header_seal": seal.seal([text.encode()], secret).decode(),
            "seal": "0" * SEAL_DIGITS,
        }
    }
    end = 0
    for (name, tensor), data in zip(tensors, payload, strict=True):
        start, end = end, end + len(data)
        layout[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(layout, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    head = len(head).to_bytes(LENGTH_BYTES, "little") + head
    at = _seal_start(head)
    before, after = head[:at], head[at + SEAL_DIGITS :]
    return [before + seal.seal([before, after, *payload], secret) + after, *payload]


def num_bytes(pieces: Sequence[Piece]) -> int:
    """Length of the file."""
    return sum(len(piece) for piece in pieces)


def load(data: bytes, secret: bytes | None = None) -> tuple[StoreEntry, ChunkHeader]:
    """The entry in a file's bytes, after checking the seal.

    Raises:
        ChunkFileError: with reason `truncated`, `foreign`, `version`, `outdated`, `corrupt` or `unsigned`.
    """
    header, size = read_head(data, secret)
    if size != len(data):
        raise ChunkFileError("truncated" if len(data) < size else "corrupt", f"{len(data)} bytes, {size} by its head")
    start, whole = _seal_start(data), memoryview(data)
    _check(data[start : start + SEAL_DIGITS], [whole[:start], whole[start + SEAL_DIGITS :]], secret)
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ChunkFileError("corrupt", str(error)) from error
    entry = StoreEntry(
        header.key, header.namespace, header.fingerprint, header.token_ids, header.context_hash, tensors, header.meta
    )
    return entry, header


def read_head(data: bytes, secret: bytes | None = None) -> tuple[ChunkHeader, int]:
    """The sealed header in the first bytes of a file (at least `header_bytes` of them), and the size of the whole.

    Raises:
        ChunkFileError: with reason `truncated`, `foreign`, `version`, `outdated`, `corrupt` or `unsigned`.
    """
    if len(data) < LENGTH_BYTES:
        raise ChunkFileError("truncated", f"{len(data)} bytes")
    end = LENGTH_BYTES + header_bytes(data)
    if len(data) < end:
        raise ChunkFileError("truncated", f"{len(data)} bytes, the header alone takes {end}")
    try:
        layout = json.loads(data[LENGTH_BYTES:end])
        metadata = layout.pop("__metadata__", {})
        found = metadata.get("format"), metadata.get("format_version")
        size = end + int(max((tensor["data_offsets"][1] for tensor in layout.values()), default=0))
    except _UNREADABLE as error:
        raise ChunkFileError("corrupt", f"unreadable header: {type(error).__name__}") from error
    if found[0] != FORMAT:
        raise ChunkFileError("foreign", f"not written by this program (format {str(found[0])[:50]!r})")
    if found[1] in EARLIER_VERSIONS:
        raise ChunkFileError("outdated", f"format version {found[1]}, written by an earlier version of this program")
    if found[1] != str(FORMAT_VERSION):
        raise ChunkFileError("version", f"format version {str(found[1])[:50]}, this program reads {FORMAT_VERSION}")
    try:
        text = metadata["header"]
        _check(metadata["header_seal"].encode(), [text.encode()], secret)
        return parse_header(text), size
    except ChunkFileError:
        raise
    except _UNREADABLE as error:
        raise ChunkFileError("corrupt", f"unreadable header: {type(error).__name__}: {str(error)[:200]}") from error


def header_bytes(data: bytes) -> int:
    """Length of the JSON header that follows the first `LENGTH_BYTES` bytes. Raises ChunkFileError if absurd."""
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise ChunkFileError("corrupt", f"header of {length} bytes")
    return length


def _seal_start(data: bytes) -> int:
    end = LENGTH_BYTES + header_bytes(data)
    field = data.find(_SEAL_FIELD, LENGTH_BYTES, end)
    if field < 0 or field + len(_SEAL_FIELD) + SEAL_DIGITS > end:
        raise ChunkFileError("corrupt", "no seal")
    return field + len(_SEAL_FIELD)


def _check(found: bytes, pieces: Sequence[Piece], secret: bytes | None) -> None:
    fault = seal.fault(found, pieces, secret)
    if fault is not None:
        meaning = "the checksum does not match" if fault == "corrupt" else f"not signed with {SECRET_VARIABLE}"
        raise ChunkFileError(fault, meaning)
