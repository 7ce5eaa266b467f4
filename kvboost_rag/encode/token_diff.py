"""Which tokens of a chunk stand unchanged in another one, and far enough after a change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher


@dataclass(frozen=True)
class ReusedSpan:
    """Tokens `[start, start + num_tokens)` of the wanted chunk are those from `donor_start` on of the donor."""

    start: int
    donor_start: int
    num_tokens: int


def reusable_spans(
    donor: Sequence[int], wanted: Sequence[int], min_tokens: int = 16, settle_tokens: int | None = None
) -> tuple[ReusedSpan, ...]:
    """Identical spans of at least `min_tokens`, in order, without the tokens that have yet to settle after a change.

    `[0, first change)` needs no settling. Any other identical span has a change before it, be it only that tokens of
    the donor are missing there: its KV was computed after another text, and its first `settle_tokens` are left out.

    Args:
        settle_tokens: None takes no such span at all. Published work on edits finds 32 to recover nearly everything.
    """
    spans = []
    for donor_start, start, num_tokens in _identical_blocks(donor, wanted, only_first=settle_tokens is None):
        settle = 0 if donor_start == start == 0 else settle_tokens or 0
        if num_tokens - settle >= min_tokens:
            spans.append(ReusedSpan(start + settle, donor_start + settle, num_tokens - settle))
    return tuple(spans)


def _identical_blocks(donor: Sequence[int], wanted: Sequence[int], only_first: bool) -> Iterator[tuple[int, int, int]]:
    """`(donor_start, wanted_start, num_tokens)` in order: the common beginning, what a diff finds, the common end."""
    shorter = min(len(donor), len(wanted))
    head = next((i for i in range(shorter) if donor[i] != wanted[i]), shorter)
    yield 0, 0, head
    if only_first:
        return
    tail = next((i for i in range(shorter - head) if donor[-1 - i] != wanted[-1 - i]), shorter - head)
    middle = SequenceMatcher(None, donor[head : len(donor) - tail], wanted[head : len(wanted) - tail], autojunk=False)
    for donor_start, start, num_tokens in middle.get_matching_blocks():
        yield head + donor_start, head + start, num_tokens
    yield len(donor) - tail, len(wanted) - tail, tail
