"""The connector in vLLM: what is loaded, what it gives, and that approximate never passes for exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

BLEND = "kvboost:blend:"


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Any:
    return serve(enable_prefix_caching=True)


@pytest.fixture(autouse=True)
def fresh(server: Any) -> None:
    server.reset()


def exact(server: Any, *prompts: list[int], **options: Any) -> list[Any]:
    """Full prefill by vLLM: no salt, so the connector claims nothing."""
    return server.ask(*prompts, salt=None, **options)


def test_documents_behind_a_prefix_that_vllm_never_saw_are_loaded(server: Any) -> None:
    prompt = server.prompt(3, 0, 5)
    (answer,) = server.ask(prompt)
    documents = sum(len(server.documents[n]) for n in (3, 0, 5))
    assert answer.cached == len(prompt) - 15, "up to the last document's end"
    assert answer.told == {"chunk_tokens": documents, "chunks": 3, "not_used": None}
    (reordered,) = server.ask(server.prompt(5, 3, 0))
    assert reordered.told["chunk_tokens"] == documents


def test_what_is_loaded_is_what_the_writer_assembles(server: Any, warmed: Any) -> None:
    """The same rows over the same assembled prompt, by transformers, to rounding."""
    from kvboost_rag.forward.row_forward import RowPlan, row_forward
    from vllm_kvboost.metadata import Load
    from vllm_kvboost.reference import open_reference
    from vllm_kvboost.source import ChunkSource
    from vllm_kvboost.writer import Writer

    prompt = server.prompt(2, 6, 1)
    (answer,) = server.ask(prompt, tokens=1)
    planner = server.planner
    reference = open_reference(server.folder, server.folder, None, torch.float32, "cpu")
    source = ChunkSource(planner._source.store, reference.fingerprint, 16)
    runs = source.find(prompt, "")
    end = runs[-1].end
    load = Load("", "", tuple(prompt[:end]), runs, 0, end, ())
    buffer = reference.buffers.take(len(prompt))
    Writer(source, reference, 16, (0, 1)).assemble(load, source.entries(r.key for r in runs), buffer)
    rows = RowPlan(torch.arange(end, len(prompt)))
    with torch.inference_mode():
        logits = row_forward(reference.model, buffer, torch.tensor(prompt), rows).logits
    logprobs = logits.log_softmax(-1)
    assert int(logprobs.argmax()) == answer.token_ids[0]
    for token, logprob in answer.logprobs[0].items():
        assert float(logprobs[token]) == pytest.approx(logprob, abs=1e-3)
    (full,) = exact(server, prompt, tokens=1)
    assert max(abs(full.logprobs[0][t] - p) for t, p in answer.logprobs[0].items() if t in full.logprobs[0]) > 1e-3, (
        "chunk KV is an approximation; were it exact, this test would show nothing"
    )


def test_a_document_at_the_very_start_is_claimed_to_its_end(server: Any) -> None:
    prompt = [*server.documents[4], *range(20, 30)]
    (answer,) = server.ask(prompt)
    assert answer.cached == len(server.documents[4])


def test_one_token_always_stays_for_vllm(server: Any) -> None:
    (answer,) = server.ask(server.documents[4])
    assert answer.cached == len(server.documents[4]) - 1


@pytest.mark.parametrize("order", ["blend first", "exact first"])
def test_approximate_never_passes_for_exact(server: Any, order: str) -> None:
    prompt = server.prompt(1, 2, 3, 4, 5)
    (reference,) = exact(server, prompt)
    server.reset()
    if order == "blend first":
        (blend,) = server.ask(prompt)
        (answer,) = exact(server, prompt)
    else:
        (answer,) = exact(server, prompt)
        (blend,) = server.ask(prompt)
    assert answer.token_ids == reference.token_ids
    assert answer.is_close_to(reference, 1e-4)
    assert not blend.is_close_to(reference, 1e-4)
    assert answer.cached == 0
    (again,) = exact(server, prompt)
    assert again.cached > 0, "its own blocks are found again"
    assert again.is_close_to(reference, 1e-4)


def test_again_and_after_a_reset_the_answer_is_the_same(server: Any) -> None:
    prompt = server.prompt(0, 1, 2, 3)
    (cold,) = server.ask(prompt)
    (warm,) = server.ask(prompt)
    server.reset()
    (reloaded,) = server.ask(prompt)
    assert cold.cached == warm.cached == reloaded.cached
    assert cold.is_close_to(warm)
    assert cold.is_close_to(reloaded)


@pytest.mark.parametrize(
    ("salt", "transfer", "why"),
    [
        (None, None, "no_salt"),
        ("somebody", None, "no_salt"),
        ("kvboost:magic:", None, "unknown_policy"),
        ("kvboost:blend:other", None, "namespace"),
        (BLEND, {"kvboost": False}, "request"),
    ],
)
def test_who_does_not_ask_gets_nothing(server: Any, salt: str | None, transfer: Any, why: str) -> None:
    (answer,) = server.ask(server.prompt(1, 2), salt=salt, transfer=transfer)
    assert (answer.cached, answer.told["not_used"]) == (0, why)


def test_one_variable_turns_it_off(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_DISABLE", "1")
    (answer,) = server.ask(server.prompt(1, 2))
    assert (answer.cached, answer.told["not_used"]) == (0, "disabled")


def test_the_last_documents_may_be_left_to_vllm(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = server.prompt(3, 0, 5)
    (full,) = exact(server, prompt, tokens=1)
    monkeypatch.setattr(server.planner, "_compute_last", 1)
    (answer,) = server.ask(prompt, tokens=1)
    assert answer.cached == 7 + len(server.documents[3]) + 2 + len(server.documents[0])
    server.reset()
    monkeypatch.setattr(server.planner, "_compute_last", 3)
    (nothing,) = server.ask(prompt, tokens=1)
    assert (nothing.cached, nothing.told["not_used"]) == (0, "no_chunks")
    assert nothing.is_close_to(full, 1e-4)


def test_without_known_documents_vllm_goes_on_alone(server: Any) -> None:
    ids = list(range(20, 120))
    (answer,) = server.ask(ids)
    assert (answer.cached, answer.told["not_used"]) == (0, "no_chunks")
    assert answer.is_close_to(exact(server, ids)[0], 1e-4)


def test_several_samples_and_prompt_logprobs(server: Any) -> None:
    from vllm import SamplingParams

    prompt = server.prompt(2, 4)
    sampling = SamplingParams(n=3, max_tokens=3, temperature=1.0, seed=5, logprobs=5, detokenize=False)
    (output,) = server.llm.generate([{"prompt_token_ids": prompt, "cache_salt": BLEND}], sampling, use_tqdm=False)
    assert len(output.outputs) == 3
    scored, plain = server.ask(prompt, tokens=1, prompt_logprobs=1), exact(server, prompt, tokens=1)
    assert scored[0].cached == 0, "vLLM computes every prompt token where their likelihoods are asked for"
    assert scored[0].is_close_to(plain[0], 1e-4)


def test_overlapping_requests_at_once_answer_as_alone(server: Any) -> None:
    prompts = [
        server.prompt(*order, question=n) for n, order in enumerate([(0, 1), (1, 0), (2, 0, 1), (1, 3, 4), (5,)])
    ]
    alone = []
    for prompt in prompts:
        server.reset()
        alone += server.ask(prompt)
    server.reset()
    together = server.ask(*prompts)
    assert [a.cached > 0 for a in together] == [True] * len(prompts)
    for one, other in zip(alone, together, strict=True):
        assert one.is_close_to(other)


def test_counters_reach_vllms_prometheus_names(server: Any) -> None:
    from prometheus_client import Counter, Gauge, Histogram

    from vllm_kvboost import KVBoostConnector

    server.ask(server.prompt(6, 7))
    connector = server.llm.llm_engine.engine_core.engine_core.scheduler.connector
    counts = dict(connector._planner.counts)
    kinds = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    metrics = KVBoostConnector.build_prom_metrics(connector._vllm_config, kinds, ["engine"], {0: ["0"]})
    metrics.observe({"claimed": 2, "claimed_tokens": 30, "no_salt": 4}, 0)
    assert metrics._totals["claimed"].labels("0")._value.get() == 2
    assert metrics._skipped.labels("0", "no_salt")._value.get() == 4
    stats = KVBoostConnector.build_kv_connector_stats({"claimed": 1}).aggregate(
        KVBoostConnector.build_kv_connector_stats({"claimed": 2, "failed": 1})
    )
    assert stats.reduce() == {"claimed": 3, "failed": 1}
    assert counts or connector.get_kv_connector_stats() is None
