"""Chunks of source code that end between functions and classes."""

from __future__ import annotations

import importlib
import logging
import re
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kvboost_rag.indexing.chunking.base import Chunker, CountTokens, TextChunk, check_sizes, check_text
from kvboost_rag.indexing.chunking.units import Unit, fitting_units, pack

logger = logging.getLogger(__name__)

LANGUAGES = {
    ".py": "python", ".pyi": "python", ".js": "javascript", ".jsx": "javascript", ".mjs": "javascript",
    ".ts": "typescript", ".tsx": "tsx", ".java": "java", ".go": "go", ".rs": "rust", ".rb": "ruby", ".c": "c",
    ".h": "c", ".cc": "cpp", ".cpp": "cpp", ".hpp": "cpp", ".cs": "c_sharp", ".php": "php", ".scala": "scala",
    ".sh": "bash", ".lua": "lua", ".swift": "swift", ".kt": "kotlin",
}  # fmt: skip
"""File name endings of source code, with the tree-sitter grammar (package `tree-sitter-…`) that reads it."""

_LINE = re.compile(r"[^\n]*\n|[^\n]+\Z")
_COMMENT = re.compile(r"\s*(#|//|/\*|\*|--|;)")


def language_of(path: str | Path) -> str | None:
    """The grammar for a file by its name's ending; None if it is not known as source code."""
    return LANGUAGES.get(Path(path).suffix.lower())


@dataclass(frozen=True)
class CodeChunker(Chunker):
    """Cuts source code at the least nested line starts: between functions and classes, then between methods, and so on.

    How deeply a line start is nested comes from the tree-sitter grammar of the language, which also reads broken code.
    Where its package is not installed, or the language has none, indentation serves instead. A comment stays with the
    line after it.

    Args:
        count_tokens: counts with the tokenizer of the model that the chunks are for.
        language: grammar name, as `language_of` gives it; None for indentation.
        min_tokens, max_tokens: a chunk of at least the minimum ends at the next top-level definition; units of more
            than the maximum are cut inside, a file's last chunk may be smaller than the minimum.
    """

    count_tokens: CountTokens
    language: str | None = None
    min_tokens: int = 64
    max_tokens: int = 512

    def __post_init__(self) -> None:
        check_sizes(self.min_tokens, self.max_tokens)

    def split(self, text: str) -> list[TextChunk]:
        check_text(text)
        starts = [match.start() for match in _LINE.finditer(text)]
        depths = nesting_depths(text, starts, self.language)
        units = _units(starts, depths, 0, len(starts), len(text))
        units = fitting_units(text, units, self.max_tokens, self.count_tokens)
        # The weaker a gap the less nested it is: cohesion is the depth after the gap.
        cohesion = [float(unit.depth) for unit in units[1:]]
        return pack(text, units, cohesion, 0.5, (self.min_tokens, self.max_tokens), self.count_tokens)


def nesting_depths(text: str, line_starts: list[int], language: str | None) -> list[int]:
    """How many syntactic units run across each line start; 0 between top-level definitions."""
    parser = _parser(language) if language else None
    lines = [text[a:b] for a, b in pairwise([*line_starts, len(text)])]
    depths = _indentation(lines) if parser is None else _crossings(parser, text, len(lines))
    blank = max(depths, default=0) + 2
    for i in range(1, len(lines)):
        if not lines[i].strip():
            depths[i] = blank  # belongs to what stands before it
        elif _COMMENT.match(lines[i - 1]) and lines[i - 1].strip():
            depths[i] += 1
    return depths


def _units(starts: list[int], depths: list[int], first: int, end: int, text_end: int) -> list[Unit]:
    """Lines `[first, end)` cut at the least nested of their starts; each piece is cut likewise if it is too large."""
    inner = range(first + 1, end)
    least = min((depths[i] for i in inner), default=0)
    edges = [first, *(i for i in inner if depths[i] == least), end]
    offsets = [*starts, text_end]
    return [
        Unit(
            offsets[a],
            offsets[b],
            partial(_units, starts, depths, a, b, text_end) if b - a > 1 else None,
            depth=depths[a],
        )
        for a, b in pairwise(edges)
        if a < b
    ]


def _indentation(lines: list[str]) -> list[int]:
    """Ranks of the indentation widths that occur: 0 for the least indented lines."""
    widths = [len(line.expandtabs(8)) - len(line.expandtabs(8).lstrip()) for line in lines]
    ranks = {
        width: rank
        for rank, width in enumerate(sorted({w for w, line in zip(widths, lines, strict=True) if line.strip()}))
    }
    return [ranks.get(width, 0) for width in widths]


def _crossings(parser: Any, text: str, num_lines: int) -> list[int]:
    changes = np.zeros(num_lines + 1, dtype=np.int64)
    nodes = list(parser.parse(text.encode("utf-8", "replace")).root_node.children)
    while nodes:
        node = nodes.pop()
        first, last = node.start_point[0], node.end_point[0] - (node.end_point[1] == 0)
        if last <= first:
            continue
        nodes += node.children
        # A body that begins on a line of its own (Python, Ruby) is not parted from its head.
        parent = node.parent
        is_body = parent is not None and parent.start_point[0] < first and parent.child_by_field_name("body") == node
        changes[first if is_body else first + 1] += 1
        changes[min(last + 1, num_lines)] -= 1
    return [int(depth) for depth in np.cumsum(changes)[:num_lines]]


@lru_cache(maxsize=32)
def _parser(language: str) -> Any:
    """A tree-sitter parser; None, said once, where the grammar's package is not installed."""
    module = "typescript" if language == "tsx" else language
    try:
        import tree_sitter

        grammar = importlib.import_module(f"tree_sitter_{module}")
    except ImportError:
        logger.warning(
            "tree-sitter grammar for %s is not installed (pip install tree-sitter tree-sitter-%s): "
            "code is cut by indentation instead",
            language,
            module.replace("_", "-"),
        )
        return None
    names = ("language", f"language_{language}")
    load = next(getattr(grammar, name) for name in names if hasattr(grammar, name))
    return tree_sitter.Parser(tree_sitter.Language(load()))
