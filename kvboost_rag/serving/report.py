"""What happened in a request, in plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from kvboost_rag.chunks.library import FetchedChunk
from kvboost_rag.chunks.lookup import LocatedPrompt
from kvboost_rag.datamodels import GenerationResult, HitKind, RepairReport, SegmentKind, SegmentReport, Usage
from kvboost_rag.forward.row_forward import RowPass
from kvboost_rag.observe.timing import StageClock
from kvboost_rag.serving.decode import Decoded
from kvboost_rag.serving.pipeline import Prepared


@dataclass(frozen=True)
class Outcome:
    """The pieces of a finished request."""

    located: LocatedPrompt
    prepared: Prepared
    rows: RowPass | None
    decoded: Decoded
    clock: StageClock


def build_result(outcome: Outcome) -> GenerationResult:
    """The result as callers see it. Holds no tensors."""
    recomputed = _recomputed_rows(outcome)
    clock = outcome.clock
    return GenerationResult(
        text=outcome.decoded.text,
        token_ids=outcome.decoded.token_ids,
        finish_reason=outcome.decoded.finish_reason,
        usage=_usage(outcome, len(recomputed)),
        reuse=outcome.prepared.reuse,
        segments=_segments(outcome, recomputed),
        repair=_repair(outcome, recomputed),
        timings_ms=dict(clock.timings_ms),
        ttft_ms=clock.ttft_ms or 0.0,
        total_ms=clock.total_ms,
        fallback_reason=outcome.prepared.fallback_reason,
    )


def _recomputed_rows(outcome: Outcome) -> tuple[int, ...]:
    """Document rows of the final pass (the prompt's last row counts too if it is a document's)."""
    if outcome.rows is None or outcome.prepared.repair is None:
        return ()
    spans = outcome.prepared.repair.documents
    return tuple(row for row in outcome.rows.rows.tolist() if any(a <= row < b for a, b in spans))


def _usage(outcome: Outcome, num_recomputed: int) -> Usage:
    total = len(outcome.located.token_ids)
    cached = outcome.prepared.exact_tokens
    if outcome.prepared.repair is not None:
        cached += outcome.prepared.repair.num_document_tokens - num_recomputed
    return Usage(
        input_tokens=total,
        cached_tokens=cached,
        recomputed_tokens=num_recomputed,
        prefilled_tokens=total - cached - num_recomputed,
        created_tokens=outcome.prepared.created_tokens,
        output_tokens=len(outcome.decoded.token_ids),
    )


def _segments(outcome: Outcome, recomputed: tuple[int, ...]) -> tuple[SegmentReport, ...]:
    deviations = iter(_deviations(outcome) or ())
    chunks = iter(outcome.prepared.chunks)
    reports = []
    for segment, record, hit in zip(
        outcome.located.segments, outcome.located.records, outcome.prepared.hits, strict=True
    ):
        chunk = next(chunks, None) if record is not None else None
        is_document = segment.kind is SegmentKind.DOCUMENT and record is not None
        reports.append(
            SegmentReport(
                kind=segment.kind,
                hit=hit,
                start=segment.start,
                num_tokens=len(segment.token_ids),
                num_recomputed_tokens=sum(segment.start <= row < segment.end for row in recomputed),
                content_hash=record.content_hash if record is not None else None,
                deviation=next(deviations, None) if is_document else None,
                disk_choice=chunk.disk_choice if chunk is not None else None,
                num_donor_tokens=_donor_tokens(chunk),
            )
        )
    return tuple(reports)


def _donor_tokens(chunk: FetchedChunk | None) -> int:
    if chunk is None or chunk.hit is not HitKind.DONOR:
        return 0
    return len(chunk.record.token_ids) - chunk.computed_tokens


def _repair(outcome: Outcome, recomputed: tuple[int, ...]) -> RepairReport:
    context = outcome.prepared.repair
    if context is None:
        return RepairReport("none")
    cache = outcome.prepared.start.cache
    return RepairReport(
        strategy=outcome.prepared.strategy,
        rows=recomputed,
        recompute_ratio=len(recomputed) / max(1, context.num_document_tokens),
        deviation_per_chunk=context.deviation_per_chunk,
        rows_per_layer=tuple(cache.rows_per_layer) if cache is not None else (),
    )


def _deviations(outcome: Outcome) -> tuple[float, ...] | None:
    return outcome.prepared.repair.deviation_per_chunk if outcome.prepared.repair is not None else None
