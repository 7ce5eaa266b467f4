"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
Namespace = Annotated[str, typer.Option(help="Tenant: chunks of other namespaces are never used.")]
ChunkTokens = Annotated[int, typer.Option(help="Tokens of a chunk at most: 64, 128, 256 or 512.")]
Neighbours = Annotated[
    int, typer.Option(min=0, max=16, help="Similar chunks that each chunk is encoded behind; 0 is faster and cruder.")
]
Passages = Annotated[int, typer.Option("--passages", "-k", min=1, help="Documents put into the prompt.")]


def store_folder(chosen: Path | None, name: str = "default") -> Path:
    """The folder of the store that a command works on."""
    from kvboost_rag.config import cache_dir

    return chosen.expanduser() if chosen is not None else cache_dir() / "stores" / name
