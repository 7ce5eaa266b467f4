"""A result in plain JSON values, as frameworks report it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvboost_rag.datamodels import GenerationResult, HitKind, SegmentKind


def usage_dict(result: GenerationResult) -> dict[str, int]:
    """Token counts under OpenAI's names."""
    usage = result.usage
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def cache_read_tokens(result: GenerationResult) -> int:
    """Tokens whose KV was there before the call: `cached_tokens` without what was encoded on the way."""
    computed = (HitKind.ENCODED, HitKind.DONOR)
    encoded = sum(
        max(0, s.num_tokens - s.num_donor_tokens - s.num_recomputed_tokens)
        for s in result.segments
        if s.hit in computed
    )
    return result.usage.cached_tokens - encoded


def summary(result: GenerationResult) -> dict[str, Any]:
    """What reuse did in this call: tokens, hits by kind, repair, times. JSON-safe and small."""
    documents = [s for s in result.segments if s.kind is SegmentKind.DOCUMENT]
    usage = result.usage
    return {
        "reuse": result.reuse,
        "num_documents": len(documents),
        "document_tokens": sum(s.num_tokens for s in documents),
        "hits": dict(Counter(s.hit.value for s in documents)),
        "cached_tokens": usage.cached_tokens,
        "exact_tokens": usage.exact_tokens,
        "approximate_tokens": usage.approximate_tokens,
        "recomputed_tokens": usage.recomputed_tokens,
        "probe_rows": usage.probe_rows,
        "prefilled_tokens": usage.prefilled_tokens,
        "created_tokens": usage.created_tokens,
        "accepted_tokens": usage.accepted_tokens,
        "repair": result.repair.strategy,
        "recompute_ratio": result.repair.recompute_ratio,
        "ttft_ms": result.ttft_ms,
        "total_ms": result.total_ms,
        "timings_ms": dict(result.timings_ms),
        "fallback_reason": result.fallback_reason,
    }
