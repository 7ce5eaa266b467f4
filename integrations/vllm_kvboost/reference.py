"""The model as transformers sees it: what its stored KV is keyed by, how its keys turn, and forwards for the gaps."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.forward.probe import probe
from kvboost_rag.forward.row_forward import RowPlan, observe_rows
from kvboost_rag.kv.assemble import PlacedChunk, assemble
from kvboost_rag.kv.buffer import BufferPool, KVBuffer, KVLayout
from kvboost_rag.kv.realign import PositionTables, position_free
from kvboost_rag.models.fingerprint import model_fingerprint
from kvboost_rag.models.load import load_model
from kvboost_rag.models.unwrap import input_device

logger = logging.getLogger(__name__)


class NotServable(ValueError):
    """Why vLLM cannot be given this model's KV; the message is meant for the operator."""


@dataclass
class Reference:
    """One model in transformers beside vLLM's own.

    Its weights take their memory a second time (on `Settings.device`): vLLM offers no way to compute a few rows in the
    middle of a prompt, and its fused weights none to tell which checkpoint they came from.
    """

    model: PreTrainedModel
    layout: KVLayout
    fingerprint: str

    def __post_init__(self) -> None:
        self.buffers = BufferPool(self.layout)
        self._tables: PositionTables | None = None

    def place(self, buffer: KVBuffer, chunks: list[PlacedChunk]) -> None:
        """Write chunks to their positions in a buffer, keys rotated."""
        end = max((c.start + c.kv.seq_len for c in chunks), default=0)
        assemble(buffer, chunks, self._positions(end))

    def take(self, buffer: KVBuffer, start: int, end: int) -> ChunkKV:
        """A copy of `[start, end)`, keys position-free."""
        return position_free(buffer.read(start, end), self.layout, start, self._positions(end))

    def _positions(self, end: int) -> PositionTables:
        if self._tables is None or self._tables.num_positions < end:
            self._tables = PositionTables.of(self.layout, end)
        return self._tables

    def compute(self, buffer: KVBuffer, token_ids: tuple[int, ...], rows: list[int]) -> None:
        """Compute rows (positions, ascending) with everything before them in the buffer visible."""
        device = input_device(self.model)
        observe_rows(self.model, buffer, torch.tensor(token_ids, device=device), RowPlan(torch.tensor(rows)))


@lru_cache(maxsize=2)
def open_reference(model: str, tokenizer: str, revision: str | None, dtype: torch.dtype, device: str) -> Reference:
    """Load a model as Hugging Face files hold it; once a process, whichever side of the connector asks.

    Raises:
        NotServable: its KV cannot be reused; the probe's reason.
        ModelLoadError: it cannot be loaded by transformers.
    """
    hub: dict[str, Any] = {"revision": revision} if revision else {}
    where = None if device == "cpu" else device
    loaded = load_model(model, tokenizer=tokenizer, dtype=dtype, device_map=where, hub=hub)
    report = probe(loaded.model)
    if report.layout is None or not report.reusable:
        raise NotServable(f"{model}: {report.reason}")
    return Reference(loaded.model, report.layout, model_fingerprint(loaded.model, loaded.tokenizer))
