"""JSON objects and arrays inside text: where they are, and where they may be cut if they must."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import pairwise

from kvboost_rag.indexing.chunking.units import Unit

_OPENING = re.compile(r"[{\[]")
_SPACE = re.compile(r"[ \t\r\n]*")
_decoder = json.JSONDecoder()


def json_spans(text: str) -> list[tuple[int, int]]:
    """`(start, end)` of every outermost JSON object or array that stands in `text`, in order."""
    spans = []
    at = 0
    while (opening := _OPENING.search(text, at)) is not None:
        end = _value_end(text, opening.start())
        if end is not None:
            spans.append((opening.start(), end))
        at = opening.end() if end is None else end
    return spans


def json_unit(text: str, start: int, end: int) -> Unit:
    """The object or array `text[start:end]` as a unit; should it be too large, it is cut between its members."""
    return Unit(start, end, partial(_members, text, start, end, start, end))


def _members(text: str, value_start: int, value_end: int, start: int, end: int) -> list[Unit]:
    """The members of a value, keys and commas with them; the first and last reach out to `start` and `end`."""
    values, starts = [], []
    at = _skip_space(text, value_start + 1)
    while at < value_end - 1:
        starts.append(at)
        if text[value_start] == "{":
            at = _skip_space(text, _end_of(text, at))
            at = _skip_space(text, at + 1)  # the colon
        values.append((at, _end_of(text, at)))
        at = _skip_space(text, values[-1][1])
        at = _skip_space(text, at + 1)  # the comma, or the end
    edges = [start, *starts[1:], end]
    return [_member(text, *value, *span) for value, span in zip(values, pairwise(edges), strict=True)]


def _member(text: str, value_start: int, value_end: int, start: int, end: int) -> Unit:
    if text[value_start] not in "{[" or _skip_space(text, value_start + 1) >= value_end - 1:
        return Unit(start, end)
    return Unit(start, end, partial(_members, text, value_start, value_end, start, end))


def _value_end(text: str, start: int) -> int | None:
    try:
        return _end_of(text, start)
    except (ValueError, RecursionError):
        return None


def _end_of(text: str, start: int) -> int:
    return int(_decoder.raw_decode(text, start)[1])


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
