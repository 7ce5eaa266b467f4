"""Runs the grid over the evaluation prompts and chooses."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from statistics import fmean, median

import numpy as np

from kvboost_rag.config import EncodingConfig
from kvboost_rag.engine import KVBoost
from kvboost_rag.indexing.embeddings import Embed, load_embedder
from kvboost_rag.measure.calibrate.grid import default_grid, quantised
from kvboost_rag.measure.calibrate.measure import Answered, Comparison, compare, reference_answer
from kvboost_rag.measure.calibrate.questions import EvalQuestion
from kvboost_rag.measure.calibrate.scores import bootstrap
from kvboost_rag.models.load import LoadedModel
from kvboost_rag.models.profile import Measured, ModelProfile, Setting
from kvboost_rag.repair import strategy_named
from kvboost_rag.stores import MemoryStore

MAX_KL = 0.05
"""Nats. CacheBlend at 15 % on chunks encoded alone is at 0.11 on HotpotQA (SmolLM2)."""
MIN_PROMPTS = 3
STORE_BYTES = 1 << 30
QUANTISED_SPEED = 0.9
"""A quantised setting is taken if it is within the tolerance and at least this fast, relative to unquantised."""


@dataclass(frozen=True)
class CalibrationPlan:
    """What to measure.

    Attributes:
        questions: evaluation prompts.
        data: where they come from, for the report.
        settings: tried on every prompt.
        codecs: quantisations tried for the chosen setting.
        max_kl: tolerance in nats; the gate compares `Measured.kl_upper` with it.
        answer_tokens: length of the reference's greedy answer.
        budget_s: time limit in seconds, None for none. At least three prompts are measured all the same.
    """

    questions: Sequence[EvalQuestion]
    data: str
    settings: Sequence[Setting] = field(default_factory=default_grid)
    codecs: Sequence[str] = ("k8v8", "k8v4")
    max_kl: float = MAX_KL
    answer_tokens: int = 16
    budget_s: float | None = None

    def __post_init__(self) -> None:
        if not self.questions:
            raise ValueError("calibration needs at least one question")
        if not self.settings:
            raise ValueError("calibration needs at least one setting")
        if not self.max_kl > 0:
            raise ValueError(f"max_kl={self.max_kl!r}: expected a number above 0")


@dataclass(frozen=True)
class CalibrationProgress:
    """Where a calibration stands; `step` of `num_steps` prompts of this phase are done."""

    phase: str
    step: int
    num_steps: int


Progress = Callable[[CalibrationProgress], None]
Results = dict[Setting, list[tuple[Answered, Comparison]]]


def calibrate(
    loaded: LoadedModel, plan: CalibrationPlan, embedder: Embed | None = None, progress: Progress | None = None
) -> ModelProfile:
    """Measure every setting on every prompt and choose the fastest within the tolerance.

    Each prompt goes through full prefill once and then through every setting; KV is kept in memory and dropped at
    the end. The profile is returned, not saved.

    Args:
        embedder: finds neighbours; default: all-MiniLM-L6-v2, loaded only if a setting has neighbours.

    Raises:
        ValueError: the model's KV cannot be reused at all; the message says why.
    """
    deadline = _Deadline(plan.budget_s)
    with _Bench(loaded, plan, embedder) as bench:
        references: list[Answered] = []
        results = _measure(bench, plan.settings, references, deadline.share(0.75), progress)
        measured = [_summarise(s, rows) for s, rows in results.items()]
        chosen = _choose(measured, plan.max_kl)
        if chosen is not None and plan.codecs:
            variants = quantised(chosen.setting, plan.codecs)
            more = [
                _summarise(s, rows) for s, rows in _measure(bench, variants, references, deadline, progress).items()
            ]
            measured += more
            good = [m for m in more if m.ttft_ratio >= QUANTISED_SPEED * chosen.ttft_ratio]
            chosen = _smallest(good, plan.max_kl) or chosen
        return ModelProfile(
            fingerprint=bench.fingerprint,
            transformers=version("transformers"),
            model=loaded.name,
            max_kl=plan.max_kl,
            chosen=chosen.setting if chosen is not None else None,
            measured=tuple(measured),
            num_prompts=len(references),
            num_answered=sum(bool(r.correct) for r in references),
            data=plan.data,
        )


class _Deadline:
    def __init__(self, budget_s: float | None) -> None:
        self._start, self._budget_s = time.monotonic(), budget_s

    def share(self, part: float) -> _Deadline:
        """The same start with a part of the budget."""
        other = _Deadline(None if self._budget_s is None else part * self._budget_s)
        other._start = self._start
        return other

    @property
    def over(self) -> bool:
        return self._budget_s is not None and time.monotonic() - self._start > self._budget_s


class _Bench(ExitStack):
    """One engine for every way of encoding, over the same model."""

    def __init__(self, loaded: LoadedModel, plan: CalibrationPlan, embedder: Embed | None) -> None:
        super().__init__()
        self._loaded = loaded
        self.plan = plan
        self._engines: dict[tuple[int, int, str], KVBoost] = {}
        self._near: dict[str, list[str]] = {}
        most = max((s.neighbours * s.contexts for s in plan.settings), default=0)
        if most:
            texts = list(dict.fromkeys(d for q in plan.questions for d in q.documents))
            self._near = nearest_texts(texts, most, embedder or load_embedder())
        probe = self.engine(plan.settings[0]).probe
        if not probe.reusable:
            self.close()
            raise ValueError(f"{loaded.name} cannot be calibrated: {probe.reason}")

    @property
    def fingerprint(self) -> str:
        return next(iter(self._engines.values())).registry.fingerprint

    def engine(self, setting: Setting) -> KVBoost:
        key = setting.neighbours, setting.contexts, setting.quantization
        if key not in self._engines:
            encoding = EncodingConfig(quantization=setting.quantization)
            engine = KVBoost(self._loaded, store=MemoryStore(STORE_BYTES), encoding=encoding, profile=None)
            self._engines[key] = self.enter_context(engine)
        return self._engines[key]

    def warmed(self, setting: Setting, question: EvalQuestion) -> KVBoost:
        """The setting's engine with the question's documents warm."""
        engine, count = self.engine(setting), setting.neighbours
        contexts = [self._contexts(d, count, setting.contexts) for d in question.documents] if count else None
        engine.warm(question.documents, neighbours=contexts)
        return engine

    def _contexts(self, text: str, count: int, contexts: int) -> list[list[str]]:
        """The nearest texts, then the next nearest; nearest last in each."""
        nearest_first = self._near[text][::-1]
        found = [nearest_first[i * count : (i + 1) * count][::-1] for i in range(contexts)]
        return [context for context in found if context] or [[]]


def nearest_texts(texts: Sequence[str], count: int, embed: Embed) -> dict[str, list[str]]:
    """For each text the most similar other ones, nearest last."""
    vectors = embed(texts)
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -np.inf)
    order = np.argsort(-similarity, axis=1)[:, : min(count, len(texts) - 1)]
    return {text: [texts[j] for j in order[i][::-1]] for i, text in enumerate(texts)}


def _measure(
    bench: _Bench,
    settings: Iterable[Setting],
    references: list[Answered],
    deadline: _Deadline,
    progress: Progress | None,
) -> Results:
    """Prompts outside, settings inside, so that a time limit leaves every setting with the same prompts.

    Fills `references` at the first call; later calls use those.
    """
    settings = list(settings)
    results: Results = defaultdict(list)
    known = len(references)
    questions = bench.plan.questions[:known] if known else bench.plan.questions
    phase = "quantised" if known else "strategies"
    for number, question in enumerate(questions):
        if number >= MIN_PROMPTS and deadline.over:
            break
        if not known:
            references.append(reference_answer(bench.engine(settings[0]), question, bench.plan.answer_tokens))
        for setting in settings:
            engine = bench.warmed(setting, question)
            strategy = strategy_named(setting.repair, setting.options)
            ours = compare(engine, question, references[number], strategy, setting.recompute_ratio)
            results[setting].append((references[number], ours))
        if progress is not None:
            progress(CalibrationProgress(phase, number + 1, len(questions)))
    return results


def _summarise(setting: Setting, rows: Sequence[tuple[Answered, Comparison]]) -> Measured:
    ours = [c for _, c in rows]
    answered = [(r, c) for r, c in rows if r.correct]
    full_f1 = fmean(r.f1 or 0.0 for r, _ in answered) if answered else 0.0
    uppers = [bootstrap(kl, 0.9)[1] for kl in ([c.kl_first for c in ours], [c.kl_mean for c in ours])]
    return Measured(
        setting=setting,
        num_prompts=len(rows),
        kl_first=fmean(c.kl_first for c in ours),
        kl_mean=fmean(c.kl_mean for c in ours),
        kl_upper=max(uppers),
        agreement=fmean(c.agreement for c in ours),
        identical=fmean(c.identical for c in ours),
        f1_recovery=fmean(c.f1 or 0.0 for _, c in answered) / full_f1 if full_f1 else None,
        em_recovery=fmean(bool(c.correct) for _, c in answered) if answered else None,
        ttft_ratio=median(r.ttft_ms for r, _ in rows) / median(c.ttft_ms for c in ours),
    )


def _choose(measured: Iterable[Measured], max_kl: float) -> Measured | None:
    """The fastest within the tolerance; of those within 2 % of its speed, the most accurate."""
    good = [m for m in measured if m.kl_upper <= max_kl]
    if not good:
        return None
    fastest = max(m.ttft_ratio for m in good)
    return min((m for m in good if m.ttft_ratio >= 0.98 * fastest), key=lambda m: m.kl_upper)


def _smallest(measured: Iterable[Measured], max_kl: float) -> Measured | None:
    """The one that needs the least room, of those within the tolerance. Codecs are tried largest first."""
    good = [m for m in measured if m.kl_upper <= max_kl]
    return good[-1] if good else None
