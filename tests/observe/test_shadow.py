"""Shadow mode: sampling, figures, the limit, and that it disturbs nobody."""

from __future__ import annotations

import logging
import threading

import pytest

from kvboost_rag.config import ConfigError, ReuseConfig
from kvboost_rag.observe.shadow import MAX_PENDING, MIN_SAMPLES, Shadow, ShadowSample

DOCUMENTS = [
    "The store holds keys and values of every document that was encoded when the index was built.",
    "A question is answered from the documents in front of it; the first token comes soon.",
    "Rotation turns keys to the positions that they take in this prompt, in float32.",
]
PROMPT = "\n\n".join([*DOCUMENTS, "Question: what does the store hold?"])


@pytest.fixture
def shadow():
    made = Shadow("tiny", lambda: True, seed=1)
    yield made
    made.close()


def sample(kl: float = 0.01) -> ShadowSample:
    return ShadowSample(kl, kl, 1.0)


def test_sampling_keeps_to_the_rate(shadow):
    taken = sum(shadow.offer(sample, 0.1, None) or shadow.wait() or 0 for _ in range(1000))
    shadow.wait()
    assert 70 <= taken <= 130
    assert not any(shadow.offer(sample, 0.0, None) for _ in range(100))


def test_trips_above_the_limit_once_there_are_enough_samples(shadow, caplog):
    with caplog.at_level(logging.ERROR):
        for i in range(MIN_SAMPLES):
            assert not shadow.tripped
            shadow.offer(lambda: sample(0.2), 1.0, 0.1)
            shadow.wait()
            assert shadow.stats().num_compared == i + 1
    assert shadow.tripped
    assert "0.2 nats from full prefill" in caplog.text
    shadow.reset()
    assert not shadow.tripped
    assert shadow.stats().kl_first is None


def test_only_the_mean_counts_and_no_limit_never_trips(shadow):
    for kl in (0.5, 0.0, 0.0, 0.0, 0.0, 0.0):
        shadow.offer(lambda kl=kl: sample(kl), 1.0, 0.11)
    shadow.wait()
    assert not shadow.tripped
    for _ in range(2 * MIN_SAMPLES):
        shadow.offer(lambda: sample(9.0), 1.0, None)
        shadow.wait()
    assert not shadow.tripped
    assert shadow.stats().kl_mean > 1


def test_either_kl_can_trip(shadow):
    for _ in range(MIN_SAMPLES):
        shadow.offer(lambda: ShadowSample(0.0, 1.0, 0.5), 1.0, 0.1)
        shadow.wait()
    assert shadow.tripped
    assert shadow.stats().agreement == 0.5


def test_a_failing_comparison_is_counted_and_the_next_one_runs(shadow, caplog):
    def fail():
        raise ValueError("no room")

    shadow.offer(fail, 1.0, None)
    shadow.offer(sample, 1.0, None)
    shadow.wait()
    stats = shadow.stats()
    assert (stats.num_compared, stats.num_passed_over) == (1, 1)
    assert "no room" in caplog.text


def test_pending_comparisons_are_bounded():
    gate = threading.Event()
    busy = Shadow("tiny", lambda: True)

    def slow() -> ShadowSample:
        gate.wait()
        return sample()

    taken = [busy.offer(slow, 1.0, None) for _ in range(3 * MAX_PENDING)]
    assert MAX_PENDING <= sum(taken) <= MAX_PENDING + 1  # one may have left the queue already
    assert busy.stats().num_passed_over == len(taken) - sum(taken)
    gate.set()
    busy.wait()
    busy.close()
    assert not busy.offer(sample, 1.0, None)


def test_comparisons_wait_for_an_idle_engine():
    idle = threading.Event()
    polite = Shadow("tiny", idle.is_set)
    polite.offer(sample, 1.0, None)
    polite.offer(sample, 1.0, None)
    assert polite.stats().num_compared == 0
    idle.set()
    polite.wait()
    assert polite.stats().num_compared == 2
    polite.close()


def test_rates_and_limits_are_checked():
    with pytest.raises(ConfigError, match="shadow_rate"):
        ReuseConfig(shadow_rate=1.5)
    with pytest.raises(ConfigError, match="shadow_max_kl=-1"):
        ReuseConfig(shadow_max_kl=-1)


def ask(engine, **options):
    from kvboost_rag import GenerationParams

    return engine.generate(PROMPT, documents=DOCUMENTS, params=GenerationParams(max_new_tokens=4), **options)


def test_engine_compares_what_it_served(tiny_model):
    from kvboost_rag import KVBoost
    from kvboost_rag.observe.divergence import kl_per_token

    with KVBoost(tiny_model(), profile=None) as engine:
        assert engine.stats().shadow.num_compared == 0
        ask(engine, repair="none")
        engine.shadow.wait()
        assert engine.stats().shadow.num_compared == 0  # off by default
        served = ask(engine, repair="none", shadow_rate=1.0)
        engine.shadow.wait()
        found = engine.stats().shadow
        answer = served.token_ids[:-1]
        full = engine.logits(PROMPT, answer, documents=DOCUMENTS, reuse="off")
        ours = engine.logits(PROMPT, answer, documents=DOCUMENTS, repair="none")
        expected = kl_per_token(full, ours)
        assert found.num_compared == 1
        assert found.kl_first == pytest.approx(float(expected[0]), rel=1e-6)
        assert found.kl_mean == pytest.approx(float(expected.mean()), rel=1e-6)
        assert found.kl_mean > 1e-4
        ask(engine, repair="full", shadow_rate=1.0)
        ask(engine, reuse="off", shadow_rate=1.0)
        engine.shadow.wait()
        assert engine.stats().shadow.num_compared == 2  # full prefill needs no comparison
        assert engine.stats().requests == 4  # comparisons are no requests


def test_engine_falls_back_to_exact_reuse_above_the_limit(tiny_model, caplog):
    from kvboost_rag import KVBoost

    with KVBoost(tiny_model(), profile=None, config=ReuseConfig(shadow_rate=1.0, shadow_max_kl=1e-6)) as engine:
        for _ in range(MIN_SAMPLES):
            assert ask(engine, repair="none").reuse == "blend"
            engine.shadow.wait()
        after = ask(engine, repair="none")
        assert after.reuse == "exact"
        assert after.token_ids == ask(engine, reuse="off").token_ids
        engine.shadow.reset()
        assert ask(engine, repair="none").reuse == "blend"


def test_shadow_metrics(tiny_model):
    prometheus = pytest.importorskip("prometheus_client")
    from kvboost_rag import KVBoost
    from kvboost_rag.observe.metrics import Metrics

    registry = prometheus.CollectorRegistry()
    with KVBoost(tiny_model(), profile=None, metrics=Metrics("tiny", registry)) as engine:
        ask(engine, repair="none", shadow_rate=1.0)
        engine.shadow.wait()
        stats = engine.stats().shadow
    assert registry.get_sample_value("kvboost_shadow_kl_count") == 1
    assert registry.get_sample_value("kvboost_shadow_kl_sum") == pytest.approx(stats.kl_mean)
    assert registry.get_sample_value("kvboost_shadow_agreement") == pytest.approx(stats.agreement)
