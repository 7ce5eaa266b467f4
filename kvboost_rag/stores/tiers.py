"""What tiers a store has, as a value: from a text such as `tiers: memory 4GB, disk /var/kv 100GB, redis://host`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PREFIX = "tiers:"
SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "s3", "gs", "az", "file")
SHARED_VARIABLE = "KVBOOST_SHARED_STORE"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b)?"
MAX_BYTES = 2**63 - 1


@dataclass(frozen=True)
class Tiers:
    """Memory, over a folder, over a service that several machines share.

    Attributes:
        folder: None: nothing is kept on disk.
        memory_bytes, disk_bytes: budgets; None: a share of what there is.
        shared: URL of the service (`SCHEMES`); needs a folder, where the catalog lies.
    """

    folder: Path | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    shared: str | None = None

    def __post_init__(self) -> None:
        if self.shared is not None:
            scheme = self.shared.split("://")[0] if "://" in self.shared else ""
            if scheme not in SCHEMES:
                raise ValueError(
                    f"shared store {self.shared!r}: expected a URL, {', '.join(f'{s}://…' for s in SCHEMES)}"
                )
            if self.folder is None:
                raise ValueError("a shared store needs a disk tier (disk FOLDER): what is known of chunks lies there")

    @classmethod
    def parse(cls, text: str) -> Tiers:
        """From `tiers: memory [SIZE], disk FOLDER [SIZE], URL`, in any order; each once at most.

        Raises:
            ValueError: it is none of these; says what.
        """
        found: dict[str, object] = {}
        for item in text.removeprefix(PREFIX).split(","):
            words = item.strip()
            if match := re.fullmatch(rf"memory(?:\s+{_SIZE})?", words, re.IGNORECASE):
                new: dict[str, object] = {"memory_bytes": parse_bytes("".join(g or "" for g in match.groups()))}
            elif match := re.fullmatch(rf"disk\s+(.+?)(?:\s+{_SIZE})?", words, re.IGNORECASE):
                size = parse_bytes("".join(g or "" for g in match.groups()[1:]))
                new = {"folder": Path(match[1]).expanduser(), "disk_bytes": size}
            elif "://" in words:
                new = {"shared": words}
            else:
                raise ValueError(f"{words!r} is no tier: expected memory [SIZE], disk FOLDER [SIZE], or a URL")
            if twice := found.keys() & new.keys():
                raise ValueError(f"{text!r} names {min(twice).split('_')[0]} twice")
            found |= new
        return cls(**found)  # type: ignore[arg-type]


def parse_bytes(text: str) -> int | None:
    """A size such as `500MB`, `4GB` or `1.5GiB`; None for an empty text.

    Raises:
        ValueError: it is none.
    """
    if not text.strip():
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f"{text!r}: expected a size such as 500MB, 4GB or 1.5GiB")
    num_bytes = float(found[1]) * _UNITS[found[2].upper()]
    if num_bytes > MAX_BYTES:
        raise ValueError(f"{text!r}: more than any machine has")
    return int(num_bytes)
