"""Chunks found by their ids: against an obvious search, with edges that a tokenizer merged, repeated and cut chunks."""

from __future__ import annotations

import random

import pytest

from kvboost_rag.chunks.token_search import TokenIndex, TokenRun


def chunk(seed: int, length: int, vocabulary: int = 5000) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(length)]


def obvious(chunks: dict[str, list[int]], prompt: list[int], min_tokens: int) -> set[tuple[str, int]]:
    """Prompt positions that some chunk's ids cover by at least `min_tokens` in a row, by trying every alignment."""
    covered = set()
    for key, ids in chunks.items():
        for shift in range(-len(ids) + 1, len(prompt)):
            row: list[int] = []
            for i, token in enumerate(ids):
                same = 0 <= shift + i < len(prompt) and prompt[shift + i] == token
                row = [*row, shift + i] if same else []
                if len(row) >= min_tokens:
                    covered |= {(key, place) for place in row}
    return covered


@pytest.mark.parametrize("length", [16, 17, 63, 100, 257])
@pytest.mark.parametrize("edge", [0, 1, 2])
def test_whole_chunks_are_found_but_for_their_edges(length: int, edge: int) -> None:
    index = TokenIndex()
    chunks = {f"c{n}": chunk(n, length + 2 * edge) for n in range(5)}
    for key, ids in chunks.items():
        index.add(key, ids)
    prompt, expected = [9001, 9002], []
    for key in ("c3", "c0", "c3", "c4"):
        inner = chunks[key][edge : len(chunks[key]) - edge]
        prompt += [9003] * edge
        expected.append(TokenRun(key, edge, len(prompt), length))
        prompt += inner + [9004] * edge + [9005]
    assert index.find(prompt) == expected
    assert {(r.key, i) for r in expected for i in range(r.start, r.end)} == obvious(chunks, prompt, 16)


def test_the_second_half_is_found_where_the_first_was_cut_off() -> None:
    index = TokenIndex()
    ids = chunk(1, 101)
    index.add("c", ids)
    (run,) = index.find([7, 7, *ids[41:], 7])
    assert (run.start, run.end) == (2, 2 + len(ids) - 41)
    assert run.chunk_start == 41


def test_the_longest_wins_where_chunks_begin_alike() -> None:
    index = TokenIndex()
    head, tail = chunk(1, 40), chunk(2, 50)
    index.add("short", head)
    index.add("long", [*head, *tail])
    assert [r.key for r in index.find([*head, *tail])] == ["long"]
    assert [(r.key, r.length) for r in index.find([*head, 9999])] == [("short", 40)]


def test_what_is_too_short_is_never_looked_for() -> None:
    index = TokenIndex(min_tokens=16)
    index.add("c", chunk(1, 15))
    assert len(index) == 0
    index.add("d", chunk(2, 30))
    assert index.find(chunk(2, 30)[:15]) == []
    assert index.find([]) == index.find([1, 2]) == []


def test_what_is_removed_is_not_found_and_what_shares_its_grams_is() -> None:
    index = TokenIndex()
    ids = chunk(1, 30)
    index.add("a", ids)
    index.add("b", ids)
    index.remove("b")
    index.remove("never there")
    assert [r.key for r in index.find(ids)] == ["a"]
    index.remove("a")
    assert index.find(ids) == []
    assert not index._places


def test_runs_never_overlap_and_their_ids_are_the_prompts() -> None:
    draw, index = random.Random(5), TokenIndex(min_tokens=8)
    chunks = {f"c{n}": chunk(n, draw.randrange(8, 60), vocabulary=6) for n in range(40)}
    for key, ids in chunks.items():
        index.add(key, ids)
    for _ in range(30):
        prompt = chunk(draw.randrange(10**6), 40, 6)
        for key in draw.sample(sorted(chunks), 4):
            prompt += chunks[key][draw.randrange(3) :]
        end = 0
        for run in index.find(prompt):
            assert run.start >= end
            assert prompt[run.start : run.end] == chunks[run.key][run.chunk_start : run.chunk_start + run.length]
            end = run.end
