"""Valkey and Redis, one server or a cluster. Which node holds what is the cluster's business (its 16,384 slots)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from kvboost_rag.stores.remote.backend import CONNECTIONS, TIMEOUT_S, Backend, RemoteError

PREFIX = "kvboost:"
CLUSTER = "+cluster"

T = TypeVar("T")


class RedisBackend(Backend):
    """Values under `kvboost:{KEY}:NAME`; the braces are a hash tag, so that a chunk's values share a slot.

    `kvboost:{KEY}` is the set of the key's names, filled before the values are written: what a writer that died has
    left can be found and deleted.

    Args:
        url: `redis://`, `rediss://` (TLS), `redis+cluster://` or `rediss+cluster://`, as redis-py takes them otherwise.

    Raises:
        ImportError: redis is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ImportError("a store in Valkey or Redis needs redis-py: pip install 'kvboost-rag[remote]'") from error
        from redis.exceptions import RedisClusterException

        self._errors: tuple[type[Exception], ...] = (redis.RedisError, RedisClusterException, OSError)
        # Attempts are counted and spaced in one place, `Guard`.
        options: dict[str, Any] = {
            "socket_timeout": TIMEOUT_S,
            "socket_connect_timeout": TIMEOUT_S,
            "retry": Retry(NoBackoff(), 0),
        }
        plain, is_cluster = url.replace(CLUSTER, "", 1), CLUSTER in url.split("://")[0]
        self._made: Any = None
        self._lock = threading.Lock()
        self._connect: Callable[[], Any]
        if is_cluster:  # asks for its slots at once, so it is made when first used
            options["retry"] = Retry(NoBackoff(), 1)  # an attempt after the slots were learnt anew
            self._connect = partial(redis.RedisCluster.from_url, plain, max_connections=CONNECTIONS, **options)
        else:
            most = {"max_connections": CONNECTIONS, "timeout": TIMEOUT_S}
            pool = redis.BlockingConnectionPool.from_url(plain, **most, **options)
            self._connect = partial(redis.Redis, connection_pool=pool)

    @property
    def _client(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._connect()
            return self._made

    def get(self, key: str, names: Sequence[str]) -> list[bytes | None]:
        return self._run(lambda: self._client.mget([_name(key, name) for name in names])) if names else []

    def create(self, key: str, name: str, data: bytes) -> bool:
        def write() -> bool:
            self._client.sadd(_set(key), name)
            return bool(self._client.set(_name(key, name), data, nx=True))

        return self._run(write)

    def names(self, key: str) -> list[str]:
        return sorted(name.decode() for name in self._run(lambda: self._client.smembers(_set(key))))

    def delete(self, key: str) -> bool:
        names = self.names(key)
        # The set last: until it is gone the others can be found.
        removed = self._run(lambda: self._client.delete(*(_name(key, name) for name in names))) if names else 0
        return bool(self._run(lambda: self._client.delete(_set(key))) or removed)

    def remove(self, key: str, name: str) -> None:
        self._run(lambda: self._client.delete(_name(key, name)))
        self._run(lambda: self._client.srem(_set(key), name))

    def place(self, key: str) -> str:
        # Not asked before the first connection: that would wait for the cluster's slots.
        if self._made is None or not hasattr(self._made, "get_node_from_key"):
            return ""
        try:
            return str(self._made.get_node_from_key(_set(key)).name)
        except Exception:  # slots are being learnt anew: whatever is missing then, the call itself will say
            return ""

    def keys(self) -> Iterator[str]:
        found = self._run(lambda: list(self._client.scan_iter(match=f"{PREFIX}{{*}}", count=1000)))
        return (name.decode()[len(PREFIX) + 1 : -1] for name in found)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def _run(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except self._errors as error:
            raise RemoteError(f"{type(error).__name__}: {error}") from error


def _set(key: str) -> str:
    return f"{PREFIX}{{{key}}}"


def _name(key: str, name: str) -> str:
    return f"{PREFIX}{{{key}}}:{name}"
