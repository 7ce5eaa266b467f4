"""`kv_connector_extra_config`, checked before vLLM has started anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvboost_rag.config import check_namespace


@dataclass(frozen=True)
class Settings:
    """What an operator may set.

    Attributes:
        store: folder (or anything else that `stores.open_store` takes as text) that `kvboost-rag warm` has filled.
        namespace: whose chunks; the default for `namespaces`.
        namespaces: those that requests may name in their salts. A client chooses its salt: where clients are not
            trusted with each other's documents, let the gateway in front set it.
        memory_bytes: budget of the memory tier, which holds the chunks of requests in flight; None: the store's own.
        min_tokens: shortest run of a chunk's ids that is looked for.
        deadline_ms: a request whose chunks have not been read after so long is computed by vLLM.
        compute_last: so many chunks at the prompt's end are left to vLLM, which computes them over the KV of all before
            them: closer to full prefill, for their share of the time.
        device: where gaps between chunks are computed and chunks are put in place.
    """

    store: str
    namespace: str = ""
    namespaces: tuple[str, ...] = ()
    memory_bytes: int | None = None
    min_tokens: int = 16
    deadline_ms: float = 2000.0
    compute_last: int = 0
    device: str = "cpu"

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """From `kv_connector_extra_config`.

        Raises:
            ValueError: an unknown, missing or unusable setting, by name.
        """
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(extra) - set(known)):
            raise ValueError(f"kv_connector_extra_config: unknown {', '.join(unknown)}; known: {', '.join(known)}")
        if not isinstance(extra.get("store"), str) or not extra["store"]:
            raise ValueError('kv_connector_extra_config: "store" must name the folder that kvboost-rag warm has filled')
        given = {**extra, "namespaces": tuple(extra.get("namespaces") or (extra.get("namespace", ""),))}
        for namespace in (given.get("namespace", ""), *given["namespaces"]):
            check_namespace(namespace)
        for name, least in (("min_tokens", 8), ("deadline_ms", 0), ("memory_bytes", 1), ("compute_last", 0)):
            value = given.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < least):
                raise ValueError(f"kv_connector_extra_config: {name}={value!r}: expected a number, {least} or more")
        return cls(**given)
