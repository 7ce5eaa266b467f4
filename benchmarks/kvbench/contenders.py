"""Ways to the first token. Each gets the same prompt text; what it did before is said in its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvbench.texts import RagPrompt
from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.prompt.tokens import PromptTokens

FULL = "full prefill (reuse off)"
"""What every ratio is of."""


@dataclass(frozen=True)
class FirstToken:
    """What a contender tells about one call; tokens it cannot tell are 0."""

    token: int | str
    prompt_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    stages_ms: Mapping[str, float] = field(default_factory=dict)


class Contender(ABC):
    """`prepare` is not timed, `first_token` is."""

    name: str
    device_type = "cpu"

    def prepare(self, prompt: RagPrompt) -> None:  # noqa: B027 - most need none
        """What happened before this request, such as the earlier one that filled a cache."""

    @abstractmethod
    def first_token(self, prompt: RagPrompt) -> FirstToken:
        """From the prompt to one generated token in the caller's hand."""

    def synchronise(self) -> None:
        if self.device_type == "cuda":
            torch.cuda.synchronize()


class Ours(Contender):
    """KVBoost with given options.

    Args:
        primed: the very same prompt was answered before (what the exact path is for).
        cold: the documents were never seen, and are named in the call.
        hint: the documents are named in the call, so that those not indexed are stored on the way.
    """

    def __init__(
        self,
        name: str,
        engine: KVBoost,
        *,
        primed: bool = False,
        cold: bool = False,
        hint: bool = False,
        **options: Any,
    ) -> None:
        self.name, self.engine, self.primed, self.cold = name, engine, primed, cold
        self.hint, self.options = hint or cold, options
        self.device_type = engine.model.device.type

    def prepare(self, prompt: RagPrompt) -> None:
        if self.cold and prompt.documents:
            self.engine.evict(prompt.documents)
        if self.primed:
            self.first_token(prompt)

    def first_token(self, prompt: RagPrompt) -> FirstToken:
        text = prompt.text(self.engine.tokens)
        params = GenerationParams(max_new_tokens=1)
        documents = prompt.documents if self.hint else None
        result = self.engine.generate(text, documents=documents, params=params, **self.options)
        usage = result.usage
        return FirstToken(
            result.token_ids[0],
            usage.input_tokens,
            usage.cached_tokens,
            usage.recomputed_tokens,
            dict(result.timings_ms) | {"ttft_ms": result.ttft_ms},
        )


class Plain(Contender):
    """transformers: tokenise, `generate`."""

    name = "transformers generate"

    def __init__(self, model: PreTrainedModel, tokens: PromptTokens) -> None:
        self.model, self.tokens = model, tokens
        self.device_type = model.device.type

    def first_token(self, prompt: RagPrompt) -> FirstToken:
        ids = self._ids(prompt)
        return FirstToken(self._generate(ids), ids.shape[1])

    def _ids(self, prompt: RagPrompt) -> torch.Tensor:
        encoded = self.tokens.tokenizer(prompt.text(self.tokens), return_tensors="pt", add_special_tokens=False)
        return encoded["input_ids"].to(self.model.device)

    def _generate(self, ids: torch.Tensor, **kwargs: Any) -> int:
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, **kwargs
        )
        return int(output[0, ids.shape[1]])


class Oracle(Plain):
    """transformers with everything in front of the question's text already in its cache: the bound for any reuse."""

    name = "oracle (prefix in a transformers cache)"

    def prepare(self, prompt: RagPrompt) -> None:
        from kvboost_rag.models.hf_cache import cache_argument

        ids = self._ids(prompt)
        suffix = prompt.text(self.tokens).partition(prompt.documents[-1])[2] if prompt.documents else ""
        self.prefix_tokens = ids.shape[1] - self.tokens.count(suffix)
        self.cache = DynamicCache()
        self.argument = cache_argument(self.model)
        with torch.no_grad():
            self.model(ids[:, : self.prefix_tokens], logits_to_keep=1, use_cache=True, **{self.argument: self.cache})

    def first_token(self, prompt: RagPrompt) -> FirstToken:
        ids = self._ids(prompt)
        return FirstToken(self._generate(ids, **{self.argument: self.cache}), ids.shape[1], self.prefix_tokens)


class PrefixByHand(Plain):
    """transformers with a cache kept by hand: the longest common beginning with the last prompt is reused.

    One shorter than a tenth of the prompt is not: behind a past, attention runs with a mask, which costs more.
    """

    name = "transformers, last prompt's cache kept by hand"

    def __init__(self, model: PreTrainedModel, tokens: PromptTokens) -> None:
        super().__init__(model, tokens)
        self._held: tuple[torch.Tensor, DynamicCache] | None = None

    def first_token(self, prompt: RagPrompt) -> FirstToken:
        from kvboost_rag.models.hf_cache import cache_argument

        ids = self._ids(prompt)
        common, cache = 0, DynamicCache()
        if self._held is not None:
            old, held = self._held
            length = min(old.shape[1], ids.shape[1] - 1)
            differs = (old[0, :length] != ids[0, :length]).nonzero()
            common = int(differs[0]) if len(differs) else length
            if 10 * common >= ids.shape[1]:
                cache = held
                cache.crop(common - cache.get_seq_length())
            else:
                common = 0
        token = self._generate(ids, **{cache_argument(self.model): cache})
        self._held = (ids, cache)
        return FirstToken(token, ids.shape[1], common)


def strategies(engine: KVBoost) -> list[Contender]:
    """Ours, the rows that every table has."""
    return [
        Ours(FULL, engine, reuse="off"),
        Ours("none", engine, repair="none"),
        Ours("query 5 %", engine, repair="query", recompute_ratio=0.05),
        Ours("cacheblend 15 %", engine, repair="cacheblend", recompute_ratio=0.15),
        Ours("exact, same prompt before", engine, primed=True, reuse="exact"),
    ]
