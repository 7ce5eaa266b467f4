"""Figures that say how far an answer is from the reference."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """As SQuAD's evaluation does it: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def answers(text: str, accepted: Sequence[str]) -> bool:
    """Whether one of the accepted answers stands in the text, word for word once both are normalised.

    SQuAD's exact match asks for nothing beside it; small chat models answer in sentences and would never match.
    """
    words = f" {normalised(text)} "
    return any(f" {normalised(gold)} " in words for gold in accepted if normalised(gold))


def f1(answer: str, accepted: Sequence[str]) -> float:
    """Token F1 against the best of the accepted answers (SQuAD)."""
    return max((_f1(normalised(answer).split(), normalised(gold).split()) for gold in accepted), default=0.0)


def _f1(answer: list[str], gold: list[str]) -> float:
    common = sum((Counter(answer) & Counter(gold)).values())
    if not answer or not gold:
        return float(answer == gold)
    return 2 * common / (len(answer) + len(gold))


def bootstrap(values: Sequence[float], level: float = 0.95, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean at `level`, by resampling with a fixed seed."""
    sample: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    if len(sample) == 0:
        raise ValueError("an interval needs at least one value")
    picks = np.random.default_rng(seed).integers(0, len(sample), (draws, len(sample)))
    means = sample[picks].mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
