"""`kvboost-rag gc`: mend a store."""

from __future__ import annotations

from kvboost_rag.cli import options
from kvboost_rag.cli.console import bytes_text, console, progress_bar


def gc(store: options.Store = None) -> None:
    """Clear up what verify finds: damaged files and unknown KV go, the account is mended, leftovers are removed.

    Nothing that can be served is touched. Other processes may use the store meanwhile.

    Example: kvboost-rag gc --store ~/kv
    """
    from kvboost_rag.stores.verify import gc as mend

    disk = options.open_disk(store)
    whole = options.with_shared(disk)
    try:
        before = sum(disk.bytes_held.values())
        with progress_bar("{task.completed}/{task.total} files") as bar:
            task = bar.add_task("reading", total=None)
            done = mend(whole, lambda count, total: bar.update(task, completed=count, total=total))
        after = sum(disk.bytes_held.values())
        console.print(f"store      {disk.folder.root}", highlight=False)
    finally:
        whole.close()
    steps = [f"{count:,} {what} removed" for what, count in sorted(done.removed.items())]
    steps += [f"{done.entered:,} files entered"] if done.entered else []
    steps += [f"{done.rows_dropped:,} rows of vanished files dropped"] if done.rows_dropped else []
    console.print(f"done       {', '.join(steps) or 'nothing to mend'}", highlight=False)
    console.print(f"disk       {bytes_text(after)} ({bytes_text(before)} before)", highlight=False)
