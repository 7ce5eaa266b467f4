"""Where a chat template put the contents of messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

MIN_OPTION_CHARS = 16
"""Shorter strings among a template's arguments (names, types) are what it writes itself."""


def locate_contents(
    rendered: str,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    render: Callable[..., str],
) -> list[tuple[int, int]] | None:
    """`(start, end)` of each content in a rendered prompt, ascending.

    Everything is rendered once more with a mark in place of each content; what stands between the marks is what the
    template writes itself. A content may read like that (`user`, a date): its place is known all the same.

    Args:
        messages: what was rendered.
        options: arguments of the template; long strings in them (documents, descriptions of tools) are contents too.
        render: makes a prompt of messages and options.

    Returns:
        None where the template writes something else around other contents, or changes them otherwise than by stripping
        white space or escaping them as JSON.
    """
    marks = _Marks(rendered)
    marked = [{**message, "content": marks.put(message.get("content"), 1)} for message in messages]
    kept = {name: value for name, value in options.items() if name == "chat_template"}
    try:
        skeleton = render(marked, **marks.put(options, MIN_OPTION_CHARS) | kept)
    except Exception:  # the prompt itself could be rendered: whatever a template makes of marks is no fault of it
        return None
    return marks.places(rendered, skeleton)


class _Marks:
    """Texts and the marks that stand for them."""

    def __init__(self, rendered: str) -> None:
        self._name = "KVBOOSTCONTENT"
        while self._name in rendered:
            self._name += "X"
        self._texts: list[str] = []

    def put(self, value: Any, min_chars: int) -> Any:
        """`value` with a mark for every string in it that has so many characters without surrounding white space."""
        if isinstance(value, str):
            if len(value.strip()) < min_chars:
                return value
            self._texts.append(value)
            return f"{self._name}{len(self._texts) - 1}E"
        if isinstance(value, Mapping):
            return {name: self.put(item, min_chars) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.put(item, min_chars) for item in value]
        return value

    def places(self, rendered: str, skeleton: str) -> list[tuple[int, int]] | None:
        """Where the texts stand in `rendered`, which is `skeleton` with them in place of the marks."""
        head, *parts = re.split(f"{self._name}([0-9]+)E", skeleton)
        if not rendered.startswith(head):
            return None
        found: list[tuple[int, int]] = []
        at = len(head)
        for number, between in zip(parts[::2], parts[1::2], strict=True):
            forms = _forms(self._texts[int(number)])
            form = next((form for form in forms if rendered.startswith(form + between, at)), None)
            if form is None:
                return None
            # Blocks of one message follow each other with nothing between.
            start = found.pop()[0] if found and found[-1][1] == at else at
            found.append((start, at + len(form)))
            at += len(form) + len(between)
        return found if at == len(rendered) else None


def _forms(text: str) -> Iterator[str]:
    """What templates make of a content."""
    yield from (text, text.strip(), text.rstrip(), text.lstrip())
    yield from (json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
