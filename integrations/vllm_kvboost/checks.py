"""What the connector refuses when vLLM starts, each by its name: later it could only fail request by request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvboost.reference import NotServable

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def refuse_what_cannot_be_served(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises:
    NotServable: a set-up in which stored KV cannot be written, or a failure would not be mended.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        raise NotServable(
            f"kv_load_failure_policy={transfer.kv_load_failure_policy!r}: a chunk that vanished would fail the "
            'request; set kv_load_failure_policy="recompute"'
        )
    if vllm_config.model_config.use_mla:
        raise NotServable("latent attention (MLA): vLLM caches it in a layout that has no keys and values to write")
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise NotServable("pipeline parallelism: each stage would need the layers of the others to compute gaps")
    if len(kv_cache_config.kv_cache_groups) > 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups})
        raise NotServable(f"more than one group of KV caches ({', '.join(kinds)})")
    if vllm_config.lora_config is not None:
        raise NotServable("LoRA in vLLM: stored KV is that of the base model")
