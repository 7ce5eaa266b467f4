"""Markdown and plain text to units: sentences, list items, table rows, code blocks, JSON values, headings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING

from kvboost_rag.indexing.chunking.json_values import json_spans, json_unit
from kvboost_rag.indexing.chunking.sentences import sentence_ends
from kvboost_rag.indexing.chunking.units import Unit

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.tree import SyntaxTreeNode

_CONTAINERS = {"bullet_list", "ordered_list", "blockquote"}
_LINE_END = re.compile(r"\r\n|\r|\n")  # what Markdown takes for one; str.splitlines knows more
_BLANK_LINES = re.compile(r"\n\s*\n")


def prose_units(text: str, language: str = "en") -> list[Unit]:
    """The units of `text`, in order; what lies between them is white space.

    Plain text is read as Markdown, too: its paragraphs are cut into sentences. A table row, list item, code block or
    JSON object or array is one unit.

    Args:
        language: ISO code, for the rules of sentence ends.
    """
    return _keep_json_whole(text, _Reader(text, language).units())


class _Reader:
    def __init__(self, text: str, language: str) -> None:
        self.text, self.language = text, language
        self.line_starts = [0, *(match.end() for match in _LINE_END.finditer(text))]

    def units(self) -> list[Unit]:
        from markdown_it.tree import SyntaxTreeNode

        return self._inside(SyntaxTreeNode(_parser().parse(self.text)), 0, len(self.text))

    def _inside(self, node: SyntaxTreeNode, start: int, end: int) -> list[Unit]:
        """Units of a container's children; text that no child covers (link definitions, say) counts as prose."""
        units: list[Unit] = []
        at = start
        for child in node.children:
            if child.map is None:
                continue
            child_start, child_end = (self._offset(line) for line in child.map)
            units += self._prose(at, child_start)
            units += self._of(child, max(at, child_start), child_end)
            at = max(at, child_end)
        return units + self._prose(at, end)

    def _of(self, node: SyntaxTreeNode, start: int, end: int) -> list[Unit]:
        if node.type in _CONTAINERS:
            return self._inside(node, start, end)
        if node.type == "paragraph":
            return self._prose(start, end)
        if node.type == "heading":
            return [Unit(start, end, leads=True)]
        if node.type == "list_item":
            return [Unit(start, end, partial(self._inside, node, start, end))]
        if node.type == "table":
            return self._rows(node, start, end)
        return [Unit(start, end, partial(self._blocks, start, end))]  # code, raw HTML

    def _rows(self, table: SyntaxTreeNode, start: int, end: int) -> list[Unit]:
        """Table rows, the ruler under the heading with the heading."""
        rows = [node.map[0] for node in table.walk() if node.type == "tr" and node.map]
        edges = [start, *(self._offset(line) for line in rows[1:]), end]
        return [Unit(a, b) for a, b in pairwise(edges)]

    def _blocks(self, start: int, end: int) -> list[Unit]:
        cuts = [match.end() for match in _BLANK_LINES.finditer(self.text, start, end)]
        return [Unit(a, b) for a, b in pairwise([start, *cuts, end])]

    def _prose(self, start: int, end: int) -> list[Unit]:
        if start >= end or not self.text[start:end].strip():
            return []
        cuts = [start + cut for cut in sentence_ends(self.text[start:end], self.language)]
        return [Unit(a, b) for a, b in pairwise([start, *cuts, end])]

    def _offset(self, line: int) -> int:
        return self.line_starts[line] if line < len(self.line_starts) else len(self.text)


def _keep_json_whole(text: str, units: Sequence[Unit]) -> list[Unit]:
    """Units that one JSON value runs through are made one; too large ones are cut around JSON values, then in them."""
    spans = json_spans(text)
    kept: list[Unit] = []
    at = 0
    for unit in units:
        while at < len(spans) and spans[at][1] <= unit.start:
            at += 1
        start = unit.start
        if kept and at < len(spans) and spans[at][0] < kept[-1].end:
            start = kept.pop().start
        holds_json = at < len(spans) and spans[at][0] < unit.end
        kept.append(
            replace(unit, start=start, parts=partial(_around_json, text, start, unit.end)) if holds_json else unit
        )
    return kept


def _around_json(text: str, start: int, end: int) -> list[Unit]:
    units: list[Unit] = []
    at = start
    for span_start, span_end in json_spans(text[start:end]):
        units += [Unit(at, start + span_start), json_unit(text, start + span_start, start + span_end)]
        at = start + span_end
    return [*units, Unit(at, end)]


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    try:
        from markdown_it import MarkdownIt
    except ImportError as error:
        raise ImportError(
            "semantic chunking reads Markdown with 'markdown-it-py': pip install 'kvboost-rag[semantic]'"
        ) from error
    return MarkdownIt("commonmark").enable("table")
