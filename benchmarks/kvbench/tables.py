"""Timings as text tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbench.clock import Series
from kvbench.contenders import FULL, Oracle

NAME_WIDTH = 48


def ttft_table(series: Mapping[str, Series], kv_bytes_per_token: int) -> str:
    """Medians, ratios and stages."""
    full, oracle = series.get(FULL), series.get(Oracle.name)
    lines = [
        f"{'':{NAME_WIDTH}s} {'p50 ms':>8s} {'min':>8s} {'p95':>8s} {'full ÷':>7s} {'÷ oracle':>8s} "
        f"{'prompt':>7s} {'reused':>7s} {'recomp.':>7s} {'peak/KV':>7s}"
    ]
    for row in series.values():
        if row.failure is not None:
            lines.append(f"{row.name:{NAME_WIDTH}s} {row.failure}")
            continue
        prompt = row.mean("prompt_tokens")
        peak = row.peak_bytes / (kv_bytes_per_token * prompt) if row.peak_bytes is not None and prompt else None
        lines.append(
            f"{row.name:{NAME_WIDTH}s} {row.p50_ms:8.0f} {row.fastest_ms:8.0f} {row.p95_ms:8.0f} "
            f"{_number(full.p50_ms / row.p50_ms if full and full.samples else None, 7)} "
            f"{_number(row.p50_ms / oracle.p50_ms if oracle and oracle.samples else None, 8)} "
            f"{prompt:7.0f} {row.mean('reused_tokens'):7.0f} {row.mean('recomputed_tokens'):7.0f} {_number(peak, 7)}"
        )
    return "\n".join([*lines, *stage_lines(series)])


def stage_lines(series: Mapping[str, Series]) -> list[str]:
    """Where the time of each row went, medians in ms."""
    lines = ["stages in ms (medians):"]
    for row in series.values():
        stages = row.as_dict().get("stages_ms", {})
        if stages:
            shown = "  ".join(f"{name.removesuffix('_ms')} {ms:.1f}" for name, ms in stages.items() if ms >= 0.05)
            lines.append(f"  {row.name:{NAME_WIDTH}s} {shown}")
    return lines


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be, the first one left-aligned."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in [header, *rows]
    )


def _number(value: float | None, width: int) -> str:
    return " " * width if value is None else f"{value:{width}.2f}"
