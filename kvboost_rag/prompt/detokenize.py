"""Token ids to text while they come: whole characters only, nothing of a stop string let through."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost_rag.prompt.tokens import PromptTokens

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of a growing sequence, piece by piece.

    A token's text depends on its neighbours (white space, characters of several tokens), so each piece is the
    difference between two decodings that begin at the same, already shown token. While the text ends inside a
    character it is held back. (`tokenizers.DecodeStream` raises where bytes of a broken character are followed by
    others, which models do write, and cannot say what it holds back at the end.)
    """

    def __init__(self, tokens: PromptTokens) -> None:
        self._tokens = tokens
        self._ids: list[int] = []
        self._context_start = 0
        self._shown_end = 0

    def push(self, token_id: int) -> str:
        """New text that `token_id` completes, often empty."""
        self._ids.append(token_id)
        text = self._decode(len(self._ids))
        if text.endswith(REPLACEMENT):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """What is still held back, however broken."""
        return self._advance(self._decode(len(self._ids)))

    def _advance(self, text: str) -> str:
        delta = text[len(self._decode(self._shown_end)) :]
        if delta:
            self._context_start, self._shown_end = self._shown_end, len(self._ids)
        return delta

    def _decode(self, end: int) -> str:
        return self._tokens.decode(self._ids[self._context_start : end], skip_special_tokens=True)


class StopMatcher:
    """Cuts text off where the first stop string to be completed begins, and holds back what may become one.

    "First to be completed" does not depend on the pieces in which the text arrives.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """The part of the text so far that can be let out."""
        if self.matched:
            return ""
        self._held += text
        found = [(at + len(s), at) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            self.matched = True
            _, start = min(found)
            out, self._held = self._held[:start], ""
            return out
        keep = max((self._overlap(s) for s in self._stop), default=0)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        out, self._held = ("", "") if self.matched else (self._held, "")
        return out

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that is a beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
