"""A remote store that loses patience soon."""

from __future__ import annotations

from kvboost_rag.stores.remote.guard import Guard
from kvboost_rag.stores.remote.objects import ObjectBackend
from kvboost_rag.stores.remote.redis import RedisBackend
from kvboost_rag.stores.remote.store import RemoteStore

QUICK = {"attempts": 2, "pause_s": 0.01, "failures": 2, "closed_s": 0.3}


def connect(url: str, **options: object) -> RemoteStore:
    backend = RedisBackend(url) if url.startswith("redis") else ObjectBackend(url)
    return RemoteStore(backend, guard=Guard(**QUICK), **options)
