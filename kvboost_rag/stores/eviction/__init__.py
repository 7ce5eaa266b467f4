"""Eviction policies: one a file, one line in `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable

from kvboost_rag.stores.eviction.base import EntryUse, EvictionPolicy
from kvboost_rag.stores.eviction.fifo import FIFO
from kvboost_rag.stores.eviction.importance import Importance
from kvboost_rag.stores.eviction.lru import LRU
from kvboost_rag.stores.eviction.ttl import TTL

__all__ = ["FIFO", "LRU", "POLICIES", "TTL", "EntryUse", "EvictionPolicy", "Importance", "make_policy"]

POLICIES: dict[str, Callable[..., EvictionPolicy]] = {"importance": Importance, "lru": LRU, "fifo": FIFO, "ttl": TTL}


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """A policy by name (`importance`, `lru`, `fifo`, or `ttl:SECONDS`), or the one given, which must be unused.

    Raises:
        ValueError: unknown name, or a `ttl` without a number of seconds; the message lists what is accepted.
    """
    if isinstance(policy, EvictionPolicy):
        if policy.entries:
            raise ValueError("an eviction policy serves one tier; make another for the second tier")
        return policy
    name, _, argument = policy.partition(":")
    if name == "ttl":
        try:
            return TTL(float(argument))
        except ValueError:
            raise ValueError(f"eviction policy {policy!r}: expected ttl:SECONDS, for example ttl:3600") from None
    if name not in POLICIES or argument:
        known = ", ".join(n if n != "ttl" else "ttl:SECONDS" for n in POLICIES)
        raise ValueError(f"unknown eviction policy {policy!r}; known: {known}")
    return POLICIES[name]()
