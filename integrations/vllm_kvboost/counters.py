"""What the connector counts, in vLLM's log and on its Prometheus endpoint."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

PREFIX = "kvboost"
TOTALS = {
    "claimed": ("requests", "Requests that were given chunk KV"),
    "claimed_tokens": ("claimed_tokens", "Prompt tokens whose KV was loaded, gaps included"),
    "gap_tokens": ("gap_tokens", "Of the claimed tokens those computed between chunks"),
    "load_ms": ("load_milliseconds", "Time to assemble and write KV"),
    "failed": ("failures", "Claims that could not be loaded and were computed by vLLM"),
    "chunks_missing": ("chunks_missing", "Chunks that were found by their ids and not in the store"),
}
"""Counts with a metric of their own; every other one is a reason why a request was given nothing."""


class ConnectorStats(KVConnectorStats):
    """Counts since the last look."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return ConnectorStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ConnectorMetrics(KVConnectorPromMetrics):
    """`kvboost_*` counters by engine; requests that were given nothing by reason."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._totals = {key: self._make(f"{PREFIX}_{name}_total", text, []) for key, (name, text) in TOTALS.items()}
        self._skipped = self._make(f"{PREFIX}_skipped_total", "Requests that were given nothing", ["reason"])

    def _make(self, name: str, text: str, labels: list[str]) -> Any:
        return self._counter_cls(name=name, documentation=text, labelnames=[*self._labelnames, *labels])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            if key in self._totals:
                self._totals[key].labels(*labels).inc(value)
            else:
                self._skipped.labels(*labels, key).inc(value)
