"""What the server counts, by canary population: label `enabled` and `strategy`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from kvboost_rag.observe.metrics import TTFT_BUCKETS
from kvboost_rag.server.reuse_choice import ReuseChoice

_POPULATION = ["enabled", "strategy"]


class Telemetry:
    """Prometheus metrics of one server.

    Args:
        registry: prometheus_client's; one a server.
    """

    def __init__(self, registry: Any) -> None:
        import prometheus_client as p

        r = {"registry": registry}
        self.registry = registry
        self.requests = p.Counter(
            "kvboost_requests", "Requests by how they ended", ["route", "status", *_POPULATION], **r
        )
        self.ttft = p.Histogram(
            "kvboost_request_ttft_seconds",
            "From the request's arrival to its first token",
            _POPULATION,
            buckets=TTFT_BUCKETS,
            **r,
        )
        self.tokens = p.Counter("kvboost_request_tokens", "Tokens", ["kind", *_POPULATION], **r)
        self.waiting = p.Gauge("kvboost_requests_waiting", "Requests without a first token yet", **r)
        self.running = p.Gauge("kvboost_requests_running", "Requests whose answer is being written", **r)

    def text(self) -> bytes:
        """In Prometheus' format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


@dataclass
class RequestWatch:
    """One request, from arrival to end. Use as a context manager; counts it once."""

    telemetry: Telemetry
    route: str
    choice: ReuseChoice
    started: float = field(default_factory=time.perf_counter)
    _begun: bool = False
    status: int = 200

    def __enter__(self) -> RequestWatch:
        self.telemetry.waiting.inc()
        return self

    def first_token(self) -> None:
        """May be called again."""
        if not self._begun:
            self._begun = True
            self.telemetry.waiting.dec()
            self.telemetry.running.inc()
            self.telemetry.ttft.labels(**self._population).observe(time.perf_counter() - self.started)

    @property
    def begun(self) -> bool:
        return self._begun

    def count_tokens(self, usage: dict[str, Any]) -> None:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        for kind, count in (
            ("prompt", usage["prompt_tokens"]),
            ("answer", usage["completion_tokens"]),
            ("cached", cached),
        ):
            self.telemetry.tokens.labels(kind=kind, **self._population).inc(count)

    def __exit__(self, *exc: object) -> None:
        (self.telemetry.running if self._begun else self.telemetry.waiting).dec()
        self.telemetry.requests.labels(route=self.route, status=str(self.status), **self._population).inc()

    @property
    def _population(self) -> dict[str, str]:
        return {"enabled": str(self.choice.enabled).lower(), "strategy": self.choice.strategy}
