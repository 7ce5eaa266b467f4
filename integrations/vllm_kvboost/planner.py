"""The scheduler's side: which requests are given what."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvboost_rag.chunks.token_search import TokenRun
from vllm_kvboost.metadata import Load, Loads
from vllm_kvboost.policy import Access
from vllm_kvboost.source import ChunkSource, Reading

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

OFF = "KVBOOST_DISABLE"


@dataclass
class _Plan:
    """What one request may be given; `reading` is None once it is given nothing, for `why`."""

    namespace: str = ""
    runs: tuple[TokenRun, ...] = ()
    reading: Reading | None = None
    why: str = ""
    claimed_from: int = 0

    @property
    def end(self) -> int:
        return self.runs[-1].end if self.runs else 0


class Planner:
    """Claims what is stored, for requests that may have it. Belongs to the scheduler's process and thread.

    A claim is the span from the prompt's start to the end of its last chunk. Nothing is claimed before it has been read
    and checked, so that what is claimed is in memory; while it is being read the request waits in vLLM's queue, up to a
    deadline. Where one chunk is missing vLLM computes the whole prompt: an answer is either full prefill's or that of
    all chunks, never something between. A request whose claim failed is never claimed for again: repeating it would go
    on for ever.
    """

    def __init__(self, source: ChunkSource, access: Access, deadline_ms: float, compute_last: int = 0) -> None:
        self._source, self._access, self._deadline_ms = source, access, deadline_ms
        self._compute_last = compute_last
        self._plans: dict[str, _Plan] = {}
        self._loads: list[Load] = []
        self.counts: Counter[str] = Counter()

    def matched(self, request: Request, num_computed: int) -> int | None:
        """Tokens after the `num_computed` first ones that can be loaded; None: ask again, they are being read."""
        plan = self._plans.get(request.request_id)
        if plan is None:
            plan = self._plans[request.request_id] = self._plan(request)
        if plan.reading is None:
            return 0
        if not plan.reading.is_done:
            if plan.reading.waited_ms < self._deadline_ms:
                return None
            self._drop(plan, "slow")
            return 0
        if missing := {run.key for run in plan.runs} - set(plan.reading.entries()):
            self.counts["chunks_missing"] += len(missing)
            self._drop(plan, "missing")
            return 0
        plan.claimed_from = num_computed
        return max(0, min(plan.end, request.num_prompt_tokens - 1) - num_computed)

    def allocated(self, request: Request, block_ids: Sequence[int], num_tokens: int) -> None:
        """vLLM has made room for a claim."""
        plan = self._plans.get(request.request_id)
        if not num_tokens or plan is None:
            return
        start, end = plan.claimed_from, plan.claimed_from + num_tokens
        ids = tuple((request.prompt_token_ids or [])[:end])
        self._loads.append(Load(request.request_id, plan.namespace, ids, plan.runs, start, end, tuple(block_ids)))
        self.counts["claimed"] += 1
        self.counts["claimed_tokens"] += num_tokens

    def take_loads(self) -> Loads:
        """What the next forward needs; taken once."""
        loads, self._loads = Loads(self._loads), []
        return loads

    def failed(self, request_ids: set[str]) -> None:
        """A worker could not load what was claimed; vLLM computes it."""
        for request_id in request_ids:
            if (plan := self._plans.get(request_id)) is not None:
                self._drop(plan, "failed")

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """The request is over, however it ended; what the client is told about it."""
        plan = self._plans.pop(request_id, None)
        if plan is None:
            return None
        if plan.reading is not None:
            plan.reading.release()
        tokens = sum(run.length for run in plan.runs)
        return {"kvboost": {"chunk_tokens": tokens, "chunks": len(plan.runs), "not_used": plan.why or None}}

    def _plan(self, request: Request) -> _Plan:
        namespace, why = self._access.namespace_of(request.cache_salt)
        if os.environ.get(OFF, "").strip().lower() in ("1", "true", "yes", "on"):
            why = "disabled"
        elif (request.kv_transfer_params or {}).get("kvboost") is False:
            why = "request"
        if why or namespace is None:
            self.counts[why] += 1
            return _Plan(why=why)
        try:
            runs = self._source.find(request.prompt_token_ids or (), namespace)
        except Exception as error:  # the catalog cannot be asked: vLLM computes the prompt
            logger.warning("kvboost: chunks could not be looked up: %s", error, exc_info=error)
            runs, why = (), "lookup_failed"
        runs = runs[: max(0, len(runs) - self._compute_last)]
        if not runs:
            self.counts[why or "no_chunks"] += 1
            return _Plan(why=why or "no_chunks")
        return _Plan(namespace, runs, self._source.read_ahead(run.key for run in runs))

    def _drop(self, plan: _Plan, why: str) -> None:
        self.counts[why] += 1
        if plan.reading is not None:
            plan.reading.release()
        plan.reading, plan.runs, plan.why = None, (), why
