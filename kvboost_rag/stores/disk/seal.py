"""Checksum and signature of pieces of a file: 8 hex digits of CRC-32C, 64 of HMAC-SHA256 (zeros without a secret)."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from typing import TypeAlias

import google_crc32c
import numpy as np

Piece: TypeAlias = bytes | memoryview

SECRET_VARIABLE = "KVBOOST_STORE_SECRET"
CRC_DIGITS = 8
SIGNATURE_DIGITS = 64
SEAL_DIGITS = CRC_DIGITS + SIGNATURE_DIGITS


def secret_from_environment() -> bytes | None:
    """The key of the HMAC, from `KVBOOST_STORE_SECRET`; None where it is unset or empty."""
    return os.environ.get(SECRET_VARIABLE, "").encode() or None


def seal(pieces: Iterable[Piece], secret: bytes | None) -> bytes:
    """The seal of `pieces` one after the other; the checksum covers the signature too."""
    pieces = list(pieces)
    signature = b"0" * SIGNATURE_DIGITS
    if secret is not None:
        signing = hmac.new(secret, digestmod="sha256")
        for piece in pieces:
            signing.update(piece)
        signature = signing.hexdigest().encode()
    return _checksum(pieces, signature) + signature


def fault(found: bytes, pieces: Iterable[Piece], secret: bytes | None) -> str | None:
    """Why `found` is not the seal of `pieces`: `corrupt`, `unsigned` (not with this secret), or None if it is."""
    pieces = list(pieces)
    if found[:CRC_DIGITS] != _checksum(pieces, found[CRC_DIGITS:]):
        return "corrupt"
    if secret is not None and not hmac.compare_digest(found, seal(pieces, secret)):
        return "unsigned"
    return None


def _checksum(pieces: Iterable[Piece], signature: bytes) -> bytes:
    checksum = google_crc32c.extend(0, signature)
    for piece in pieces:
        if len(piece):
            checksum = google_crc32c.extend(checksum, np.frombuffer(piece, np.uint8))
    return f"{checksum:08x}".encode()
