"""The report as one HTML file."""

from __future__ import annotations

import re
from pathlib import Path

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}"
    "td,th{border:1px solid #ccc;padding:.2rem .6rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}"
)
_IMAGE = re.compile(r'<p><img src="([^"]+\.svg)"[^>]*></p>')


def to_html(markdown: str, folder: Path) -> str:
    """Markdown with tables as a page of its own; SVG images are put inside."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark").enable("table").render(markdown)

    def inline(match: re.Match[str]) -> str:
        path = folder / match[1]
        return path.read_text("utf-8").partition("?>")[2] if path.exists() else match[0]

    head = f'<!doctype html><meta charset="utf-8"><title>Benchmarks</title><style>{STYLE}</style>'
    return head + _IMAGE.sub(inline, body)
