"""Settings of the server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from kvboost_rag.config import ConfigError
from kvboost_rag.server.keys import Keys


@dataclass(frozen=True)
class ServerSettings:
    """How the server serves.

    Attributes:
        host, port: where it listens.
        model_name: the id clients ask for; None: the engine's name.
        keys: who may ask. None of them is only taken on a loopback address, or with `allow_no_key`.
        allow_no_key: serve anybody on any address.
        max_requests: requests at once, those that wait for their first token included; one more is a 429.
        deadline_s: an answer that takes longer ends with an error; a client may ask for less.
        drain_s: after SIGTERM, time for running answers to end.
        max_body_bytes: a larger body is a 413.
        answer_tokens: length of an answer whose request does not say.
        enabled: whether reuse is on for requests that do not say (`x-kvboost-enabled`).
        chunk_tokens: size of the chunks that documents are cut into.
        open_metrics: `/metrics` without a key, where there are keys.
        switch_file: while this file says `off`, every request is served by plain prefill (a mounted ConfigMap).

    Raises:
        ConfigError: settings that no server should run with.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    keys: Keys = field(default_factory=Keys)
    allow_no_key: bool = False
    max_requests: int = 64
    deadline_s: float = 600.0
    drain_s: float = 60.0
    max_body_bytes: int = 8 * 2**20
    answer_tokens: int = 1024
    enabled: bool = True
    chunk_tokens: int = 256
    open_metrics: bool = False
    switch_file: Path | None = None

    def __post_init__(self) -> None:
        for name in ("max_requests", "deadline_s", "drain_s", "max_body_bytes", "answer_tokens"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected a number above 0")
        if not self.keys and not self.allow_no_key and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} can be reached from elsewhere and there is no API key: give keys (--keys-file, "
                "KVBOOST_API_KEY), listen on 127.0.0.1, or say --allow-no-key where something in front checks callers"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; a name other than `localhost` may be anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
