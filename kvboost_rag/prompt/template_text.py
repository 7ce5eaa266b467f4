"""Which parts of a rendered prompt the chat template wrote itself, and which matches would break them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvboost_rag.prompt.known_texts import Match

MIN_OPTION_CHARS = 16
"""Shorter strings among a template's arguments (names, types) stand in its own text as well."""


class TemplateText:
    """What a chat template wrote around the contents of messages.

    A document may happen to read like the template's own markup (`<|im_end|>\\n<|im_start|>assistant`, cut out of a
    page about chat templates). Taken for a document there, the markup would become plain text, in every prompt.

    Args:
        rendered: the prompt.
        messages: what was rendered; contents are looked for in their order.
        options: arguments of the template; long strings in them (documents, descriptions of tools) are contents too.
        control: what control tokens look like in text.
    """

    def __init__(
        self, rendered: str, messages: Iterable[Mapping[str, Any]], options: Mapping[str, Any], control: Iterable[str]
    ) -> None:
        self._rendered = rendered
        self._control = control
        self._contents: list[tuple[int, int]] = []
        done = 0
        for text in _strings([message.get("content") for message in messages]):
            done = self._note(text, done)
        for text in _strings(options):
            if len(text) >= MIN_OPTION_CHARS:
                self._note(text, 0)

    def breaks(self, match: Match) -> bool:
        """Whether the match holds or cuts a control token that no content wrote."""
        if any(start <= match.start and match.end <= end for start, end in self._contents):
            return False
        return any(
            start < match.end and match.start < end and not self._is_content(start, end)
            for start, end in self._control_near(match)
        )

    def _note(self, text: str, after: int) -> int:
        """Enter where a content stands; returns where the next one is looked for."""
        at = self._rendered.find(text, after)
        at = self._rendered.find(text) if at < 0 else at  # some templates move system text
        if at < 0:
            return after
        self._contents.append((at, at + len(text)))
        return max(after, at + len(text))

    def _is_content(self, start: int, end: int) -> bool:
        return any(a <= start and end <= b for a, b in self._contents)

    def _control_near(self, match: Match) -> Iterator[tuple[int, int]]:
        for token in sorted({token for token in self._control if token}):
            low = max(0, match.start - len(token) + 1)
            window = self._rendered[low : match.end + len(token) - 1]
            for found in re.finditer(f"(?={re.escape(token)})", window) if token in window else ():
                yield low + found.start(), low + found.start() + len(token)


def _strings(value: Any) -> Iterator[str]:
    """All strings in nested lists and mappings, without surrounding white space (templates strip), none empty."""
    if isinstance(value, str):
        if value.strip():
            yield value.strip()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for item in value:
            yield from _strings(item)
