"""The class that vLLM loads: one object in the scheduler, one in each worker."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from kvboost_rag.stores import Store, open_store
from vllm_kvboost.checks import refuse_what_cannot_be_served
from vllm_kvboost.counters import ConnectorMetrics, ConnectorStats
from vllm_kvboost.metadata import Failures, Loads
from vllm_kvboost.planner import Planner
from vllm_kvboost.policy import Access
from vllm_kvboost.reference import Reference, open_reference
from vllm_kvboost.settings import Settings
from vllm_kvboost.source import ChunkSource
from vllm_kvboost.writer import Writer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@lru_cache(maxsize=4)
def shared_store(spec: str, memory_bytes: int | None) -> Store:
    """One store a process: what the scheduler's side has read ahead is in memory for the worker's side."""
    return open_store(spec, memory_bytes=memory_bytes)


class KVBoostConnector(KVConnectorBase_V1):
    """Loads stored documents into vLLM's paged cache, wherever they stand in a prompt.

    Loads are synchronous: chunks are read and checked while the request waits in vLLM's queue, and written in the step
    that uses them. vLLM's hybrid cache manager is off with this connector (it does not declare support), so that models
    with sliding windows keep the whole prompt in one group.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = Settings.of(self._kv_transfer_config.kv_connector_extra_config or {})
        refuse_what_cannot_be_served(vllm_config, kv_cache_config)
        self._reference = self._open_reference(vllm_config)
        store = shared_store(self.settings.store, self.settings.memory_bytes)
        self._source = ChunkSource(store, self._reference.fingerprint, self.settings.min_tokens)
        self._source.refuse_foreign(self.settings.store)
        self._counts: Counter[str] = Counter()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        if role is KVConnectorRole.SCHEDULER:
            exact_is_shared = bool(vllm_config.cache_config.enable_prefix_caching)
            access = Access(self.settings.namespaces, None if exact_is_shared else self.settings.namespace)
            self._planner = Planner(self._source, access, self.settings.deadline_ms, self.settings.compute_last)
        else:
            parallel = vllm_config.parallel_config
            rank = (parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size)
            self._writer = Writer(self._source, self._reference, vllm_config.cache_config.block_size, rank)

    def _open_reference(self, vllm_config: VllmConfig) -> Reference:
        model = vllm_config.model_config
        return open_reference(
            str(model.model), str(model.tokenizer or model.model), model.revision, model.dtype, self.settings.device
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed to anybody who would wait for it."""
        return False

    def shutdown(self) -> None:
        """vLLM stops. The store stays open for the other side in this process; nothing of it is unwritten."""
        self._source.close()

    # What vLLM's scheduler calls

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._planner.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._planner.allocated(request, blocks.get_block_ids()[0] if num_external_tokens else (), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Loads:
        return self._planner.take_loads()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, Failures):
            self._planner.failed(meta.request_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._planner.finished(request.request_id)

    # What vLLM's workers call

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        layers = attention_layers(forward_context.no_compile_layers) if metadata.loads else {}
        for load in metadata.loads:
            started = time.perf_counter()
            try:
                self._counts["gap_tokens"] += self._writer.load(load, layers)
            except Exception as error:
                logger.warning(
                    "kvboost: stored KV could not be loaded, vLLM computes the prompt: %s", error, exc_info=error
                )
                self._failed_blocks |= load.blocks(self._writer.block_size)
                self._failed_requests.add(load.request_id)
                continue
            self._counts["load_ms"] += round((time.perf_counter() - started) * 1000)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is written before the forward begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is taken from vLLM's cache: chunks are stored by `kvboost-rag warm`."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> Failures | None:
        failed, self._failed_requests = self._failed_requests, set()
        return Failures(failed) if failed else None

    # Counters

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        counts = self._planner.counts if self.role is KVConnectorRole.SCHEDULER else self._counts
        if not counts:
            return None
        stats = ConnectorStats(data=dict(counts))
        counts.clear()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorMetrics:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def attention_layers(layers: Mapping[str, Any]) -> dict[int, Any]:
    """vLLM's attention layers with a cache of their own, by decoder layer index."""
    found = {}
    for name, layer in layers.items():
        number = re.search(r"\.layers\.(\d+)\.", name)
        if number is not None and hasattr(getattr(layer, "impl", None), "do_kv_cache_update"):
            found[int(number[1])] = layer
    return dict(sorted(found.items()))
