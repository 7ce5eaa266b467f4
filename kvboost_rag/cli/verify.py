"""`kvboost-rag verify`: is a store sound?"""

from __future__ import annotations

import typer
from rich.table import Table

from kvboost_rag.cli import options
from kvboost_rag.cli.console import bytes_text, console, progress_bar, styled

UNSOUND = 1
SHOWN = 50


def verify(store: options.Store = None) -> None:
    """Read every chunk file and compare it with its checksum, its name, the account of bytes and the catalog.

    What lies in the shared store that KVBOOST_SHARED_STORE names is looked through, too.

    Changes nothing. Exit code 1 if something is wrong: such chunks are never served, and kvboost-rag gc clears them up.

    Example: kvboost-rag verify --store ~/kv
    """
    from kvboost_rag.stores.verify import verify as read_all

    disk = options.open_disk(store)
    whole = options.with_shared(disk)
    try:
        with progress_bar("{task.completed}/{task.total} files") as bar:
            task = bar.add_task("reading", total=None)
            report = read_all(whole, lambda done, total: bar.update(task, completed=done, total=total))
        console.print(f"store      {disk.folder.root}", highlight=False)
    finally:
        whole.close()
    size = f"{report.num_files:,} files, {bytes_text(report.num_bytes)}, {report.num_chunks_known:,} chunks known"
    if not report.problems:
        console.print(styled("sound", "bold green", f"      {size}"))
        return
    table = Table("chunk", "what is wrong", "detail")
    for problem in report.problems[:SHOWN]:
        table.add_row(problem.key[:16], problem.what, problem.detail)
    console.print(table)
    more = f", {SHOWN} of them shown" if len(report.problems) > SHOWN else ""
    console.print(styled("unsound", "bold red", f"    {size}; {len(report.problems):,} problems{more}"))
    raise typer.Exit(UNSOUND)
