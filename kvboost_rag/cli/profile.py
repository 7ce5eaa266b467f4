"""`kvboost-rag profile`: would reuse pay for these prompts?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvboost_rag.cli.console import console, styled

KINDS = {
    "exact": "same place, same text in front: a prefix cache finds it",
    "moved": "seen before elsewhere: position-independent reuse finds it",
    "near": "unchanged parts of pieces that were edited",
    "new": "never seen, or too short to store",
}
VERDICTS = {
    "reuse": "use document reuse",
    "prefix": "a prefix cache suffices",
    "none": "not worth it",
}


def profile(
    trace: Annotated[Path, typer.Argument(help="JSON lines with `prompt` or `messages`, optionally `documents`.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="Hub id or folder of the model's tokenizer. Default: words in short pieces.")
    ] = None,
) -> None:
    """Read a log of prompts and say how much of it could be reused, and how.

    Everything that came earlier in the log counts as cached. No model is loaded.

    Example: kvboost-rag profile prompts.jsonl
    """
    from kvboost_rag.measure.prompt_log import TraceError, TraceProfiler, advise, read_trace

    profiler = TraceProfiler(_tokenize(tokenizer))
    for prompt in read_trace(trace):
        profiler.add(prompt)
    found = profiler.result()
    if not found.total:
        raise TraceError(f"{trace} holds no prompts")
    table = Table(title=f"{found.num_prompts:,} prompts, {found.total:,} tokens", title_justify="left")
    table.add_column("tokens")
    table.add_column("share", justify="right")
    table.add_column("what it is")
    for kind, what in KINDS.items():
        table.add_row(kind, f"{found.share(kind):.1%}", what)
    console.print(table)
    advice = advise(found)
    console.print(styled(VERDICTS[advice.verdict], "bold", f": {advice.reason}"))
    if advice.settings:
        settings = ", ".join(f"{name}={value}" for name, value in advice.settings.items())
        console.print(f"settings   {settings}", highlight=False)
    if advice.verdict == "reuse":
        console.print(
            f"store      {found.kept_tokens:,} tokens come back: that is what it has to hold", highlight=False
        )


def _tokenize(name: str | None):  # type: ignore[no-untyped-def]
    if name is None:
        return None
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(name)
    return lambda text: loaded(text, add_special_tokens=False, verbose=False)["input_ids"]
