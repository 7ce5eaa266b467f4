"""vLLM's interface as the connector was built against it: a newer vLLM that changes it says here what changed."""

from __future__ import annotations

import inspect

import pytest

CHECKED_VERSIONS = ("0.32",)

SIGNATURES = {
    "__init__": ("self", "vllm_config", "role", "kv_cache_config"),
    "get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    "update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("self", "scheduler_output"),
    "update_connector_output": ("self", "connector_output"),
    "request_finished": ("self", "request", "block_ids"),
    "start_load_kv": ("self", "forward_context", "kwargs"),
    "wait_for_layer_load": ("self", "layer_name"),
    "save_kv_layer": ("self", "layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "wait_for_save": ("self",),
    "get_block_ids_with_load_errors": ("self",),
    "build_connector_worker_meta": ("self",),
    "get_kv_connector_stats": ("self",),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
}
"""Parameters of the methods that the connector fills."""


def test_the_methods_that_vllm_calls_are_called_as_they_were() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as Base

    found = {name: tuple(inspect.signature(getattr(Base, name)).parameters) for name in SIGNATURES}
    assert found == SIGNATURES


def test_nothing_new_must_be_filled() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as Base

    from vllm_kvboost import KVBoostConnector

    assert Base.__abstractmethods__ <= SIGNATURES.keys()
    assert not inspect.isabstract(KVBoostConnector)


def test_attention_backends_write_as_they_did() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    method = inspect.signature(CPUAttentionBackendImpl.do_kv_cache_update)
    assert tuple(method.parameters) == ("self", "layer", "key", "value", "kv_cache", "slot_mapping")


def test_the_version_is_one_that_was_checked() -> None:
    import vllm

    if not vllm.__version__.startswith(CHECKED_VERSIONS):
        pytest.skip(f"vLLM {vllm.__version__} was not checked; the tests beside this one say what has changed")
