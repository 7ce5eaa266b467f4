"""What the scheduler's side tells the worker's, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvboost_rag.chunks.token_search import TokenRun


@dataclass(frozen=True)
class Load:
    """KV of positions `[start, end)` of one request, to be written into its blocks.

    Attributes:
        token_ids: the prompt's ids up to `end`.
        runs: of known chunks, ascending; what lies between them is computed by the worker.
        block_ids: of the request, from its first position on.
    """

    request_id: str
    namespace: str
    token_ids: tuple[int, ...]
    runs: tuple[TokenRun, ...]
    start: int
    end: int
    block_ids: tuple[int, ...]

    def blocks(self, block_size: int) -> set[int]:
        """Those that are left without KV where the load fails."""
        return set(self.block_ids[self.start // block_size : -(-self.end // block_size)])


@dataclass
class Loads(KVConnectorMetadata):
    """Everything to be loaded before one forward."""

    loads: list[Load] = field(default_factory=list)


@dataclass
class Failures(KVConnectorWorkerMetadata):
    """Requests whose KV could not be loaded, by any rank."""

    request_ids: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Failures)
        return Failures(self.request_ids | other.request_ids)
