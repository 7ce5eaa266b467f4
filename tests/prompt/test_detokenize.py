"""Streamed pieces joined are the decoded whole, and nothing of a stop string gets out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost_rag.prompt.detokenize import Detokenizer, StopMatcher
from kvboost_rag.prompt.tokens import PromptTokens

TEXTS = ["plain words", "naïve café — 東京 🙂👩‍👩‍👧 ok", "tabs\tand\n\nnewlines  ", "🙂" * 9]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole(tiny_tokenizer, text: str) -> None:
    tokens = PromptTokens(tiny_tokenizer)
    detokenizer = Detokenizer(tokens)
    pieces = [detokenizer.push(i) for i in tokens.document_ids(text)]
    assert "".join(pieces) + detokenizer.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_random_bytes_lose_nothing(tiny_tokenizer) -> None:
    tokens = PromptTokens(tiny_tokenizer)
    rng = random.Random(5)
    for _ in range(20):
        ids = [rng.randrange(3, 380) for _ in range(40)]
        detokenizer = Detokenizer(tokens)
        joined = "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()
        assert joined.replace("\ufffd", "") == tokens.decode(ids).replace("\ufffd", "")


def cut(text: str, stops: list[str]) -> str:
    """The slow twin: let the text grow by single characters until a stop string is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


@given(
    st.text("ab\n", max_size=30),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
def test_stop_strings_are_cut_however_the_text_arrives(text: str, stops: list[str], steps: list[int]) -> None:
    matcher, out, at, turn = StopMatcher(stops), "", 0, 0
    while at < len(text) and not matcher.matched:
        out += matcher.push(text[at : at + steps[turn % len(steps)]])
        at += steps[turn % len(steps)]
        turn += 1
        assert cut(text, stops).startswith(out)
    assert out + matcher.flush() == cut(text, stops)
