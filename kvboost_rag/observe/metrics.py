"""Prometheus metrics, for those who ask for them (`pip install 'kvboost-rag[metrics]'`)."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvboost_rag.datamodels import GenerationResult, HitKind, SegmentKind, SegmentReport
from kvboost_rag.observe.recorder import Recorder

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kvboost_rag.stores.base import Store

logger = logging.getLogger(__name__)

WINDOW = 1000
"""Document segments (hit rate), requests (recompute ratio), chunks (PSNR) that the gauges look back on."""
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
KL_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
DEVIATION_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
HITS = (HitKind.EXACT, HitKind.APPROXIMATE, HitKind.DONOR)


class Metrics(Recorder):
    """What one engine reports. Call `record` after each request, `record_encoded` after each chunk, `watch` once.

    Engines may share a registry: counters then add up (hits and misses by model), and the gauges hold what the
    engine that served last has seen. Thread-safe.

    Args:
        model: value of the `model` label.
        registry: default: prometheus_client's own.

    Raises:
        ImportError: prometheus_client is not installed; the message says how to get it.
    """

    def __init__(self, model: str, registry: CollectorRegistry | None = None) -> None:
        self.model = model
        self._families = _families_of(registry)
        self._lock = threading.Lock()
        self._hits: deque[bool] = deque(maxlen=WINDOW)
        self._recomputed: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._psnr: deque[float] = deque(maxlen=WINDOW)
        self._agreements: deque[float] = deque(maxlen=WINDOW)

    def record(self, result: GenerationResult) -> None:
        """Count one finished request. A request without reuse counts in the TTFT histogram only."""
        families = self._families
        if result.fallback_reason is not None:
            families.fallbacks.labels(reason=short_reason(result.fallback_reason)).inc()
        path = "fallback" if result.fallback_reason is not None else result.reuse
        families.ttft.labels(path=path).observe(result.ttft_ms / 1000)
        if result.reuse == "off":
            return
        strategy = result.repair.strategy
        documents = [s for s in result.segments if s.kind is SegmentKind.DOCUMENT]
        for segment in documents:
            self._count_segment(segment, strategy)
        families.recomputed.labels(strategy=strategy).inc(result.usage.recomputed_tokens)
        approximate = sum(_reused_tokens(s) for s in result.segments if s.hit in (HitKind.APPROXIMATE, HitKind.DONOR))
        families.reused.inc(result.usage.exact_tokens + approximate)
        with self._lock:
            self._hits.extend(s.hit in HITS for s in documents)
            self._recomputed.append((result.usage.recomputed_tokens, sum(s.num_tokens for s in documents)))
            num_tokens = sum(total for _, total in self._recomputed)
            if self._hits:
                families.hit_rate.set(sum(self._hits) / len(self._hits))
            if num_tokens:
                families.recompute_ratio.set(sum(n for n, _ in self._recomputed) / num_tokens)

    def record_encoded(self, meta: Mapping[str, str]) -> None:
        """Count one encoded chunk by the meta strings that `quantization.encode` returned."""
        if "refused" in meta:
            self._families.refused.labels(setting=meta["refused"]).inc()
        if "psnr_db" not in meta:
            return
        with self._lock:
            self._psnr.append(float(meta["psnr_db"]))
            self._families.psnr.set(sum(self._psnr) / len(self._psnr))

    def record_decision(self, load: bool) -> None:
        """Count one choice between loading a chunk from disk and computing it again."""
        self._families.decisions.labels(choice="load" if load else "recompute").inc()

    def record_shadow(self, kl: float, agreement: float) -> None:
        """Count one comparison of a served answer with full prefill: mean KL in nats, share of agreeing tokens."""
        self._families.shadow_kl.observe(kl)
        with self._lock:
            self._agreements.append(agreement)
            self._families.shadow_agreement.set(sum(self._agreements) / len(self._agreements))

    def record_settled(self, num_tokens: int) -> None:
        """Count tokens of served turns that were recomputed while the engine was idle."""
        self._families.settled.inc(num_tokens)

    def watch(self, store: Store) -> None:
        """Export a store's bytes, lookups and evictions, read whenever metrics are scraped."""
        self._families.stores.add(store)

    def _count_segment(self, segment: SegmentReport, strategy: str) -> None:
        if segment.hit in HITS:
            self._families.hits.labels(model=self.model, strategy=strategy, kind=segment.hit.value).inc()
        else:
            self._families.misses.labels(model=self.model, strategy=strategy).inc()
        if segment.deviation is not None:
            self._families.deviation.observe(segment.deviation)


def start_metrics_server(port: int, registry: CollectorRegistry | None = None, address: str = "127.0.0.1") -> Any:
    """Serve `/metrics` over HTTP in a thread; returns prometheus_client's `(server, thread)`.

    Only this machine can read it unless `address` says otherwise: counters tell what is asked for (see docs).

    Raises:
        ImportError: prometheus_client is not installed.
        OSError: the port is taken; the message names it.
    """
    prometheus = _prometheus()
    try:
        return prometheus.start_http_server(port, addr=address, registry=registry or prometheus.REGISTRY)
    except OSError as error:
        raise OSError(error.errno, f"cannot serve metrics on {address}:{port}: {error.strerror}") from error


def _reused_tokens(segment: SegmentReport) -> int:
    """Repair may choose rows that came from a donor: at least the others of its tokens were reused."""
    held = segment.num_donor_tokens if segment.hit is HitKind.DONOR else segment.num_tokens
    return max(0, held - segment.num_recomputed_tokens)


def short_reason(reason: str) -> str:
    """A fallback's reason as a label value: the error's type, or `unsupported`. Texts would make a series each."""
    head = reason.split(":", 1)[0]
    return head if head.isidentifier() else "unsupported"


class _Families:
    """The metrics of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        p = _prometheus()
        r: dict[str, Any] = {"registry": registry}
        self.hits = p.Counter(
            "kvboost_cache_hits", "Documents taken from the store, or a donor", ["model", "strategy", "kind"], **r
        )
        self.misses = p.Counter("kvboost_cache_misses", "Documents computed in the request", ["model", "strategy"], **r)
        self.recomputed = p.Counter("kvboost_recompute_tokens", "Document tokens recomputed", ["strategy"], **r)
        self.reused = p.Counter("kvboost_reused_tokens", "Tokens taken from the store and not recomputed", **r)
        self.settled = p.Counter("kvboost_settled_tokens", "Tokens recomputed exactly while idle", **r)
        self.fallbacks = p.Counter("kvboost_fallbacks", "Requests served by plain prefill", ["reason"], **r)
        self.refused = p.Counter(
            "kvboost_quant_refused", "Chunks stored unquantised: error too large", ["setting"], **r
        )
        self.decisions = p.Counter("kvboost_load_decisions", "Chunks on disk: loaded or computed", ["choice"], **r)
        self.hit_rate = p.Gauge("kvboost_cache_hit_rate", f"Hits / documents, last {WINDOW} documents", **r)
        self.recompute_ratio = p.Gauge(
            "kvboost_recompute_ratio", f"Recomputed / document tokens, last {WINDOW} requests", **r
        )
        self.psnr = p.Gauge("kvboost_quant_error_psnr", f"Mean PSNR in dB, last {WINDOW} chunks", **r)
        self.ttft = p.Histogram("kvboost_ttft_seconds", "Time to first token", ["path"], buckets=TTFT_BUCKETS, **r)
        self.deviation = p.Histogram(
            "kvboost_deviation", "Deviation of a document at the probe layer", buckets=DEVIATION_BUCKETS, **r
        )
        self.shadow_kl = p.Histogram(
            "kvboost_shadow_kl", "KL in nats from full prefill, per compared answer", buckets=KL_BUCKETS, **r
        )
        self.shadow_agreement = p.Gauge(
            "kvboost_shadow_agreement", f"Tokens on which full prefill agrees, last {WINDOW} compared answers", **r
        )
        # NaN says "nothing yet"; 0 would fire the alert on the hit rate in every idle process.
        for gauge in (self.hit_rate, self.recompute_ratio, self.psnr, self.shadow_agreement):
            gauge.set(float("nan"))
        self.stores = _StoreCollector()
        registry.register(self.stores)


class _StoreCollector:
    """Reads the stores' own counters when metrics are scraped."""

    def __init__(self) -> None:
        self._stores: weakref.WeakSet[Store] = weakref.WeakSet()

    def add(self, store: Store) -> None:
        self._stores.add(store)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {
            "held": GaugeMetricFamily("kvboost_cache_bytes", "Bytes held", labels=["tier"]),
            "evictions": CounterMetricFamily("kvboost_cache_evictions", "Entries removed", labels=["tier", "reason"]),
            "lookups": CounterMetricFamily("kvboost_store_lookups", "Lookups in a tier", labels=["tier", "result"]),
            "rejected": CounterMetricFamily("kvboost_store_rejected", "Found, not used", labels=["tier", "reason"]),
        }
        for (name, *labels), value in self._sums().items():
            families[name].add_metric(labels, value)
        yield from families.values()

    def _sums(self) -> Counter[tuple[str, ...]]:
        sums: Counter[tuple[str, ...]] = Counter()
        for store in list(self._stores):
            try:
                sums.update(_counts_of(store))
            except Exception as error:  # closed, or its catalog cannot be asked: the others' figures stay
                logger.debug("a store is left out of the metrics: %s", error)
        return sums


def _counts_of(store: Store) -> Counter[tuple[str, ...]]:
    counts: Counter[tuple[str, ...]] = Counter()
    for tier, num_bytes in store.bytes_held.items():
        counts["held", tier] += num_bytes
    for tier, stats in store.tier_stats.items():
        counts["lookups", tier, "hit"] += stats.hits
        counts["lookups", tier, "miss"] += stats.misses
        for name, by_reason in (("evictions", stats.evictions), ("rejected", stats.rejected)):
            for reason, n in dict(by_reason).items():
                counts[name, tier, reason] += n
    return counts


_registries: weakref.WeakKeyDictionary[Any, _Families] = weakref.WeakKeyDictionary()
_registries_lock = threading.Lock()


def _families_of(registry: CollectorRegistry | None) -> _Families:
    found = registry if registry is not None else _prometheus().REGISTRY
    with _registries_lock:
        if found not in _registries:
            _registries[found] = _Families(found)
        return _registries[found]


def _prometheus() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise ImportError("metrics need prometheus_client: pip install 'kvboost-rag[metrics]'") from error
    return prometheus_client
