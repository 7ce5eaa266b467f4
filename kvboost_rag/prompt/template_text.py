"""Documents in a prompt that a chat template wrote: in the contents of messages, never in what is around them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from kvboost_rag.prompt.contents import MIN_OPTION_CHARS, locate_contents
from kvboost_rag.prompt.known_texts import KnownTexts, Match
from kvboost_rag.prompt.tokens import PromptTokens


class TemplateText:
    """What a chat template wrote around the contents of messages.

    A document may happen to read like it: a role's name, the template's own instructions, or its markup
    (`<|im_end|>\\n<|im_start|>assistant`, cut out of a page about chat templates). Taken for a document there, markup
    would become plain text, in every prompt.

    Args:
        rendered: the prompt.
        messages: what was rendered.
        options: arguments of the template.
        tokens: what rendered it.
    """

    def __init__(
        self, rendered: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], tokens: PromptTokens
    ) -> None:
        self._rendered = rendered
        self._messages = messages
        self._options = options
        self._tokens = tokens

    @cached_property
    def contents(self) -> list[tuple[int, int]] | None:
        """`(start, end)` of each; None where they cannot be told from what the template wrote."""
        return locate_contents(self._rendered, self._messages, self._options, self._tokens.render)

    def find(self, known: KnownTexts, extra: KnownTexts | None) -> list[Match]:
        """Known texts in the contents (`KnownTexts.find`); those that break no control token, if places are unknown."""
        if self.contents is None:
            return [match for match in known.find(self._rendered, extra) if not self._breaks(match)]
        return [
            replace(match, start=start + match.start, end=start + match.end)
            for start, end in self.contents
            for match in known.find(self._rendered[start:end], extra)
        ]

    def _breaks(self, match: Match) -> bool:
        """Whether the match holds or cuts a control token that no content wrote."""
        if any(start <= match.start and match.end <= end for start, end in self._likely):
            return False
        return any(
            start < match.end and match.start < end and not any(a <= start and end <= b for a, b in self._likely)
            for start, end in self._control_near(match)
        )

    @cached_property
    def _likely(self) -> list[tuple[int, int]]:
        """Where contents stand verbatim, looked for in their order."""
        found, done = [], 0
        for text in _strings([message.get("content") for message in self._messages]):
            at = self._rendered.find(text, done)
            at = self._rendered.find(text) if at < 0 else at  # some templates move system text
            if at >= 0:
                found.append((at, at + len(text)))
                done = max(done, at + len(text))
        options = [text for text in _strings(self._options) if len(text) >= MIN_OPTION_CHARS]
        places = [(self._rendered.find(text), text) for text in options]
        return found + [(at, at + len(text)) for at, text in places if at >= 0]

    def _control_near(self, match: Match) -> Iterator[tuple[int, int]]:
        for token in sorted({token for token in self._tokens.control_texts if token}):
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
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
