"""What happened in a request, in plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvboost_rag.chunks.fetched import FetchedChunk
from kvboost_rag.chunks.served import ServedPrompt, ServedSegment
from kvboost_rag.datamodels import GenerationResult, HitKind, RepairReport, SegmentReport, Usage
from kvboost_rag.observe.timing import StageClock
from kvboost_rag.serving.watch import Decoded


def build_result(
    prompt: ServedPrompt, rows: torch.Tensor | None, decoded: Decoded, clock: StageClock
) -> GenerationResult:
    """The result as callers see it. Holds no tensors.

    Args:
        rows: positions that were computed to the end, `[num_rows]`; None where there was no partial forward.
    """
    recomputed = _recomputed_rows(prompt, rows)
    deviations = prompt.plan.deviations() if prompt.plan is not None else None
    return GenerationResult(
        text=decoded.text,
        token_ids=decoded.token_ids,
        finish_reason=decoded.finish_reason,
        usage=_usage(prompt, len(recomputed), decoded),
        reuse=prompt.reuse,
        segments=_segments(prompt, recomputed, deviations or ()),
        repair=_repair(prompt, recomputed, deviations),
        timings_ms=dict(clock.timings_ms),
        ttft_ms=clock.ttft_ms or 0.0,
        total_ms=clock.total_ms,
        fallback_reason=prompt.fallback_reason,
    )


def _recomputed_rows(prompt: ServedPrompt, rows: torch.Tensor | None) -> tuple[int, ...]:
    """Document rows of the final pass (the prompt's last row counts too if it is a document's)."""
    if rows is None:
        return ()
    spans = [(s.start, s.end) for s in prompt.documents]
    return tuple(row for row in rows.tolist() if any(a <= row < b for a, b in spans))


def _usage(prompt: ServedPrompt, num_recomputed: int, decoded: Decoded) -> Usage:
    total, plan = len(prompt.token_ids), prompt.plan
    approximate = 0 if plan is None else prompt.num_document_tokens - num_recomputed
    cached = prompt.exact_tokens + approximate
    return Usage(
        input_tokens=total,
        cached_tokens=cached,
        recomputed_tokens=num_recomputed,
        prefilled_tokens=total - cached - num_recomputed,
        created_tokens=prompt.created_tokens,
        output_tokens=len(decoded.token_ids),
        exact_tokens=prompt.exact_tokens,
        approximate_tokens=approximate,
        probe_rows=0 if plan is None else plan.probe_rows,
        accepted_tokens=decoded.accepted_tokens,
    )


def _segments(
    prompt: ServedPrompt, recomputed: tuple[int, ...], deviations: Sequence[float]
) -> tuple[SegmentReport, ...]:
    measured = iter(deviations)
    return tuple(_segment(s, recomputed, next(measured, None) if s.chunk else None) for s in prompt.segments)


def _segment(served: ServedSegment, recomputed: tuple[int, ...], deviation: float | None) -> SegmentReport:
    return SegmentReport(
        kind=served.kind,
        hit=served.hit,
        start=served.start,
        num_tokens=served.end - served.start,
        num_recomputed_tokens=sum(served.start <= row < served.end for row in recomputed),
        content_hash=served.record.content_hash if served.record is not None else None,
        deviation=deviation,
        disk_choice=served.chunk.disk_choice if served.chunk is not None else None,
        num_donor_tokens=_donor_tokens(served.chunk),
        text=served.segment.text,
        token_ids=served.segment.token_ids,
    )


def _donor_tokens(chunk: FetchedChunk | None) -> int:
    if chunk is None or chunk.hit is not HitKind.DONOR:
        return 0
    return len(chunk.record.token_ids) - chunk.computed_tokens


def _repair(prompt: ServedPrompt, recomputed: tuple[int, ...], deviations: tuple[float, ...] | None) -> RepairReport:
    if prompt.plan is None:
        return RepairReport("none")
    return RepairReport(
        strategy=prompt.strategy,
        rows=recomputed,
        recompute_ratio=len(recomputed) / max(1, prompt.num_document_tokens),
        deviation_per_chunk=deviations,
        rows_per_layer=tuple(prompt.cache.rows_per_layer) if prompt.cache is not None else (),
    )
