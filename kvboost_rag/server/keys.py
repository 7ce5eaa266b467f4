"""API keys: whose they are, how often and how much they may ask."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvboost_rag.config import ConfigError, check_namespace
from kvboost_rag.server.errors import ApiError

MIN_KEY_CHARS = 16


@dataclass(frozen=True)
class Tenant:
    """Whom a key belongs to. The key itself is not kept, only its digest.

    Attributes:
        name: for logs.
        namespace: whose chunks are found and whose documents are changed.
        requests_per_minute: more are a 429; None: no limit.
        tokens_per_day: of prompts and answers together, since midnight UTC or the server's start; None: no limit.
        admin: may switch reuse off and see metrics and figures of the whole server.
    """

    name: str = "anonymous"
    namespace: str = ""
    requests_per_minute: float | None = None
    tokens_per_day: int | None = None
    admin: bool = False

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        for name in ("requests_per_minute", "tokens_per_day"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
                raise ConfigError(f"{name}={value!r} of key {self.name!r}: expected a number above 0")
        if not isinstance(self.admin, bool):
            raise ConfigError(f"admin={self.admin!r} of key {self.name!r}: expected true or false")


ANYBODY = Tenant(admin=True)
"""Whoever asks a server without keys."""


class Keys:
    """The keys of a server. Empty: anybody may ask.

    Args:
        tenants: by key.
    """

    def __init__(self, tenants: Mapping[str, Tenant] | None = None) -> None:
        self._tenants = [(_digest(key), tenant) for key, tenant in (tenants or {}).items()]

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant_of(self, authorization: str | None) -> Tenant:
        """Who sends a header `Authorization: Bearer KEY`. Compares with every key, in constant time.

        Raises:
            ApiError: no key, or an unknown one.
        """
        if not self._tenants:
            return ANYBODY
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "no API key: send it as 'Authorization: Bearer KEY'", code="missing_api_key")
        asked, found = _digest(key.strip()), None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, asked):
                found = tenant
        if found is None:
            raise ApiError(401, "the API key is not known here", code="invalid_api_key")
        return found

    @classmethod
    def read(cls, file: Path | None, environ: Mapping[str, str]) -> Keys:
        """From a file (JSON: `{"keys": [{"key": …, "name": …, "namespace": …}]}`) and `KVBOOST_API_KEY` (admin).

        Raises:
            ConfigError: a file that holds no keys; the message never quotes one.
        """
        tenants: dict[str, Tenant] = {}
        if file is not None:
            tenants |= dict(_read_file(file))
        if single := environ.get("KVBOOST_API_KEY", "").strip():
            tenants[_checked_key(single, "KVBOOST_API_KEY")] = Tenant("environment", admin=True)
        return cls(tenants)


class Meter:
    """Counts what each tenant asked for. Thread-safe.

    Args:
        now: seconds since the epoch.
    """

    def __init__(self, now: Any = time.time) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._allowance: dict[str, tuple[float, float]] = {}
        self._spent: dict[tuple[str, int], int] = {}

    def admit(self, tenant: Tenant) -> None:
        """One more request.

        Raises:
            ApiError: too many in a short time, or the day's budget is spent; says when to ask again.
        """
        now = self._now()
        with self._lock:
            spent = self._spent.get((tenant.name, int(now // 86400)), 0)
            if tenant.tokens_per_day is not None and spent >= tenant.tokens_per_day:
                wait = 86400 - now % 86400
                raise ApiError(429, "the day's tokens of this key are spent", None, "insufficient_quota", wait)
            if tenant.requests_per_minute is None:
                return
            rate, burst = tenant.requests_per_minute / 60, max(1.0, tenant.requests_per_minute)
            left, at = self._allowance.get(tenant.name, (burst, now))
            left = min(burst, left + (now - at) * rate)
            if left < 1:
                raise ApiError(429, "too many requests with this key", None, "rate_limit_exceeded", (1 - left) / rate)
            self._allowance[tenant.name] = (left - 1, now)

    def spend(self, tenant: Tenant, num_tokens: int) -> None:
        """Tokens of a request that is over."""
        day = int(self._now() // 86400)
        with self._lock:
            for key in [key for key in self._spent if key[1] != day]:
                del self._spent[key]
            self._spent[tenant.name, day] = self._spent.get((tenant.name, day), 0) + num_tokens


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _checked_key(key: Any, where: str) -> str:
    if not isinstance(key, str) or len(key.strip()) < MIN_KEY_CHARS:
        raise ConfigError(f"{where}: a key needs {MIN_KEY_CHARS} characters or more (openssl rand -hex 32)")
    return key.strip()


def _read_file(file: Path) -> Iterable[tuple[str, Tenant]]:
    try:
        entries = json.loads(file.read_text())["keys"]
        known = {f.name for f in fields(Tenant)}
        for number, entry in enumerate(entries):
            where = f"key {number} of {file}"
            if unknown := sorted(set(entry) - known - {"key"}):
                raise ConfigError(f"{where}: unknown field {', '.join(unknown)}; known: {', '.join(sorted(known))}")
            named = {"name": f"key-{number}"} | {k: v for k, v in entry.items() if k != "key"}
            yield _checked_key(entry.get("key"), where), Tenant(**named)
    except OSError as error:
        raise ConfigError(f"cannot read the keys of {file}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
        raise ConfigError(f'{file} holds no keys: expected {{"keys": [{{"key": "…", "namespace": "…"}}]}}') from None
