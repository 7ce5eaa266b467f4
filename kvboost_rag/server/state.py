"""What the routes of one server share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import Request

from kvboost_rag.engine import KVBoost
from kvboost_rag.models.adapters import available_adapters
from kvboost_rag.server.document_jobs import DocumentJobs
from kvboost_rag.server.errors import ApiError
from kvboost_rag.server.keys import Meter, Tenant
from kvboost_rag.server.settings import ServerSettings
from kvboost_rag.server.telemetry import Telemetry


class Gate:
    """Counts requests that are inside; one too many is turned away."""

    def __init__(self, limit: int) -> None:
        self._limit, self._inside, self._lock = limit, 0, threading.Lock()

    @property
    def inside(self) -> int:
        return self._inside

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """Let `count` answers in.

        Raises:
            ApiError: there is no room for them.
        """
        with self._lock:
            if count > self._limit:
                raise ApiError(400, f"{count} answers at once; at most {self._limit}", "n", "invalid_value")
            if self._inside + count > self._limit:
                raise ApiError(429, "the server is busy", code="queue_full", retry_after_s=1 + self._inside // 8)
            self._inside += count
        try:
            yield
        finally:
            with self._lock:
                self._inside -= count


@dataclass
class ServerState:
    """One server.

    Attributes:
        draining: it was told to stop: running answers end, new ones are refused.
    """

    engine: KVBoost
    settings: ServerSettings
    telemetry: Telemetry
    jobs: DocumentJobs
    gate: Gate
    meter: Meter = field(default_factory=Meter)
    draining: bool = False

    @property
    def model_name(self) -> str:
        return self.settings.model_name or self.engine.name

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The adapters of the model, each of which is served as a model of its own."""
        return tuple(name for name in available_adapters(self.engine.model) if name != self.model_name)

    def adapter_of(self, model: str) -> str | None:
        """The adapter that a model's name asks for; None for the model as it stands.

        Raises:
            ApiError: it is neither the model's name nor an adapter's.
        """
        if model == self.model_name:
            return None
        names = self.adapter_names
        if model not in names:
            served = ", ".join(map(repr, (self.model_name, *names)))
            raise ApiError(404, f"no model {model!r} here; served is {served}", "model", "model_not_found")
        return model


def state_of(request: Request) -> ServerState:
    """The server that a request came to."""
    return cast(ServerState, request.app.state.kvboost)


def tenant_of(request: Request) -> Tenant:
    """Who asks. Raises `ApiError` where the key is missing or wrong."""
    return state_of(request).settings.keys.tenant_of(request.headers.get("authorization"))


def admin_of(request: Request) -> Tenant:
    """Who asks, for what concerns the whole server. Raises `ApiError` for keys that may not."""
    tenant = tenant_of(request)
    if not tenant.admin:
        raise ApiError(403, "this key may not do that: it needs admin", code="not_admin")
    return tenant


async def read_body(request: Request) -> bytes:
    """The body, up to the limit.

    Raises:
        ApiError: it is longer.
    """
    limit = state_of(request).settings.max_body_bytes
    declared = request.headers.get("content-length", "0")
    size, parts = int(declared) if declared.isdecimal() else 0, []
    if size <= limit:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                break
            parts.append(part)
    if size > limit:
        raise ApiError(413, f"the body is longer than {limit:,} bytes", code="request_too_large")
    return b"".join(parts)
