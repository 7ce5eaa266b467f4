"""Trace profiling: what counts as what, and the advice."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kvboost_rag.measure.prompt_log import (
    BLOCK_TOKENS,
    TraceError,
    TraceProfile,
    TraceProfiler,
    TracePrompt,
    advise,
    read_trace,
    split_pieces,
    word_tokens,
)


def words(count: int, seed: int) -> str:
    """Text of exactly `count` tokens under `word_tokens`."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghij", k=5)) for _ in range(count))


HEAD = words(64, 0)
DOCUMENTS = [words(96, seed) for seed in range(1, 6)]


def prompt(*documents: str, question: int = 99, head: str = HEAD) -> TracePrompt:
    return TracePrompt("\n\n".join([head, *documents, words(20, question)]))


def profile_of(*prompts: TracePrompt) -> TraceProfile:
    profiler = TraceProfiler()
    for one in prompts:
        profiler.add(one)
    return profiler.result()


def test_shares_of_a_trace_counted_by_hand():
    a, b, c, _, _ = DOCUMENTS
    found = profile_of(
        prompt(a, b, question=100),  # 64 + 2 · 96 + 20 = 276, all new
        prompt(a, b, question=101),  # 256 exact, 20 new
        prompt(b, a, question=102),  # 64 exact, 192 moved, 20 new
        prompt(c, a, question=103),  # 64 exact, 96 new, 96 moved, 20 new
    )
    assert (found.num_prompts, found.total) == (4, 4 * 276)
    assert found.exact == 256 + 64 + 64
    assert found.moved == 192 + 96
    assert found.near == 0
    assert found.new == 276 + 20 + 20 + 116
    assert found.prompt_tokens == 276
    # What came back: the head, a and b.
    assert found.kept_tokens == 64 + 96 + 96


def test_exact_prefixes_come_in_whole_blocks_and_end_at_the_first_difference():
    text = words(5 * BLOCK_TOKENS, 1)
    changed = text.split(" ")
    changed[2 * BLOCK_TOKENS + 3] = "other"
    found = profile_of(TracePrompt(text), TracePrompt(" ".join(changed)))
    assert found.exact == 2 * BLOCK_TOKENS
    same = profile_of(TracePrompt(text), TracePrompt(text))
    assert same.exact == 5 * BLOCK_TOKENS


def test_edited_documents_are_near_and_the_tokens_behind_the_edit_settle():
    long = words(400, 7)
    edited = long.split(" ")
    edited[200] = "changed"
    found = profile_of(prompt(long, question=1), prompt(" ".join(edited), head=words(64, 50), question=2))
    assert found.moved == found.exact == 0
    assert found.near == 200 + (199 - 32)


def test_a_document_twice_in_one_prompt_is_new_once():
    found = profile_of(prompt(DOCUMENTS[0], DOCUMENTS[0]))
    assert found.moved == 96


def test_given_documents_are_found_inside_paragraphs():
    first, second = DOCUMENTS[:2]
    glued = TracePrompt(f"Context: {first} and {second} Question: {words(20, 1)}", (first, second))
    swapped = TracePrompt(f"Context: {second} and {first} Question: {words(20, 2)}", (first, second))
    assert profile_of(glued, swapped).moved == 192
    bare = [TracePrompt(p.text) for p in (glued, swapped)]
    assert profile_of(*bare).moved == 0


def test_pieces_joined_are_the_prompt():
    text = "\n\nHead\n\n\n" + words(20, 1) + "\n \n short \n\n" + "\n\n".join(DOCUMENTS) + "\n\nwhy?\n"
    for documents in ((), (DOCUMENTS[1], DOCUMENTS[2]), (DOCUMENTS[1][:30],)):
        assert "".join(split_pieces(TracePrompt(text, documents), word_tokens())) == text


def test_short_paragraphs_do_not_stick_to_documents():
    for lead in ("Context:", "Here is what was found:"):
        pieces = split_pieces(TracePrompt(f"{lead}\n\n{DOCUMENTS[0]}\n\nwhy?"), word_tokens())
        assert DOCUMENTS[0] in pieces


def test_logs_of_both_kinds(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    lines = [
        {"prompt": "a b", "documents": ["a"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert list(read_trace(path)) == [TracePrompt("a b", ("a",)), TracePrompt("s\n\nu\n\n")]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"prompt": 3}',
        b'{"prompt": "a", "documents": [1]}',
        b'{"messages": 1}',
        b'{"prompt": "\xe9"}',
    ],
)
def test_lines_that_cannot_be_read_are_named(tmp_path: Path, line: bytes):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line)
    with pytest.raises(TraceError, match="line 2"):
        list(read_trace(path))


def trace(exact: int, moved: int, near: int, new: int, prompt_tokens: float = 1000) -> TraceProfile:
    return TraceProfile(10, exact, moved, near, new, prompt_tokens, 120, 500)


@pytest.mark.parametrize(
    ("profile", "verdict"),
    [
        (trace(10, 60, 0, 30), "reuse"),
        (trace(60, 5, 0, 35), "prefix"),
        (trace(60, 30, 0, 10), "reuse"),
        (trace(5, 5, 0, 90), "none"),
        (trace(0, 80, 0, 20, prompt_tokens=100), "none"),
        (trace(0, 0, 20, 80), "reuse"),
    ],
)
def test_advice(profile: TraceProfile, verdict: str):
    assert advise(profile).verdict == verdict


def test_advised_settings_are_accepted():
    from kvboost_rag.config import CHUNK_TOKENS, ReuseConfig

    settings = dict(advise(trace(0, 80, 10, 10)).settings)
    assert settings.pop("chunk_tokens") in CHUNK_TOKENS
    settings.pop("neighbours")
    ReuseConfig(**settings)


def test_one_prompt_gives_no_advice():
    assert advise(profile_of(prompt(*DOCUMENTS))).verdict == "none"
