"""Results as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from rich.table import Table

from kvboost_rag.datamodels import GenerationResult, SegmentKind, SegmentReport

if TYPE_CHECKING:
    from kvboost_rag.cli.asking import Passage


def reuse_table(result: GenerationResult, passages: Sequence[Passage]) -> Table:
    """Segments of the prompt and how each was served; below, the stages of the time to first token."""
    names = {passage.content_hash: source_label(passage.sources) for passage in passages}
    table = Table(title=reuse_line(result), title_justify="left", title_style="bold")
    for column in ("segment", "source", "served"):
        table.add_column(column)
    for column in ("tokens", "recomputed"):
        table.add_column(column, justify="right")
    for segment in result.segments:
        if not segment.num_tokens:
            continue
        recomputed = str(segment.num_recomputed_tokens) if segment.kind is SegmentKind.DOCUMENT else ""
        source = names.get(segment.content_hash or "", "")
        table.add_row(segment.kind.value, source, served_text(segment), str(segment.num_tokens), recomputed)
    stages = ", ".join(f"{name.removesuffix('_ms')} {ms:.0f}" for name, ms in result.timings_ms.items() if ms >= 0.5)
    table.caption = f"first token after {result.ttft_ms:.0f} ms: {stages}"
    table.caption_justify = "left"
    return table


def served_text(segment: SegmentReport) -> str:
    """Where a segment's KV came from."""
    chosen = segment.disk_choice == "recompute"
    return f"{segment.hit.value}, faster than loading" if chosen else segment.hit.value


def reuse_line(result: GenerationResult) -> str:
    """Token counts in one line."""
    usage = result.usage
    text = (
        f"{usage.input_tokens:,} prompt tokens: {usage.cached_tokens:,} reused, "
        f"{usage.recomputed_tokens:,} recomputed, {usage.prefilled_tokens:,} prefilled"
    )
    return f"{text} (plain prefill: {result.fallback_reason})" if result.fallback_reason else text


def source_label(sources: Sequence[str]) -> str:
    """A short name for where a chunk comes from."""
    if not sources:
        return "?"
    name = sources[0] if sources[0].startswith("pydoc:") else PurePath(sources[0]).name
    return name if len(sources) == 1 else f"{name} +{len(sources) - 1}"


def sources_text(passages: Sequence[Passage]) -> str:
    """The passages' sources, each once with the number of its passages."""
    counts = Counter(source_label(passage.sources) for passage in passages)
    return ", ".join(name if n == 1 else f"{name} x{n}" for name, n in counts.most_common())
