"""Ends of served turns: found again where the prompt begins the same, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvboost_rag.chunks.prefix_cache import PrefixCache
from kvboost_rag.chunks.turns import MAX_TAILS, ServedTurns
from kvboost_rag.stores import MemoryStore, open_store

IDS = tuple(range(1000, 1200))


def turns_on(store: object, fingerprint: str = "f" * 64) -> ServedTurns:
    return ServedTurns(PrefixCache(store, None, fingerprint, block_tokens=32))  # type: ignore[arg-type] - no forward


@pytest.mark.parametrize("end", [32, 33, 63, 64, 100, 199, 200])
def test_an_end_is_found_in_every_prompt_that_goes_on_from_it(end: int) -> None:
    turns = turns_on(MemoryStore(1 << 20))
    turns.note(IDS, [end], "")
    assert turns.reach(IDS, "") == [end]
    assert turns.reach((*IDS[:end], *range(7)), "") == [end]
    assert turns.reach(IDS[: end - 1], "") == []
    changed = (*IDS[: end - 1], 7, *IDS[end:])
    assert turns.reach(changed, "") == []
    assert turns.reach(IDS, "other") == []


def test_the_farthest_comes_first_and_ends_before_the_first_block_are_passed_over() -> None:
    turns = turns_on(MemoryStore(1 << 20))
    turns.note(IDS, [5, 31, 40, 150, 70], "")
    assert turns.reach(IDS, "") == [150, 70, 40]
    assert turns.reach(IDS[:149], "") == [70, 40]


def test_many_ends_after_one_block_push_out_the_oldest() -> None:
    turns = turns_on(MemoryStore(1 << 20))
    prompts = [(*IDS[:32], *([n] * (n + 1))) for n in range(MAX_TAILS + 3)]
    for prompt in prompts:
        turns.note(prompt, [len(prompt)], "")
    found = [turns.reach(prompt, "") for prompt in prompts]
    assert found[-MAX_TAILS:] == [[len(prompt)] for prompt in prompts[-MAX_TAILS:]]
    assert found[0] == []


def test_another_model_sees_none_and_a_restart_forgets_none(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    turns_on(store).note(IDS, [150], "")
    assert turns_on(store, "e" * 64).reach(IDS, "") == []
    store.close()
    again = open_store(tmp_path)
    assert turns_on(again).reach(IDS, "") == [150]
    again.catalog.purge()
    assert turns_on(again).reach(IDS, "") == [150], "cleaning up keeps what is not about chunks"
    again.close()
