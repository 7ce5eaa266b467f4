"""Documents on their way into the store: jobs, one at a time, with progress."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvboost_rag.engine import KVBoost
from kvboost_rag.indexing.chunking import FixedChunker
from kvboost_rag.indexing.source_texts import SourceTexts
from kvboost_rag.indexing.warm import WarmProgress
from kvboost_rag.server.bodies import DocumentBody
from kvboost_rag.server.errors import ApiError, as_api_error, refused

logger = logging.getLogger(__name__)

MAX_FINISHED = 1000
"""Jobs that are over and still known."""
MAX_PENDING = 32


@dataclass
class DocumentJob:
    """One call of `POST /v1/documents`. Written by the job's thread only."""

    namespace: str
    num_documents: int
    id: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex[:16]}")
    created: int = field(default_factory=lambda: int(time.time()))
    status: str = "queued"
    num_chunks_done: int = 0
    num_chunks: int = 0
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    finished: threading.Event = field(default_factory=threading.Event)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "document.job",
            "created": self.created,
            "status": self.status,
            "documents": self.num_documents,
            "chunks_done": self.num_chunks_done,
            "chunks": self.num_chunks,
            "result": self.result,
            "error": self.error,
        }


class DocumentJobs:
    """Indexes documents in a thread of its own; the engine takes requests in between. Thread-safe."""

    def __init__(self, engine: KVBoost, chunk_tokens: int) -> None:
        self._engine = engine
        self._chunker = FixedChunker(engine.tokens.count, chunk_tokens=chunk_tokens)
        self._jobs: OrderedDict[str, DocumentJob] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvboost-documents")

    def submit(self, documents: list[DocumentBody], namespace: str) -> DocumentJob:
        """Queue documents; each replaces what its id had.

        Raises:
            ApiError: a document that cannot be indexed, or too many jobs are waiting.
        """
        sources = {d.id: d for d in documents}
        if len(sources) < len(documents):
            raise refused("documents", "an id occurs twice", "invalid_value")
        for document in documents:
            if (document.text is None) == (document.chunks is None):
                raise refused("documents", f"{document.id!r} needs either text or chunks", "invalid_value")
        job = DocumentJob(namespace, len(sources))
        with self._lock:
            if sum(not j.finished.is_set() for j in self._jobs.values()) >= MAX_PENDING:
                raise ApiError(429, "too many jobs are waiting", code="queue_full", retry_after_s=10)
            self._jobs[job.id] = job
            done = [j.id for j in self._jobs.values() if j.finished.is_set()]
            for old in done[: max(0, len(done) - MAX_FINISHED)]:
                del self._jobs[old]
        self._thread.submit(self._run, job, sources)
        return job

    def get(self, job_id: str, namespace: str) -> DocumentJob:
        """Raises `ApiError` where the namespace has no such job."""
        job = self._jobs.get(job_id)
        if job is None or job.namespace != namespace:
            raise ApiError(404, f"no job {job_id!r}", code="job_not_found")
        return job

    def close(self) -> None:
        """Drop what is queued and wait for the job that runs."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: DocumentJob, documents: Mapping[str, DocumentBody]) -> None:
        job.status = "running"

        def show(progress: WarmProgress) -> None:
            job.num_chunks_done, job.num_chunks = progress.num_done, progress.num_chunks

        try:
            ready = {key: SourceTexts(self._chunks(document)) for key, document in documents.items()}
            report = self._engine.index.add_many(ready, namespace=job.namespace, progress=show)
            job.num_chunks = job.num_chunks_done = report.warm.num_chunks
            job.result = {
                "chunks_added": report.num_added,
                "chunks_kept": report.num_kept,
                "chunks_removed": report.num_removed,
                "chunks_encoded": report.warm.num_encoded,
                "bytes_stored": report.warm.num_bytes,
            }
            job.status = "completed"
        except Exception as error:
            job.error, job.status = as_api_error(error).body["error"], "failed"
        finally:
            job.finished.set()

    def _chunks(self, document: DocumentBody) -> list[str]:
        if document.chunks is not None:
            return document.chunks
        return [chunk.text for chunk in self._chunker.split(document.text or "") if chunk.text.strip()]
