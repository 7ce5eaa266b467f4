"""Options that several commands share."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvboost_rag.stores import DiskStore
    from kvboost_rag.stores import Store as AnyStore

DEFAULT_MODEL = "bundled:smollm2"

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="Hub id, folder, .gguf file, bundled:smollm2 or bundled:gemma3.", show_default=True
    ),
]
Store = Annotated[
    Path | None,
    typer.Option("--store", "-s", help="Folder of the KV store. Default: `stores/default` in the user's cache."),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16. Default: the checkpoint's; bundled models: what is fast here."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, … Default: cuda where there is one.")]
MemoryBudget = Annotated[
    str | None,
    typer.Option(help="Memory for chunk KV at most, such as 4GB or 500MiB. Default: 35 % of this machine's."),
]
DiskBudget = Annotated[
    str | None,
    typer.Option(help="Disk space for chunk KV at most, such as 200GB. Default: 35 % of the file system's."),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="Serve Prometheus metrics on this port of 127.0.0.1 while the command runs."),
]
Namespace = Annotated[str, typer.Option(help="Whose chunks: chunks of other namespaces are never used.")]
ChunkTokens = Annotated[int, typer.Option(help="Tokens of a chunk at most: 64, 128, 256 or 512.")]
Neighbours = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=16,
        help="Similar chunks that each chunk is encoded after; 0 is faster and cruder. Default: what calibration "
        "chose, else 4.",
    ),
]
Passages = Annotated[int, typer.Option("--passages", "-k", min=1, help="Documents put into the prompt.")]


def finite(value: float | None) -> float | None:
    """For options that are numbers: `nan` is within all bounds, and `inf` is none that a command can work with.

    Raises:
        typer.BadParameter: either of them.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


@dataclass(frozen=True)
class StoreChoice:
    """What the options say about the store; budgets in bytes, None = a share of what there is."""

    folder: Path
    memory_bytes: int | None = None
    disk_bytes: int | None = None

    @classmethod
    def of(
        cls,
        chosen: Path | None,
        memory_budget: str | None = None,
        disk_budget: str | None = None,
        name: str = "default",
    ) -> StoreChoice:
        """From the options as given.

        Raises:
            ConfigError: a budget that is no size.
        """
        memory = parse_bytes("--memory-budget", memory_budget)
        return cls(store_folder(chosen, name), memory, parse_bytes("--disk-budget", disk_budget))


def store_folder(chosen: Path | None, name: str = "default") -> Path:
    """The folder of the store that a command works on."""
    from kvboost_rag.config import cache_dir

    return chosen.expanduser() if chosen is not None else cache_dir() / "stores" / name


def open_disk(chosen: Path | None) -> DiskStore:
    """The store in a folder, to look at it or clear it up. Without a budget of its own: opening it evicts nothing.

    Raises:
        StoreError: there is none.
    """
    from kvboost_rag.stores import DiskStore, StoreError
    from kvboost_rag.stores.budget import UNLIMITED

    folder = store_folder(chosen)
    if not (folder / "catalog.sqlite").is_file() and not any((folder / "chunks").glob("*/*")):
        raise StoreError(f"no store at {folder}: kvboost-rag warm PATH makes one")
    return DiskStore(folder, UNLIMITED)


def with_shared(disk: DiskStore) -> AnyStore:
    """What deleting has to reach: the folder's store, and the shared one that the environment names."""
    from kvboost_rag.stores.opening import open_remote
    from kvboost_rag.stores.remote.shared import SharedStore
    from kvboost_rag.stores.tiers import SHARED_VARIABLE

    url = os.environ.get(SHARED_VARIABLE)
    return SharedStore(disk, open_remote(url)) if url else disk


def parse_bytes(option: str, text: str | None) -> int | None:
    """Bytes of a size as people write it, None for None.

    Raises:
        ConfigError: no size; names the option.
    """
    from kvboost_rag.config import ConfigError
    from kvboost_rag.stores.tiers import parse_bytes as parsed

    try:
        size = None if text is None else parsed(text)
        if text is not None and size is None:
            raise ValueError(f"{text!r}: expected a size such as 500MB, 4GB or 1.5GiB")
    except ValueError as error:
        raise ConfigError(f"{option} {error}") from None
    return size
