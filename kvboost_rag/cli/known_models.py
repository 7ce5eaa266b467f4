"""Which model a store was warmed with, so that a look at it needs no weights."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path

from kvboost_rag.cli.model_choice import ModelChoice

logger = logging.getLogger(__name__)

FILE_NAME = "models.json"


def remember_fingerprint(folder: Path, choice: ModelChoice, fingerprint: str) -> None:
    """Note the fingerprint that a model had when it was loaded. A store that cannot be written to goes without."""
    known = _read(folder)
    if known.get(_name(choice)) == fingerprint:
        return
    with suppress(OSError):
        staged = folder / f"{FILE_NAME}.staged"
        staged.write_text(json.dumps(known | {_name(choice): fingerprint}, indent=1, sort_keys=True))
        staged.replace(folder / FILE_NAME)


def recall_fingerprint(folder: Path, choice: ModelChoice) -> str | None:
    """The fingerprint that the model had when the store was last warmed with it, or None."""
    return _read(folder).get(_name(choice))


def _name(choice: ModelChoice) -> str:
    where = Path(choice.name).expanduser()
    name = str(where.resolve()) if where.exists() else choice.name
    return f"{name} {choice.resolved_dtype() or 'dtype of the checkpoint'}"


def _read(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / FILE_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return {str(k): v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}
