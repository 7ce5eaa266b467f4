"""Code blocks of the pages: what is printed there, and what a comment of the page says about running it.

A block of Python is run unless an HTML comment right before it says why not: `<!-- not run: needs a GPU -->`. What
readers have and a test has not (files) comes from `<!-- setup` … `-->`, Python that is run before the next block;
a shell block is run where there is one, and otherwise only parsed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
SHELL = ("sh", "bash")
PAGES = [path.relative_to(ROOT) for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]


@dataclass(frozen=True)
class Block:
    """One fenced block. `line` is that of its first line of code; `reason` says why it is not run, or is empty."""

    page: Path
    line: int
    language: str
    code: str
    reason: str = ""
    setup: str = ""

    @property
    def is_run(self) -> bool:
        """Python as a rule, commands where a setup makes them cheap."""
        return not self.reason and (self.language == "python" or (self.language in SHELL and bool(self.setup)))

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    """All fenced blocks of a page, in order.

    Raises:
        ValueError: a comment about running a block does not stand before one.
    """
    blocks, reason, setup = [], "", ""
    for token in MarkdownIt().parse((ROOT / page).read_text() if text is None else text):
        if token.type == "html_block":
            reason = _comment(token.content, "not run:") or reason
            setup = setup + _comment(token.content, "setup")
        elif token.type == "fence":
            assert token.map is not None
            language = token.info.split(maxsplit=1)[0] if token.info else ""
            blocks.append(Block(page, token.map[0] + 2, language, token.content, reason, setup))
            reason = setup = ""
        elif (reason or setup) and token.nesting >= 0 and token.type != "list_item_open":
            raise ValueError(f"{page}: a comment for a code block stands before {token.type}: {(reason or setup)[:60]}")
    return blocks


def _comment(html: str, keyword: str) -> str:
    found = re.fullmatch(rf"\s*<!--\s*{keyword}(.*?)-->\s*", html, re.DOTALL)
    return found.group(1).strip(" ") if found else ""


def added_lines(diff: str) -> str:
    """What a `diff` block ends with: its unchanged and its new lines."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[:1] in "+ ")
