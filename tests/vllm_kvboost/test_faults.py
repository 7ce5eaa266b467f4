"""Faults underneath a running vLLM: every answer is full prefill's or that of all chunks, and nothing hangs."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BLEND = "kvboost:blend:"

ROUNDS = int(os.environ.get("KVBOOST_ROUNDS", "12"))
"""Rounds of eight random requests; 125 by hand."""


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Any:
    # Few blocks, so that requests which come together take them from each other; steps shorter than claims.
    options = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 34}
    return serve({"deadline_ms": 500}, enable_prefix_caching=False, **options)


def full(server: Any, prompt: list[int], **options: Any) -> Any:
    return server.ask(prompt, transfer={"kvboost": False}, **options)[0]


def blend(server: Any, prompt: list[int], **options: Any) -> Any:
    (answer,) = server.ask(prompt, **options)
    assert answer.cached > 0
    return answer


def test_a_claim_longer_than_a_step_is_loaded_whole(server: Any) -> None:
    prompt = server.prompt(0, 1, 2, 3, 4, 5)
    assert len(prompt) > 3 * 128
    answer = blend(server, prompt)
    assert answer.cached == len(prompt) - 15
    assert full(server, prompt).cached == 0


def test_without_prefix_caching_every_request_may_be_served(server: Any) -> None:
    (answer,) = server.ask(server.prompt(1, 2), salt=None)
    assert answer.cached > 0


def test_a_worker_that_cannot_load_leaves_the_prompt_to_vllm(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvboost.writer import Writer

    prompt, calls = server.prompt(3, 1, 2), []

    def fail(self: Writer, load: Any, layers: Any) -> None:
        calls.append(load.request_id)
        raise OSError("the disk is gone")

    expected = full(server, prompt)
    monkeypatch.setattr(Writer, "load", fail)
    (answer,) = server.ask(prompt)
    assert answer.is_close_to(expected, 1e-4)
    assert len(calls) == 1, "a claim that failed is not repeated"
    assert answer.told["not_used"] == "failed"


@pytest.mark.parametrize("fault", ["missing", "corrupt"])
def test_a_chunk_that_is_gone_or_damaged_is_never_claimed(
    server: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = server.planner._source
    original, broken = type(source).entry, set(list(source.store.keys())[:1])

    def entry(self: Any, record: Any) -> Any:
        return None if record.content_hash in broken else original(self, record)

    monkeypatch.setattr(type(source), "entry", entry)
    by_ids = {source.find(ids, "")[0].key: n for n, ids in enumerate(server.documents)}
    number = by_ids[next(iter(broken & by_ids.keys()), next(iter(by_ids)))]
    broken.add(source.find(server.documents[number], "")[0].key)
    prompt = server.prompt(number, (number + 1) % 8)
    (answer,) = server.ask(prompt)
    assert (answer.cached, answer.told["not_used"]) == (0, "missing")
    assert answer.is_close_to(full(server, prompt), 1e-4)


def test_a_slow_store_is_not_waited_for_beyond_the_deadline(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = server.planner._source
    original = type(source).entries

    def slowly(self: Any, keys: Any) -> Any:
        time.sleep(1.5)
        return original(self, keys)

    prompt = server.prompt(6, 5)
    expected = full(server, prompt)
    monkeypatch.setattr(type(source), "entries", slowly)
    (answer,) = server.ask(prompt)
    assert (answer.cached, answer.told["not_used"]) == (0, "slow")
    assert answer.is_close_to(expected, 1e-4)


def test_a_catalog_that_cannot_be_asked_costs_reuse_only(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = server.planner._source

    def fail(self: Any, ids: Any, namespace: str) -> Any:
        raise OSError("no catalog")

    monkeypatch.setattr(type(source), "find", fail)
    (answer,) = server.ask(server.prompt(6, 5))
    assert (answer.cached, answer.told["not_used"]) == (0, "lookup_failed")


def test_random_requests_with_faults_give_one_of_two_answers(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come together, on overlapping documents, while reads and loads fail at random, some aborted."""
    from vllm_kvboost.source import ChunkSource
    from vllm_kvboost.writer import Writer

    draw = random.Random(11)
    prompts = [
        server.prompt(*draw.sample(range(8), draw.randrange(1, 5)), question=draw.randrange(3)) for _ in range(10)
    ]
    expected = [(full(server, prompt), blend(server, prompt)) for prompt in prompts]
    load, entry = Writer.load, ChunkSource.entry

    def load_or_fail(self: Writer, request: Any, layers: Any) -> int:
        if draw.random() < 0.2:
            raise OSError("injected")
        return load(self, request, layers)

    def entry_or_none(self: ChunkSource, record: Any) -> Any:
        return None if draw.random() < 0.05 else entry(self, record)

    monkeypatch.setattr(Writer, "load", load_or_fail)
    monkeypatch.setattr(ChunkSource, "entry", entry_or_none)
    kinds = {"full": 0, "blend": 0}
    for _ in range(ROUNDS):
        chosen = [draw.randrange(len(prompts)) for _ in range(8)]
        for number, answer in zip(chosen, server.ask(*(prompts[n] for n in chosen)), strict=True):
            of_full, of_blend = expected[number]
            if answer.told["not_used"] is None:
                assert answer.is_close_to(of_blend)
                kinds["blend"] += 1
            else:
                assert answer.is_close_to(of_full)
                kinds["full"] += 1
    assert min(kinds.values()) > 5, "both happened"
    assert not server.planner._plans, "nothing is remembered of requests that are over"


def test_requests_that_lose_their_blocks_are_loaded_again(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvboost.planner import Planner

    prompts = [server.prompt(n, (n + 1) % 8, question=n) for n in range(6)]
    alone = [blend(server, prompt, tokens=150) for prompt in prompts]
    allocated, loads = Planner.allocated, []

    def note(self: Planner, request: Any, block_ids: Any, num_tokens: int) -> None:
        loads.append(request.request_id)
        allocated(self, request, block_ids, num_tokens)

    monkeypatch.setattr(Planner, "allocated", note)
    together = server.ask(*prompts, tokens=150)
    assert len(loads) > len(set(loads)) == len(prompts), "none was preempted: this shows nothing"
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids


def test_an_aborted_request_leaves_nothing_behind(server: Any) -> None:
    from vllm import SamplingParams

    engine = server.llm.llm_engine
    for step in range(4):
        name = f"abort-{step}"
        engine.add_request(
            name, {"prompt_token_ids": server.prompt(1, 2, 3)}, SamplingParams(max_tokens=50, detokenize=False)
        )
        for _ in range(step):
            engine.step()
        engine.abort_request([name])
    while engine.has_unfinished_requests():
        engine.step()
    assert not server.planner._plans
    assert not server.planner._source.store._pins
    assert blend(server, server.prompt(1, 2, 3)).told["chunks"] == 3


def test_a_document_deleted_by_another_process_is_not_found_any_more(server: Any, warmed: Any) -> None:
    from kvboost_rag.stores import maintenance, open_store

    folder: Path = warmed[0]
    source = server.planner._source
    with_it = blend(server, server.prompt(7))
    assert with_it.told["chunks"] == 1
    key = source.find(server.documents[7], "")[0].key
    other = open_store(folder)
    maintenance.forget(other, [key])
    other.close()
    (answer,) = server.ask(server.prompt(7))
    assert (answer.cached, answer.told["not_used"]) == (0, "no_chunks")
