"""How far rounding alone takes a model from itself: a prompt by full prefill in bfloat16."""

from __future__ import annotations

from typing import Any

from kvbench.cases import Case
from kvbench.summary import UNREUSED
from kvboost_rag import KVBoost
from kvboost_rag.measure.calibrate import Answered, prompt_of, reference_answer
from kvboost_rag.observe.divergence import kl_per_token

ROUNDED = "bfloat16"


def rounded_row(engine: KVBoost, case: Case, reference: Answered, answer_tokens: int) -> dict[str, Any]:
    """One prompt by an engine of the rounded model, against the reference; a line of results."""
    ours = reference_answer(engine, case, answer_tokens)
    prompt = prompt_of(engine.tokenizer, case.messages())
    logits = engine.logits(prompt, reference.token_ids[:-1], documents=case.documents, reuse="off")
    kl = kl_per_token(reference.logits, logits)
    return {
        "dataset": case.dataset,
        "case": case.name,
        "arm": UNREUSED,
        **dict(case.traits),
        "kl_first": float(kl[0]),
        "kl_mean": float(kl.mean()),
        "agreement": float((reference.logits.argmax(-1) == logits.argmax(-1)).float().mean()),
        "identical": ours.token_ids == reference.token_ids,
        "f1": ours.f1,
        "full_f1": reference.f1,
        "correct": ours.correct,
        "full_correct": reference.correct,
        "ttft_ms": ours.ttft_ms,
        "full_ttft_ms": reference.ttft_ms,
        "input_tokens": ours.input_tokens,
        "cached_tokens": 0,
        "recomputed_tokens": ours.input_tokens,
    }
