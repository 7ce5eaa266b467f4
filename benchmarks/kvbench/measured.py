"""Figures that take long to measure, kept in a file as soon as they are known."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np


class Measured:
    """Figures by (row, question). With a path, the same command goes on from what the file holds."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: dict[str, dict[int, list[float]]] = defaultdict(dict)
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            row, question, figures = json.loads(line)
            self.rows[row][question] = figures

    def add(self, row: str, question: int, figures: Sequence[float]) -> None:
        self.rows[row][question] = list(figures)
        if self.path is not None:
            with self.path.open("a") as out:
                out.write(json.dumps([row, question, list(figures)]) + "\n")

    def means(self, rows: Sequence[str]) -> tuple[int, dict[str, np.ndarray]]:
        """Number of questions that every row has, and each row's means over these (none where there are none)."""
        shared = sorted(set.intersection(*(set(self.rows[row]) for row in rows)))
        if not shared:
            return 0, {}
        return len(shared), {row: np.mean([self.rows[row][question] for question in shared], axis=0) for row in rows}
