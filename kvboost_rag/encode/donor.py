"""A chunk's KV made out of a near-duplicate's: identical spans moved to their places, everything else computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.encode.encoder import EncodingJob
from kvboost_rag.encode.similarity import DonorPlan
from kvboost_rag.forward.row_forward import RowPlan, row_forward
from kvboost_rag.kv.assemble import PlacedChunk, assemble
from kvboost_rag.kv.buffer import KVBuffer, KVLayout
from kvboost_rag.kv.realign import PositionTables, position_free
from kvboost_rag.models.unwrap import input_device


@dataclass(frozen=True)
class DonorResult:
    """Position-free KV of the wanted chunk, and what was computed for it.

    Attributes:
        forwarded_tokens: with the encoding context.
        computed_tokens: those of the chunk among them.
    """

    kv: ChunkKV
    forwarded_tokens: int
    computed_tokens: int


@torch.no_grad()
def encode_from_donor(
    model: PreTrainedModel,
    layout: KVLayout,
    job: EncodingJob,
    plan: DonorPlan,
    donor: ChunkKV,
    context: Sequence[PlacedChunk] = (),
) -> DonorResult:
    """Compute what a donor cannot give: the encoding context and all rows of the chunk outside the plan's spans.

    With the donor's own encoding context and spans before the first change only, this is what `Encoder.encode` gives,
    up to rounding (other matrix shapes). With spans after a change it is an approximation, and so it is reported.

    Args:
        job: the wanted chunk and its encoding context.
        plan: from `DonorIndex.find`, for these token ids.
        donor: position-free KV of the donor.
        context: stored KV of parts of the encoding context, if they are to be taken as they are instead of computed
            (approximate, and much cheaper after neighbours); `start` counts in the context.

    Raises:
        ValueError: plan, donor and job do not belong together.
    """
    _check(job, plan, donor)
    first = len(job.context_ids)
    ids = torch.tensor((*job.context_ids, *job.token_ids), device=input_device(model))
    tables = PositionTables.of(layout, len(ids))
    buffer = KVBuffer(layout, len(ids))
    pieces = [
        PlacedChunk(_slice(donor, span.donor_start, span.donor_start + span.num_tokens), first + span.start)
        for span in plan.spans
    ]
    assemble(buffer, [*context, *pieces], tables)
    rows = torch.ones(len(ids), dtype=torch.bool)
    for piece in (*context, *pieces):
        rows[piece.start : piece.start + piece.kv.seq_len] = False
    rows[-1] = True  # a partial forward ends with the last row
    wanted = torch.nonzero(rows).flatten()
    row_forward(model, buffer, ids, RowPlan(wanted))
    kv = position_free(buffer.read(first, len(ids)), layout, first, tables)
    return DonorResult(kv, len(wanted), int((wanted >= first).sum()))


def _slice(kv: ChunkKV, start: int, end: int) -> ChunkKV:
    return ChunkKV(tuple(k[:, :, start:end] for k in kv.keys), tuple(v[:, :, start:end] for v in kv.values))


def _check(job: EncodingJob, plan: DonorPlan, donor: ChunkKV) -> None:
    if plan.num_tokens != len(job.token_ids):
        raise ValueError(f"the plan is for {plan.num_tokens} tokens, the chunk has {len(job.token_ids)}")
    last = max((span.donor_start + span.num_tokens for span in plan.spans), default=0)
    if last > donor.seq_len:
        raise ValueError(f"the plan takes tokens up to {last} of a donor that has {donor.seq_len}")
