"""Where output goes, and how progress looks."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

# File names, answers and errors hold brackets and colons of their own: nothing that is printed is markup.
console = Console(markup=False, emoji=False)
errors = Console(stderr=True, markup=False, emoji=False)


def styled(word: str, style: str, rest: str = "") -> Text:
    """A line that begins with a word in a style."""
    return Text.assemble((word, style), rest)


def progress_bar(*columns: str) -> Progress:
    """A progress bar; `columns` are further texts, formatted with the task's fields."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        *(TextColumn(column, markup=False) for column in columns),
        TimeElapsedColumn(),
        console=console,
    )


def bytes_text(num_bytes: float) -> str:
    """`1.5 GB`; units are powers of ten."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def seconds_text(seconds: float) -> str:
    """`47 s`, `3:05 min` or `2:10 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
