"""Document KV for vLLM: a connector for its KV-transfer interface that loads stored chunks wherever they stand.

    KVTransferConfig(kv_connector="KVBoostConnector", kv_connector_module_path="vllm_kvboost", kv_role="kv_both",
                     kv_load_failure_policy="recompute", kv_connector_extra_config={"store": "./kv"})

Importing this package does not import vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_kvboost.policy import cache_salt

if TYPE_CHECKING:
    from vllm_kvboost.connector import KVBoostConnector
    from vllm_kvboost.middleware import BlendByDefault

_LAZY = {"KVBoostConnector": "connector", "BlendByDefault": "middleware"}

__all__ = ["BlendByDefault", "KVBoostConnector", "cache_salt"]


if not TYPE_CHECKING:  # a type checker would take any name for there

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
