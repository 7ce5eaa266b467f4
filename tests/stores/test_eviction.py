"""Policies against their definitions, and what the default must achieve in the simulator."""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvboost_rag.stores import MemoryStore
from kvboost_rag.stores.eviction import FIFO, LRU, TTL, EvictionPolicy, Importance, make_policy
from tests.stores.conftest import NUM_BYTES, build_entry, check_of

MAKERS = {"importance": Importance, "lru": LRU, "fifo": FIFO, "ttl": lambda: TTL(3600)}


@pytest.fixture(scope="module")
def simulator() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "eviction.py"
    spec = importlib.util.spec_from_file_location("eviction_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MAKERS)
def test_the_heap_finds_what_a_search_over_all_entries_finds(name: str) -> None:
    policy: EvictionPolicy = MAKERS[name]()
    rng = random.Random(1)
    for _ in range(3000):
        key = f"k{rng.randrange(40)}"
        action = rng.choice(("add", "hit", "hit", "note", "remove", "evict"))
        if action == "add":
            policy.add(key, rng.choice((10, 20, 40)))
        elif action == "hit":
            policy.hit(key)
        elif action == "note":
            policy.note_deviation(key, rng.random())
        elif action == "remove":
            policy.remove(key)
        else:
            pinned = {f"k{rng.randrange(40)}" for _ in range(5)}
            ranks = {k: policy._ranked[k][0] for k in policy.entries if k not in pinned}
            victim = policy.victim(pinned)
            assert (victim is None) == (not ranks)
            if victim is not None:
                assert ranks[victim] == min(ranks.values())
                policy.remove(victim)
        assert len(policy._heap) <= 2 * len(policy.entries) + 65


def test_lru_and_fifo_orders() -> None:
    for policy, expected in ((LRU(), ["b", "c", "a"]), (FIFO(), ["a", "b", "c"])):
        for key in "abc":
            policy.add(key, 1)
        policy.hit("a")
        order = []
        while (victim := policy.victim()) is not None:
            order.append(victim)
            policy.remove(victim)
        assert order == expected


def importance_by_definition(uses: list[int], now: int, num_entries: int, half_life: float) -> float:
    """Σ ½^(age ÷ half-life) over the uses, ages counted in accesses."""
    return sum(0.5 ** ((now - at) / (half_life * num_entries)) for at in uses)


def test_importance_is_what_its_docstring_says() -> None:
    policy = Importance(half_life=2.0)
    for key in "abcd":
        policy.add(key, 100)
    for key in "abcd":  # from here on the number of entries, and so the half-life, stays the same
        policy.remove(key)
        policy._past.clear()
        policy.add(key, {"a": 100, "b": 100, "c": 200, "d": 100}[key])
    uses: dict[str, list[int]] = {key: [] for key in "abcd"}
    base = {key: policy.frequency_now(policy.entries[key]) for key in "abcd"}
    rng = random.Random(0)
    for now in range(1, 200):
        key = rng.choice("aabcccd")
        policy.hit(key)
        uses[key].append(now)
    for key in "abcd":
        expected = importance_by_definition(uses[key], 199, 4, 2.0) + base[key] * 0.5 ** (199 / 8)
        assert policy.frequency_now(policy.entries[key]) == pytest.approx(expected)
    worth = {k: policy.frequency_now(u) / u.num_bytes for k, u in policy.entries.items()}
    assert policy.victim() == min(worth, key=worth.get)


def test_importance_weighs_deviation_and_bytes_and_remembers_the_evicted() -> None:
    policy = Importance()
    for key, size in (("steady", 100), ("drifting", 100), ("large", 400)):
        policy.add(key, size)
    policy.note_deviation("steady", 0.1)
    policy.note_deviation("drifting", 0.3)
    order = [policy.victim(pinned) for pinned in ((), ("large",), ("large", "steady"))]
    assert order == ["large", "steady", "drifting"]
    for _ in range(6):
        policy.hit("steady")
    policy.remove("steady")
    policy.add("steady", 100)
    assert policy.entries["steady"].frequency > 3


def test_entries_expire_and_a_clock_that_goes_back_expires_nothing() -> None:
    now = [1000.0]
    store = MemoryStore(10 * NUM_BYTES, policy=TTL(60, clock=lambda: now[0]))
    a, b = build_entry(1), build_entry(2)
    store.put(a)
    now[0] = 500.0
    store.put(b)
    assert store.get(a.key, check_of(a)) is not None
    now[0] = 560.0
    assert store.get(b.key, check_of(b)) is None
    assert store.get(a.key, check_of(a)) is not None
    now[0] = 1060.0
    store.put(build_entry(3))
    assert a.key not in store
    assert store.stats.evictions == {"expired": 2}
    assert store.bytes_held["memory"] == NUM_BYTES


def test_evictions_are_counted_by_reason() -> None:
    for policy, reason in (("importance", "importance_low"), ("lru", "budget"), ("fifo", "budget")):
        store = MemoryStore(2 * NUM_BYTES, policy=policy)
        for n in range(5):
            store.put(build_entry(n))
        assert store.stats.evictions == {reason: 3}


def test_policies_by_name_and_bad_ones() -> None:
    assert make_policy("ttl:5").seconds == 5
    used = LRU()
    used.add("k", 1)
    for bad, message in (
        ("mru", "known: importance"),
        ("ttl", "ttl:SECONDS"),
        ("ttl:-1", "ttl:SECONDS"),
        ("lru:3", "unknown"),
        (used, "one tier"),
    ):
        with pytest.raises(ValueError, match=message):
            make_policy(bad)
    with pytest.raises(ValueError, match="half_life"):
        Importance(half_life=0)


def test_the_default_does_not_lose_to_lru_and_wins_under_scans(simulator: ModuleType) -> None:
    for name, trace in simulator.traces(12_000, seed=3).items():
        for share in (0.05, 0.1, 0.3):
            found = simulator.compare(trace, share)
            assert found["importance"].hit_rate >= found["lru"].hit_rate - 0.02, (name, share)
            assert all(found["optimum"].hit_rate >= r.hit_rate for n, r in found.items() if name != "sizes"), name
            if name == "scan":
                assert found["importance"].hit_rate > found["lru"].hit_rate


def best_by_search(keys: tuple[str, ...], room: int) -> int:
    """Most hits of any policy, by trying them all."""

    @functools.cache
    def best(at: int, held: frozenset[str]) -> int:
        if at == len(keys):
            return 0
        if keys[at] in held:
            return 1 + best(at + 1, held)
        choices = [held]
        grown = held | {keys[at]}
        choices += [grown] if len(grown) <= room else [grown - {k} for k in grown]
        return max(best(at + 1, choice) for choice in choices)

    return best(0, frozenset())


def test_the_optimum_is_optimal(simulator: ModuleType) -> None:
    rng = random.Random(5)
    for _ in range(30):
        keys = tuple(rng.choice("abcde") for _ in range(12))
        hits = simulator.optimum([(k, 1) for k in keys], 2).hit_rate * len(keys)
        assert round(hits) == best_by_search(keys, 2)


def test_trace_files(simulator: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text("a 10\n\nb\na 10\n")
    trace = simulator.read_trace(path)
    assert [key for key, _ in trace] == ["a", "b", "a"]
    assert trace[0] == ("a", 10)
    assert simulator.replay(trace, 10**9, LRU()).hit_rate == pytest.approx(1 / 3)
    path.write_text("a ten\n")
    with pytest.raises(ValueError, match=r"trace\.txt:1"):
        simulator.read_trace(path)
