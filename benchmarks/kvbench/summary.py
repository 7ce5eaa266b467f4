"""Result lines to figures with intervals."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from kvboost_rag.measure.calibrate.scores import bootstrap

Row = dict[str, Any]
UNREUSED = "full prefill in bfloat16"
"""What lines of `rounded_row` are called: no reuse, but the scale for all other figures."""


@dataclass(frozen=True)
class Figure:
    """A mean and its 95 % bootstrap interval over prompts."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Figure:
        low, high = bootstrap(values)
        return Figure(fmean(values), low, high)

    def text(self, digits: int = 3, percent: bool = False) -> str:
        scale, unit = (100, " %") if percent else (1, "")
        digits = 0 if percent else digits
        return f"{scale * self.mean:.{digits}f}{unit} [{scale * self.low:.{digits}f}, {scale * self.high:.{digits}f}]"


@dataclass(frozen=True)
class ArmSummary:
    """One arm on one data set, from one file of results (`source`).

    `shift`: correct answers minus full prefill's, per prompt, None without gold answers. `kept`: share of the questions
    that full prefill answers which the arm answers too. `index_tokens`: forwarded per document token when it was
    indexed, None where nothing was or the lines do not say.
    """

    source: str
    model: str
    dataset: str
    arm: str
    num_prompts: int
    kl_first: Figure
    kl_mean: Figure
    agreement: Figure
    identical: Figure
    full_correct: float | None
    shift: Figure | None
    kept: float | None
    ttft_ratio: float
    recomputed: float
    index_tokens: float | None = None


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """All lines; each says in `source` which file it is from."""
    return [
        {"source": path.stem, **json.loads(line)}
        for path in paths
        for line in path.read_text("utf-8").splitlines()
        if line.strip()
    ]


def is_side_table(source: str) -> bool:
    """Whether a file of results only shows what makes the difference, on a part of the prompts: `*ablations*`,
    `*strategies*`."""
    return "ablations" in source or "strategies" in source


def summarise(rows: Iterable[Row]) -> list[ArmSummary]:
    """By file, model, data set and arm, in the order of the lines. Only prompts that every arm of a data set has
    answered count, so that arms are compared on the same prompts."""
    groups: dict[tuple[str, str, str], dict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        groups[row["source"], f"{row['model']} {row['dtype']}", row["dataset"]][row["arm"]][row["case"]] = row
    result = []
    for key, arms in groups.items():
        common = set.intersection(*(set(cases) for cases in arms.values()))
        if common:
            result += [_arm(key, arm, [r for c, r in cases.items() if c in common]) for arm, cases in arms.items()]
    return result


def _arm(key: tuple[str, str, str], arm: str, rows: Sequence[Row]) -> ArmSummary:
    judged = [r for r in rows if r["full_correct"] is not None]
    answered = [r for r in judged if r["full_correct"]]
    costs = [cost for r in rows if (cost := r.get("index_tokens")) is not None]
    return ArmSummary(
        source=key[0],
        model=key[1],
        dataset=key[2],
        arm=arm,
        num_prompts=len(rows),
        kl_first=Figure.of([r["kl_first"] for r in rows]),
        kl_mean=Figure.of([r["kl_mean"] for r in rows]),
        agreement=Figure.of([r["agreement"] for r in rows]),
        identical=Figure.of([float(r["identical"]) for r in rows]),
        full_correct=fmean(bool(r["full_correct"]) for r in judged) if judged else None,
        shift=Figure.of([float(r["correct"]) - float(r["full_correct"]) for r in judged]) if judged else None,
        kept=fmean(bool(r["correct"]) for r in answered) if answered else None,
        ttft_ratio=median(r["full_ttft_ms"] for r in rows) / median(r["ttft_ms"] for r in rows),
        recomputed=fmean(r["recomputed_tokens"] / max(1, r["recomputed_tokens"] + r["cached_tokens"]) for r in rows),
        index_tokens=fmean(costs) if costs else None,
    )
