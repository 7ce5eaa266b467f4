"""Digests of weights that were loaded from files, kept in the cache folder under the files' identity.

A 7B model in bfloat16 is 14 GB to hash; the files it came from say in microseconds that they are the same as last time.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvboost_rag.config import cache_dir
from kvboost_rag.kv.keys import hash_fields
from kvboost_rag.models.digest import NamedTensors, WeightDigests

logger = logging.getLogger(__name__)

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "config.json")


def files_identity(source: Path, options: Mapping[str, Any]) -> str | None:
    """What loaded weights are a function of: the files (path, inode, size, times), and how they were loaded.

    None where a file cannot be looked at. Times are those of content and inode in nanoseconds, so that a file that was
    replaced and given its old time back is another one.
    """
    try:
        paths = [source] if source.is_file() else sorted(p for kind in WEIGHT_FILES for p in source.glob(kind))
        stats = [(str(path.resolve()), path.stat()) for path in paths]
    except OSError:
        return None
    if not any(not path.endswith("config.json") for path, _ in stats):
        return None
    files = [f"{path} {s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}" for path, s in stats]
    loaded = json.dumps({k: str(v) for k, v in options.items()}, sort_keys=True)
    versions = " ".join(version(name) for name in ("torch", "transformers"))
    return hash_fields("weight files", *(f.encode() for f in files), loaded.encode(), versions.encode())


def digests_of_files(identity: str, tensors: NamedTensors, digests: WeightDigests) -> list[bytes]:
    """Digests of freshly loaded tensors: read from the cache, or computed and kept there.

    Only for tensors that nobody could change since they were loaded.
    """
    described = [f"{name} {tuple(t.shape)} {t.dtype} {t.device.type}".encode() for name, t in tensors]
    path = cache_dir() / "digests" / f"{hash_fields('digests', identity.encode(), *described)}.json"
    known = _read(path, len(tensors))
    if known is not None:
        digests.remember(tensors, known)
        return known
    computed = digests.of(tensors)
    _write(path, computed)
    return computed


def _read(path: Path, count: int) -> list[bytes] | None:
    try:
        found = [bytes.fromhex(digest) for digest in json.loads(path.read_text("utf-8"))]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        logger.warning("the digests in %s cannot be read and are computed again: %s", path, error)
        return None
    return found if len(found) == count and all(len(digest) == 32 for digest in found) else None


def _write(path: Path, digests: Sequence[bytes]) -> None:
    """Whole or not at all; a cache that cannot be written costs the next load the same time again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
            json.dump([digest.hex() for digest in digests], file)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("digests of the weights cannot be kept in %s: %s", path.parent, error)
