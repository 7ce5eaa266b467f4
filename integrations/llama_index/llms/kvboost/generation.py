"""What the cache of an ingestion pipeline has to tell apart: stores, and what happened to them since."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

_GENERATIONS: WeakKeyDictionary[Any, tuple[str, str]] = WeakKeyDictionary()


def generation(engine: Any) -> str:
    """A value that is new whenever the known chunks, or whose they are, changed: what did nothing may be skipped.

    It is the same for all who share a store in this process, and to be asked after each change of one's own too:
    otherwise what was made and then deleted by somebody would look as if it had never been.
    """
    catalog = engine.store.catalog
    state = catalog.sources.state()
    seen = _GENERATIONS.get(catalog)
    if seen is None or seen[0] != state:
        seen = _GENERATIONS[catalog] = state, uuid.uuid4().hex
    return seen[1]


def store_identity(engine: Any) -> str:
    """Differs between stores, also between one that was deleted and another at the same place."""
    path = Path(engine.store.catalog.database.path)
    if not path.is_file():
        return f"memory {os.getpid()} {id(engine.store)}"
    return f"{path.absolute()} {path.stat().st_ino}"
