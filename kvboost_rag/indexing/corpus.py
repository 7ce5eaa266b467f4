"""Texts to warm: files and folders, and a corpus that every Python carries with it."""

from __future__ import annotations

import importlib
import os
import pydoc
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PYDOC_MODULES = (
    "bisect",
    "cmd",
    "copy",
    "csv",
    "fnmatch",
    "functools",
    "getpass",
    "glob",
    "heapq",
    "linecache",
    "pprint",
    "sched",
    "shlex",
    "statistics",
    "string",
    "textwrap",
    "timeit",
)
"""Standard modules whose import does nothing; about a hundred chunks of 256 tokens together."""

SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "venv", "site-packages", "build", "dist"})
"""Folders that hold no documents. Hidden ones are left out as well."""

LEFT_OUT = ("FILE\n", "MODULE REFERENCE\n", "MODULE DOCS\n")
"""Sections of a reference text that differ between machines or say nothing."""

MAX_FILE_BYTES = 16 * 2**20

_UNREADABLE = "cannot be read"


class CorpusError(ValueError):
    """A path that was named cannot be read as text. The message names it."""


@dataclass(frozen=True)
class SourceText:
    """A text and where it comes from: a path, or `pydoc:` and a module's name."""

    source: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """What was read, in a fixed order, and what was found in folders but left out, with the reason."""

    texts: tuple[SourceText, ...]
    skipped: tuple[tuple[str, str], ...] = ()


def read_paths(paths: Iterable[str | Path]) -> Corpus:
    """Read files, and all text files below folders: whatever decodes as UTF-8 and holds no NUL byte.

    Sources are absolute paths, so that warming from another folder finds the same ones. Links to folders are not
    followed; a file reached twice is read once.

    Raises:
        CorpusError: a path does not exist, or a file that was named itself (not found in a folder) is not text.
    """
    found: dict[str, Path] = {}
    named: set[str] = set()
    refused: dict[str, str] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise CorpusError(f"no such file or folder: {path.absolute()}")
        if path.is_file():
            named.add(os.path.realpath(path))
        below = find_files([path], lambda folder, error: refused.setdefault(folder, unreadable(error)))
        found |= {source: file for source, file in below.items() if source not in found}
    corpus = read_files(found.values())
    for source, fault in corpus.skipped:
        if source in named:
            raise CorpusError(f"{found[source].absolute()} {fault}")
    return Corpus(corpus.texts, (*corpus.skipped, *refused.items()))


def find_files(
    paths: Iterable[str | Path], on_refused: Callable[[str, OSError], object] | None = None
) -> dict[str, Path]:
    """What `read_paths` would read, by source; paths that do not exist are passed over.

    Args:
        on_refused: called with each folder that cannot be listed, and why. What lies below it is not known then, which
            is not the same as gone.
    """
    found: dict[str, Path] = {}
    for path in map(Path, paths):
        for file in [path] if path.is_file() else _files_below(path, on_refused):
            found.setdefault(os.path.realpath(file), file)
    return found


def is_gone(source: str) -> bool:
    """Whether a file is surely not there: not merely out of reach, for want of permission or a share that is down."""
    try:
        os.stat(source)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def unreadable(error: OSError) -> str:
    """The reason why something is left out that may be readable another time."""
    return f"{_UNREADABLE}: {error.strerror}"


def read_files(files: Iterable[Path]) -> Corpus:
    """Files one by one; what is not text, or is gone, is among those left out."""
    texts: dict[str, SourceText] = {}
    skipped: dict[str, str] = {}
    for file in files:
        source = os.path.realpath(file)
        text, fault = _read(file)
        if fault is None:
            texts[source] = SourceText(source, text)
        else:
            skipped[source] = fault
    return Corpus(tuple(texts.values()), tuple(skipped.items()))


def is_lasting(fault: str) -> bool:
    """Whether a file that was left out has no text now, and not only could not be read at the moment."""
    return not fault.startswith(_UNREADABLE)


def pydoc_corpus(modules: Sequence[str] = PYDOC_MODULES) -> Corpus:
    """Reference texts of modules as `pydoc` renders them: real text on every machine, the same on each run.

    Left out is what differs between machines or says nothing: where the file lies, the notice on generated
    documentation, addresses of objects.
    """
    return Corpus(tuple(SourceText(f"pydoc:{name}", _reference_text(name)) for name in modules))


def _reference_text(name: str) -> str:
    rendered: str = pydoc.plaintext.document(importlib.import_module(name))  # type: ignore[attr-defined]
    # Renderers for terminals strike a character over itself to make it bold.
    rendered = re.sub(r".\x08", "", rendered)
    rendered = re.sub(r" at 0x[0-9A-Fa-f]+", "", rendered)
    sections = re.split(r"^(?=[A-Z][A-Z ]*$)", rendered, flags=re.MULTILINE)
    kept = [
        section for section in sections if not section.startswith(("FILE\n", "MODULE REFERENCE\n", "MODULE DOCS\n"))
    ]
    lines = (line.rstrip() for line in "".join(kept).splitlines())
    return "\n".join(lines).strip() + "\n"


def _files_below(folder: Path, on_refused: Callable[[str, OSError], object] | None) -> Iterator[Path]:
    def refused(error: OSError) -> None:
        if on_refused is not None and not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            on_refused(os.path.realpath(error.filename), error)

    for base, folders, files in os.walk(folder, onerror=refused):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("."))
        yield from (Path(base) / name for name in sorted(files) if not name.startswith("."))


def _read(file: Path) -> tuple[str, str | None]:
    """The file's text, or why it is not one."""
    try:
        os.path.realpath(file).encode()
    except UnicodeEncodeError:
        return "", "has a name that is not UTF-8: rename it"
    try:
        if not file.is_file():
            return "", "is not a regular file"
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            return "", f"is larger than {MAX_FILE_BYTES >> 20} MiB ({size:,} bytes): split it"
        raw = file.read_bytes()
    except OSError as error:
        return "", unreadable(error)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return "", "is not UTF-8 text"
    if "\0" in text:
        return "", "holds binary data"
    return (text, None) if text.strip() else ("", "is empty")
