"""Load or recompute: decisions from measured speeds, and the plan's arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvboost_rag.stores import DiskStore
from kvboost_rag.stores.cost import REMOTE, RETRY_EVERY, CostModel, measure_load_speed, plan
from tests.stores.conftest import build_entry


def test_loads_until_both_speeds_are_measured() -> None:
    costs = CostModel()
    assert costs.decide(10**12, 1).load
    costs.observe_load(1000, 1.0)
    assert costs.decide(10**12, 1).load
    assert costs.encode_tokens_per_second is None
    costs.observe_encode(100, 1.0)
    assert (costs.load_bytes_per_second, costs.encode_tokens_per_second) == (1000.0, 100.0)


def test_tiers_are_measured_apart() -> None:
    costs = CostModel()
    costs.observe_load(1000, 0.1)
    costs.observe_encode(100, 1.0)
    assert costs.decide(10**12, 1, REMOTE).load, "nothing is known of it"
    costs.observe_load(1000, 10.0, REMOTE)
    assert costs.decide(2000, 100).load
    decisions = [costs.decide(2000, 100, REMOTE).load for _ in range(RETRY_EVERY + 1)]
    assert decisions == [False] * RETRY_EVERY + [True]
    assert costs.load_bytes_per_second == 10_000


def test_decides_by_what_is_faster() -> None:
    costs = CostModel()
    costs.observe_load(1000, 1.0)
    costs.observe_encode(100, 1.0)
    decision = costs.decide(2000, 100)
    assert (decision.load, decision.load_seconds, decision.recompute_seconds) == (False, 2.0, 1.0)
    assert costs.decide(900, 100).load


def test_follows_changes_and_tries_loading_again() -> None:
    costs = CostModel()
    costs.observe_load(1000, 1.0)
    costs.observe_encode(100, 1.0)
    decisions = [costs.decide(2000, 100).load for _ in range(2 * RETRY_EVERY + 2)]
    assert decisions == [*[False] * RETRY_EVERY, True] * 2
    for _ in range(30):
        costs.observe_load(1_000_000, 1.0)
    assert costs.decide(2000, 100).load


def test_nothing_measured_changes_nothing() -> None:
    costs = CostModel()
    costs.observe_load(0, 1.0)
    costs.observe_encode(0, 1.0)
    assert costs.load_bytes_per_second is None
    assert costs.encode_tokens_per_second is None


def test_plan() -> None:
    found = plan(
        bytes_per_token=1000,
        corpus_tokens=10_000,
        chunk_tokens=250,
        context_tokens=750,
        load_bytes_per_second=1_000_000,
        encode_tokens_per_second=500,
    )
    assert found.corpus_bytes == 10_000_000
    assert found.warm_seconds == (10_000 + 40 * 750) / 500
    assert (found.load_seconds, found.encode_seconds) == (0.25, 2.0)
    assert found.loading_pays
    assert found.break_even_bytes_per_second == 125_000


@pytest.mark.parametrize(
    "field", ["bytes_per_token", "chunk_tokens", "load_bytes_per_second", "encode_tokens_per_second"]
)
def test_plan_refuses_what_cannot_be(field: str) -> None:
    values = {
        "bytes_per_token": 1.0,
        "corpus_tokens": 1,
        "chunk_tokens": 1,
        "context_tokens": 0,
        "load_bytes_per_second": 1.0,
        "encode_tokens_per_second": 1.0,
    }
    with pytest.raises(ValueError, match="above 0"):
        plan(**{**values, field: 0})  # type: ignore[arg-type]


def test_load_speed_is_measured_on_what_is_there(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1_000_000)
    assert measure_load_speed(store) is None
    for n in range(5):
        store.put(build_entry(n))
    store.folder.path(build_entry(0).key).write_bytes(b"")
    assert measure_load_speed(store) > 0
    assert store.stats.lookups == 0
