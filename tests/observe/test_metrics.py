"""Metric values after a known sequence of operations."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvboost_rag.datamodels import GenerationResult, HitKind, RepairReport, SegmentKind, SegmentReport, Usage
from kvboost_rag.observe.metrics import Metrics, short_reason, start_metrics_server
from kvboost_rag.stores import DiskStore, MemoryStore, TieredStore
from tests.stores.conftest import NUM_BYTES, build_entry, check_of


def result(
    hits: list[HitKind],
    recomputed: int = 0,
    reuse: str = "blend",
    fallback: str | None = None,
    deviation: float | None = None,
    ttft_ms: float = 40.0,
) -> GenerationResult:
    """A request with a stored prefix of 7 tokens, one document of 100 tokens a hit kind (60 of them from a donor where
    it is one), and a question of 10."""
    documents = [
        SegmentReport(
            SegmentKind.DOCUMENT,
            hit,
            0,
            100,
            recomputed if i == 0 else 0,
            f"{i}",
            deviation,
            None,
            60 * (hit is HitKind.DONOR),
        )
        for i, hit in enumerate(hits)
    ]
    segments = (
        SegmentReport(SegmentKind.PREFIX, HitKind.EXACT if reuse != "off" else HitKind.PREFILLED, 0, 7),
        *documents,
        SegmentReport(SegmentKind.SUFFIX, HitKind.PREFILLED, 0, 10),
    )
    exact = 7 * (reuse != "off") + 100 * hits.count(HitKind.EXACT)
    usage = Usage(17 + 100 * len(hits), 0, recomputed, 10, 0, 3, exact_tokens=exact)
    repair = RepairReport("query" if reuse == "blend" else "none")
    return GenerationResult("", (), "stop", usage, reuse, segments, repair, {}, ttft_ms, 99.0, fallback)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_hits_misses_tokens_and_rates(registry: CollectorRegistry) -> None:
    metrics = Metrics("m", registry)
    value = registry.get_sample_value
    assert math.isnan(value("kvboost_cache_hit_rate"))
    metrics.record(result([HitKind.ENCODED, HitKind.ENCODED]))
    assert value("kvboost_cache_hit_rate") == 0.0
    metrics.record(result([HitKind.APPROXIMATE, HitKind.APPROXIMATE, HitKind.DONOR], recomputed=15))
    metrics.record(result([HitKind.EXACT], reuse="exact"))
    metrics.record(result([HitKind.PREFILLED], reuse="off"))
    assert value("kvboost_cache_hits_total", {"model": "m", "strategy": "query", "kind": "approximate"}) == 2
    assert value("kvboost_cache_hits_total", {"model": "m", "strategy": "query", "kind": "donor"}) == 1
    assert value("kvboost_cache_hits_total", {"model": "m", "strategy": "none", "kind": "exact"}) == 1
    assert value("kvboost_cache_misses_total", {"model": "m", "strategy": "query"}) == 2
    assert value("kvboost_cache_hit_rate") == pytest.approx(4 / 6)
    assert value("kvboost_recompute_tokens_total", {"strategy": "query"}) == 15
    assert value("kvboost_recompute_ratio") == pytest.approx(15 / 600)
    assert value("kvboost_reused_tokens_total") == 7 + (200 - 15 + 60 + 7) + (100 + 7)


def test_ttft_by_path_fallbacks_and_deviation(registry: CollectorRegistry) -> None:
    metrics = Metrics("m", registry)
    value = registry.get_sample_value
    metrics.record(result([HitKind.APPROXIMATE], deviation=0.15, ttft_ms=40))
    metrics.record(result([HitKind.PREFILLED], reuse="off", fallback="RuntimeError: shapes differ", ttft_ms=800))
    metrics.record(result([HitKind.PREFILLED], reuse="off", fallback="the model's RoPE is constant up to 8 only"))
    assert value("kvboost_ttft_seconds_bucket", {"path": "blend", "le": "0.05"}) == 1
    assert value("kvboost_ttft_seconds_sum", {"path": "blend"}) == pytest.approx(0.04)
    assert value("kvboost_ttft_seconds_count", {"path": "fallback"}) == 2
    assert value("kvboost_fallbacks_total", {"reason": "RuntimeError"}) == 1
    assert value("kvboost_fallbacks_total", {"reason": "unsupported"}) == 1
    assert value("kvboost_deviation_count") == 1
    assert value("kvboost_deviation_bucket", {"le": "0.1"}) == 0
    assert value("kvboost_deviation_bucket", {"le": "0.2"}) == 1


def test_reasons_stay_few() -> None:
    assert short_reason("OutOfMemoryError: 12 MB at 0x7f") == "OutOfMemoryError"
    assert short_reason("prompt of 812 tokens: too long") == "unsupported"


def test_psnr_and_refusals(registry: CollectorRegistry) -> None:
    metrics = Metrics("m", registry)
    metrics.record_encoded({"codec": "none"})
    assert math.isnan(registry.get_sample_value("kvboost_quant_error_psnr"))
    metrics.record_encoded({"codec": "k8v4", "psnr_db": "41.00"})
    metrics.record_encoded({"codec": "none", "psnr_db": "31.00", "refused": "k8v4"})
    assert registry.get_sample_value("kvboost_quant_error_psnr") == 36.0
    assert registry.get_sample_value("kvboost_quant_refused_total", {"setting": "k8v4"}) == 1


def test_decisions(registry: CollectorRegistry) -> None:
    metrics = Metrics("m", registry)
    for load in (True, False, True):
        metrics.record_decision(load)
    assert registry.get_sample_value("kvboost_load_decisions_total", {"choice": "load"}) == 2
    assert registry.get_sample_value("kvboost_load_decisions_total", {"choice": "recompute"}) == 1


def test_a_watched_store(registry: CollectorRegistry, tmp_path: Path) -> None:
    store = TieredStore(MemoryStore(2 * NUM_BYTES), DiskStore(tmp_path, 1_000_000))
    Metrics("m", registry).watch(store)
    value = registry.get_sample_value
    entries = [build_entry(n) for n in range(3)]
    for entry in entries:
        store.put(entry)
        store.flush()
    for entry in entries:
        assert store.get(entry.key, check_of(entry)) is not None
    missing = build_entry(9)
    store.get(missing.key, check_of(missing))
    store.delete(entries[0].key)
    assert value("kvboost_cache_bytes", {"tier": "memory"}) == store.bytes_held["memory"]
    assert value("kvboost_cache_bytes", {"tier": "disk"}) == store.bytes_held["disk"] > 0
    lookups = {
        (tier, kind): value("kvboost_store_lookups_total", {"tier": tier, "result": kind})
        for tier in ("memory", "disk")
        for kind in ("hit", "miss")
    }
    assert lookups["memory", "hit"] + lookups["memory", "miss"] == 4
    assert lookups["memory", "miss"] == lookups["disk", "hit"] + lookups["disk", "miss"]
    assert lookups["disk", "miss"] == 1
    assert value("kvboost_cache_evictions_total", {"tier": "memory", "reason": "importance_low"}) >= 1
    assert value("kvboost_cache_evictions_total", {"tier": "disk", "reason": "deleted"}) == 1


def test_engines_share_a_registry_and_stores_add_up(registry: CollectorRegistry) -> None:
    a, b = Metrics("a", registry), Metrics("b", registry)
    stores = MemoryStore(10_000), MemoryStore(10_000)
    for metrics, store in zip((a, b), stores, strict=True):
        metrics.watch(store)
        store.put(build_entry(1))
        metrics.record(result([HitKind.APPROXIMATE]))
    assert registry.get_sample_value("kvboost_cache_bytes", {"tier": "memory"}) == 2 * NUM_BYTES
    for model in "ab":
        labels = {"model": model, "strategy": "query", "kind": "approximate"}
        assert registry.get_sample_value("kvboost_cache_hits_total", labels) == 1
    assert registry.get_sample_value("kvboost_reused_tokens_total") == 2 * 107


def test_a_closed_store_takes_no_other_figures_with_it(registry: CollectorRegistry, tmp_path: Path) -> None:
    closed, open_one = DiskStore(tmp_path, 10_000), MemoryStore(10_000)
    for store in (closed, open_one):
        Metrics("m", registry).watch(store)
    open_one.put(build_entry(1))
    closed.close()
    assert registry.get_sample_value("kvboost_cache_bytes", {"tier": "memory"}) == NUM_BYTES
    assert registry.get_sample_value("kvboost_cache_bytes", {"tier": "disk"}) is None


def test_the_server_serves_and_a_taken_port_says_so(registry: CollectorRegistry) -> None:
    Metrics("m", registry).record(result([HitKind.APPROXIMATE]))
    server, thread = start_metrics_server(0, registry)
    try:
        port = server.server_address[1]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            assert response.read() == generate_latest(registry)
        with pytest.raises(OSError, match=f"cannot serve metrics on 127.0.0.1:{port}"):
            start_metrics_server(port, registry)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["prometheus-rules.yml", "grafana-dashboard.json"])
def test_rules_and_dashboard_ask_for_metrics_that_exist(registry: CollectorRegistry, tmp_path: Path, name: str) -> None:
    metrics = Metrics("m", registry)
    store = DiskStore(tmp_path, 1_000_000)
    metrics.watch(store)
    store.stats.evictions["corrupt"] += 1
    store.stats.rejected["corrupt"] += 1
    metrics.record(result([HitKind.APPROXIMATE, HitKind.ENCODED], deviation=0.1, fallback="ValueError: x"))
    metrics.record_encoded({"refused": "k8v4", "psnr_db": "30"})
    metrics.record_decision(True)
    exported = {sample.name for family in registry.collect() for sample in family.samples}
    asked = set(re.findall(r"\bkvboost_\w+", (DOCS / name).read_text()))
    assert len(asked) > 5
    assert asked <= exported


def test_the_dashboard_can_be_imported() -> None:
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 8
    spans = [(p["gridPos"], p["title"]) for p in panels]
    assert all(p["x"] + p["w"] <= 24 for p, _ in spans)
    assert all(panel["targets"] and panel["datasource"]["uid"] == "${datasource}" for panel in panels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed")
def test_promtool_accepts_the_rules() -> None:
    command = ["promtool", "check", "rules", str(DOCS / "prometheus-rules.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 rules found" in done.stdout + done.stderr
