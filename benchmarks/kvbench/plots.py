"""Plots of the report, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.summary import ArmSummary, Row


def trade_off(summaries: Sequence[ArmSummary], path: Path) -> None:
    """Accuracy against recomputed tokens: one point per arm, with its interval."""
    figure, axes = _axes()
    for summary in summaries:
        kl = summary.kl_first
        error = [[max(0.0, kl.mean - kl.low)], [max(0.0, kl.high - kl.mean)]]
        marker = "o" if ", 0 neighbours" in summary.arm else "s"
        axes.errorbar(100 * summary.recomputed, kl.mean, yerr=error, fmt=marker, capsize=2, label=summary.arm)
    axes.set(xlabel="document tokens recomputed, %", ylabel="KL(full ‖ reuse), first token, nats", yscale="log")
    axes.legend(fontsize=7)
    _save(figure, path)


def growth(rows: Sequence[Row], path: Path) -> None:
    """TTFT by prompt length, one line per way."""
    figure, axes = _axes()
    for name in dict.fromkeys(row["name"] for row in rows):
        points = sorted(
            (r["prompt_tokens"], r["ttft_p50_ms"]) for r in rows if r["name"] == name and "failure" not in r
        )
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.set(xlabel="prompt tokens", ylabel="time to first token, ms", yscale="log")
    axes.legend(fontsize=7)
    _save(figure, path)


def _axes() -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "kvboost"  # the same figures give the same file
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(6.5, 4), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
