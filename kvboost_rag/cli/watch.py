"""Keeping a store in step with folders: files that come, change and go."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvboost_rag.cli.console import console
from kvboost_rag.indexing.corpus import find_files, unreadable

Stamp = tuple[int, int]
"""Time of the last change in nanoseconds, and size."""


@dataclass(frozen=True)
class Changes:
    """Files with a new content, and sources whose files are gone."""

    changed: dict[str, Path]
    gone: tuple[str, ...]


class FolderWatch:
    """Looks at paths again and again, and says what is different from when it was last told `done`.

    By polling: works on every file system, network shares too. Files that are still being written to wait until two
    looks in a row see the same. While a folder that was named is missing (an unmounted disk), or one below it cannot be
    listed, what lay there counts as there and unchanged; so does a file that cannot be looked at.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._folders = {path: os.path.realpath(path) + os.sep for path in paths if path.is_dir()}
        self._missing: set[Path] = set()
        self._refused: dict[str, str] = {}
        self._known: dict[str, Stamp] = {}
        self._known = self._last = self._look()

    def poll(self) -> Changes | None:
        """What has settled since the last `done`, or None."""
        now = self._look()
        settled, self._last = now == self._last, now
        if not settled or now == self._known:
            return None
        files = find_files(self.paths)
        changed = {s: files[s] for s, stamp in now.items() if self._known.get(s) != stamp and s in files}
        return Changes(changed, tuple(s for s in self._known if s not in now))

    def done(self) -> None:
        """What the last `poll` saw is dealt with."""
        self._known = self._last

    def _look(self) -> dict[str, Stamp]:
        refused: dict[str, str] = {}
        files = find_files(self.paths, lambda folder, error: refused.setdefault(folder, unreadable(error)))
        found = self._below_missing() | self._below_refused(refused)
        for source, file in files.items():
            try:
                stat = file.stat()
                found[source] = (stat.st_mtime_ns, stat.st_size)
            except (FileNotFoundError, NotADirectoryError):  # gone between two system calls
                continue
            except OSError:
                if source in self._known:
                    found[source] = self._known[source]
        return found

    def _below_refused(self, refused: dict[str, str]) -> dict[str, Stamp]:
        for folder in refused.keys() - self._refused.keys():
            console.print(f"skipped    {folder} {refused[folder]}; what was read from there is kept", highlight=False)
        self._refused = refused
        return self._known_below(tuple(folder + os.sep for folder in refused))

    def _below_missing(self) -> dict[str, Stamp]:
        missing = {path for path in self._folders if not path.is_dir()}
        for path in missing - self._missing:
            console.print(f"missing    {path}: what was read from there is kept", highlight=False)
        self._missing = missing
        return self._known_below(tuple(self._folders[path] for path in missing))

    def _known_below(self, roots: tuple[str, ...]) -> dict[str, Stamp]:
        return {source: stamp for source, stamp in self._known.items() if source.startswith(roots)}


def watch(
    folders: FolderWatch,
    apply: Callable[[Changes], None],
    interval_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Apply changes as they come, until Ctrl-C. A fault is said once, and the changes are tried again."""
    console.print(f"watching   {', '.join(map(str, folders.paths))}; Ctrl-C ends it", highlight=False)
    try:
        _follow(folders, apply, interval_s, sleep)
    except KeyboardInterrupt:
        console.print("stopped watching")


def _follow(
    folders: FolderWatch, apply: Callable[[Changes], None], interval_s: float, sleep: Callable[[float], None]
) -> None:
    fault = ""
    while True:
        sleep(interval_s)
        changes = folders.poll()
        if changes is None:
            continue
        try:
            apply(changes)
        except (OSError, ValueError, RuntimeError) as error:
            text = " ".join(str(error).split())
            if text != fault:
                console.print(f"failed     {text}; trying again", highlight=False)
            fault = text
            continue
        fault = ""
        folders.done()
