"""An engine against transformers' own `generate` on the same text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvboost_rag import GenerationParams, KVBoost

WAYS: dict[str, dict[str, Any]] = {"off": {"reuse": "off"}, "full": {"repair": "full"}, "exact": {"reuse": "exact"}}
"""The ways of answering that give what the plain model gives."""


@dataclass(frozen=True)
class Comparison:
    """One prompt by one way.

    Attributes:
        max_difference: of any logit behind the prompt and behind each token of the stock answer.
        used: the mode that was really used.
    """

    way: str
    num_tokens: int
    same_ids: bool
    same_answer: bool
    max_difference: float
    used: str

    @property
    def holds(self) -> bool:
        """Whether it is the same: ids, greedy answer, logits within 1e-4 (float32)."""
        return self.same_ids and self.same_answer and self.max_difference < 1e-4


def compare(engine: KVBoost, prompt: Any, documents: list[str], answer_tokens: int = 16) -> list[Comparison]:
    """All ways on one prompt (text, or messages for the chat template), whose documents are given.

    The stock side knows nothing of the engine: `tokenizer(text)`, `model.generate`, `model.forward`.
    """
    model, tokenizer, is_text = engine.model, engine.tokenizer, isinstance(prompt, str)
    text = prompt if is_text else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    stock = tokenizer(text, add_special_tokens=is_text, return_tensors="pt").to(model.device)
    prompt_ids = tuple(stock.input_ids[0].tolist())
    whole = model.generate(**stock, max_new_tokens=answer_tokens, do_sample=False)
    answer = whole[0, len(prompt_ids) :].tolist()
    with torch.no_grad():
        expected = model(whole[:, :-1]).logits[0, len(prompt_ids) - 1 :].float()
    found = []
    for way, options in WAYS.items():
        options = {**options, "documents": documents, "strict": True}
        ours = engine.logits(prompt, answer[:-1], **options)
        params = GenerationParams(max_new_tokens=answer_tokens, do_sample=False)
        result = engine.generate(prompt, params=params, settle=False, **options)
        found.append(
            Comparison(
                way,
                len(prompt_ids),
                engine.token_ids(prompt, documents=documents) == prompt_ids
                and result.usage.input_tokens == len(prompt_ids),
                list(result.token_ids) == answer[: len(result.token_ids)] and len(result.token_ids) >= len(answer) - 1,
                float((ours.to(expected.device) - expected).abs().max()),
                result.reuse,
            )
        )
    return found
