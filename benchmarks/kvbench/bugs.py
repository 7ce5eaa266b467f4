"""Defects put into real functions of installed packages, with the traceback that running them would give."""

from __future__ import annotations

import ast
import random
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGES = (
    "json",
    "email",
    "logging",
    "html",
    "http",
    "urllib",
    "xml",
    "unittest",
    "jinja2",
    "rich",
    "typer",
    "filelock",
)
"""Pure Python, with the interpreter or among our own dependencies."""
MIN_LINES, MAX_TOKENS = 6, 220


@dataclass(frozen=True)
class Bug:
    """`sources[place]` holds the defect; `traceback` is what Python would print, without naming the file."""

    sources: tuple[str, ...]
    place: int
    traceback: str


@dataclass(frozen=True)
class Function:
    """A function's source text, and the file it is from (`json/encoder.py`)."""

    module: str
    name: str
    source: str

    @property
    def document(self) -> str:
        """As it stands in a prompt."""
        return f"# {self.module}\n{self.source}"


def make_bugs(count_tokens: Callable[[str], int], count: int, num_files: int, seed: int = 0) -> list[Bug]:
    """Each bug: functions of as many different modules, one of which uses a name that does not exist.

    Raises:
        ValueError: the installed packages hold too few functions of a fitting size.
    """
    functions = [f for f in known_functions() if count_tokens(f.source) <= MAX_TOKENS]
    if len(functions) < 4 * num_files:
        raise ValueError(f"found {len(functions)} functions in {', '.join(PACKAGES)}: too few")
    draw = random.Random(seed)
    bugs: list[Bug] = []
    while len(bugs) < count:
        chosen = draw.sample(functions, num_files)
        place = draw.randrange(num_files)
        distinct = len({f.module for f in chosen}) == num_files and len({f.name for f in chosen}) == num_files
        broken = misspell(chosen[place].source, draw) if distinct else None
        if broken is None:
            continue
        source, line, wrong = broken
        sources = [f.document for f in chosen]
        sources[place] = f"# {chosen[place].module}\n{source}"
        traceback = f"Traceback (most recent call last):\n    {line}\nNameError: name '{wrong}' is not defined"
        bugs.append(Bug(tuple(sources), place, traceback))
    return bugs


def misspell(source: str, draw: random.Random) -> tuple[str, str, str] | None:
    """Misspell one use of a local variable: (new source, the broken line, the wrong name), or None if there is none."""
    tree = ast.parse(source)
    known = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    uses = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in stored and len(node.id) > 2
    ]
    if not uses:
        return None
    use = draw.choice(uses)
    wrong = use.id[:-2] + use.id[-1] + use.id[-2]
    if wrong in known or wrong == use.id:
        return None
    lines = source.splitlines()
    raw = lines[use.lineno - 1].encode()
    start, end = use.col_offset, use.end_col_offset or 0
    lines[use.lineno - 1] = (raw[:start] + wrong.encode() + raw[end:]).decode()
    broken = "\n".join(lines)
    ast.parse(broken)
    return broken, lines[use.lineno - 1].strip(), wrong


@cache
def known_functions() -> tuple[Function, ...]:
    """All that are long enough, of the installed `PACKAGES`."""
    return tuple(_read_functions())


def _read_functions() -> Iterator[Function]:
    for package in PACKAGES:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in sorted(Path(folder).rglob("*.py")):
                if "test" not in path.name:
                    yield from _functions_in(path, f"{package}/{path.relative_to(folder)}")


def _functions_in(path: Path, module: str) -> Iterator[Function]:
    try:
        text = path.read_text("utf-8")
        tree = ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= MIN_LINES:
            source = textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))
            try:
                ast.parse(source)
            except SyntaxError:  # a string that begins at the left edge upsets dedent
                continue
            yield Function(module, node.name, source)
