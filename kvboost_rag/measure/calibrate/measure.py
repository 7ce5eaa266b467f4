"""One setting on one prompt against full prefill on the same token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvboost_rag.config import GenerationParams
from kvboost_rag.engine import KVBoost
from kvboost_rag.measure.calibrate.questions import prompt_of
from kvboost_rag.measure.calibrate.scores import answers, f1
from kvboost_rag.observe.divergence import kl_per_token
from kvboost_rag.repair import RepairStrategy


class EvalPrompt(Protocol):
    """A prompt over documents; `EvalQuestion` is one. `answers`: accepted ones, none where they are not known."""

    @property
    def documents(self) -> Sequence[str]: ...

    @property
    def answers(self) -> Sequence[str]: ...

    def messages(self) -> Sequence[Mapping[str, Any]]: ...


@dataclass(frozen=True)
class Answered:
    """Full prefill's answer: the reference of every comparison.

    `logits`: after the prompt and after each answer token but the last, float32 `[num_answer_tokens, vocab_size]`.
    """

    token_ids: tuple[int, ...]
    text: str
    logits: torch.Tensor
    ttft_ms: float
    input_tokens: int
    f1: float | None
    correct: bool | None


@dataclass(frozen=True)
class Comparison:
    """How far one setting is from the reference on one prompt; see `models.profile.Measured` for the figures.

    `first_logits`: after the prompt, float32 `[vocab_size]`.
    """

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
    first_logits: torch.Tensor


def reference_answer(engine: KVBoost, question: EvalPrompt, answer_tokens: int = 16) -> Answered:
    """Answer greedily by full prefill, and keep the logits."""
    params = GenerationParams(max_new_tokens=answer_tokens)
    prompt = prompt_of(engine.tokenizer, question.messages())
    result = engine.generate(prompt, documents=question.documents, reuse="off", params=params)
    logits = engine.logits(prompt, result.token_ids[:-1], documents=question.documents, reuse="off")
    return Answered(
        token_ids=result.token_ids,
        text=result.text,
        logits=logits,
        ttft_ms=result.ttft_ms,
        input_tokens=result.usage.input_tokens,
        f1=f1(result.text, question.answers) if question.answers else None,
        correct=answers(result.text, question.answers) if question.answers else None,
    )


def compare(
    engine: KVBoost,
    question: EvalPrompt,
    reference: Answered,
    strategy: RepairStrategy,
    ratio: float,
    full_below: int = 0,
) -> Comparison:
    """Answer by reuse, and compare; the question's documents are warm already.

    Raises:
        RuntimeError: nothing was reused, or the prompts differ, so that the figures would say nothing about reuse.
    """
    options: dict[str, Any] = {
        "documents": question.documents,
        "repair": strategy,
        "recompute_ratio": ratio,
        "full_below": full_below,
        "reuse": "blend",
        "strict": True,
    }
    params = GenerationParams(max_new_tokens=len(reference.token_ids))
    prompt = prompt_of(engine.tokenizer, question.messages())
    result = engine.generate(prompt, params=params, **options)
    usage = result.usage
    if not usage.cached_tokens and strategy.name != "full" and not full_below:
        raise RuntimeError(f"{strategy.name}: no token was reused; were the documents warmed?")
    if usage.input_tokens != reference.input_tokens:
        raise RuntimeError(f"{usage.input_tokens} prompt tokens, the reference had {reference.input_tokens}")
    ours = engine.logits(prompt, reference.token_ids[:-1], **options)
    kl = kl_per_token(reference.logits, ours)
    return Comparison(
        kl_first=float(kl[0]),
        kl_mean=float(kl.mean()),
        agreement=float((reference.logits.argmax(-1) == ours.argmax(-1)).float().mean()),
        identical=result.token_ids == reference.token_ids,
        text=result.text,
        f1=f1(result.text, question.answers) if question.answers else None,
        correct=answers(result.text, question.answers) if question.answers else None,
        ttft_ms=result.ttft_ms,
        cached_tokens=usage.cached_tokens,
        recomputed_tokens=usage.recomputed_tokens,
        input_tokens=usage.input_tokens,
        first_logits=ours[0],
    )
