"""One setting on one prompt against full prefill on the same token ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvboost_rag.calibrate.questions import EvalQuestion
from kvboost_rag.calibrate.scores import answers, f1, kl_per_token
from kvboost_rag.config import GenerationParams
from kvboost_rag.engine import KVBoost
from kvboost_rag.model_profile import Setting
from kvboost_rag.repair import STRATEGIES


@dataclass(frozen=True)
class Answered:
    """Full prefill's answer: the reference of every comparison.

    `logits`: behind the prompt and behind each answer token but the last, float32 `[num_answer_tokens, vocab_size]`.
    """

    token_ids: tuple[int, ...]
    text: str
    logits: torch.Tensor
    ttft_ms: float
    f1: float | None
    correct: bool | None


@dataclass(frozen=True)
class Comparison:
    """How far one setting is from the reference on one prompt; see `model_profile.Measured` for the figures."""

    kl_first: float
    kl_mean: float
    agreement: float
    identical: bool
    text: str
    f1: float | None
    correct: bool | None
    ttft_ms: float
    cached_tokens: int
    recomputed_tokens: int
    input_tokens: int


def reference_answer(engine: KVBoost, question: EvalQuestion, answer_tokens: int = 16) -> Answered:
    """Answer greedily by full prefill, and keep the logits."""
    params = GenerationParams(max_new_tokens=answer_tokens)
    prompt = question.messages()
    result = engine.generate(prompt, documents=question.documents, reuse="off", params=params)
    logits = engine.logits(prompt, result.token_ids[:-1], documents=question.documents, reuse="off")
    return Answered(
        result.token_ids,
        result.text,
        logits,
        result.ttft_ms,
        f1(result.text, question.answers) if question.answers else None,
        answers(result.text, question.answers) if question.answers else None,
    )


def compare(engine: KVBoost, question: EvalQuestion, reference: Answered, setting: Setting) -> Comparison:
    """Answer by reuse, and compare; the question's documents are warm already.

    Raises:
        RuntimeError: nothing was reused, so that the figures would say nothing about reuse.
    """
    strategy = STRATEGIES[setting.repair](**setting.options)
    prompt = question.messages()
    options = {
        "documents": question.documents,
        "repair": strategy,
        "recompute_ratio": setting.recompute_ratio,
        "reuse": "blend",
        "strict": True,
    }
    params = GenerationParams(max_new_tokens=len(reference.token_ids))
    result = engine.generate(prompt, params=params, **options)
    if not result.usage.cached_tokens and setting.repair != "full":
        raise RuntimeError(f"{setting.label}: no token was reused; were the documents warmed?")
    ours = engine.logits(prompt, reference.token_ids[:-1], **options)
    kl = kl_per_token(reference.logits, ours)
    same = reference.logits.argmax(-1) == ours.argmax(-1)
    return Comparison(
        kl_first=float(kl[0]),
        kl_mean=float(kl.mean()),
        agreement=float(same.float().mean()),
        identical=result.token_ids == reference.token_ids,
        text=result.text,
        f1=f1(result.text, question.answers) if question.answers else None,
        correct=answers(result.text, question.answers) if question.answers else None,
        ttft_ms=result.ttft_ms,
        cached_tokens=result.usage.cached_tokens,
        recomputed_tokens=result.usage.recomputed_tokens,
        input_tokens=result.usage.input_tokens,
    )
