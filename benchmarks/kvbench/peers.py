"""What people would use instead. Each is made from the same model object, and told the same documents beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel

from kvbench.contenders import Contender, FirstToken
from kvbench.texts import RagPrompt
from kvboost_rag.prompt.tokens import PromptTokens


def one_token(answer: str, tokens: PromptTokens) -> str:
    """The answer, if it is no more than the first token: a peer that goes on would be timed for all of it."""
    num_tokens = tokens.count(answer)
    if num_tokens > 4:  # one that ends inside a character is several when it is encoded again
        raise ValueError(f"answered with {num_tokens} tokens where one was asked for")
    return answer


class LangChainPipeline(Contender):
    """`HuggingFacePipeline.invoke`."""

    name = "langchain HuggingFacePipeline"

    def __init__(self, model: PreTrainedModel, tokens: PromptTokens) -> None:
        from langchain_huggingface import HuggingFacePipeline
        from transformers import pipeline

        self.tokens, self.device_type = tokens, model.device.type
        # Its own pipeline_kwargs count for `from_model_id` only.
        limits = {"max_new_tokens": 1, "do_sample": False, "return_full_text": False}
        self._llm = HuggingFacePipeline(
            pipeline=pipeline("text-generation", model=model, tokenizer=tokens.tokenizer, **limits)
        )

    def first_token(self, prompt: RagPrompt) -> FirstToken:
        return FirstToken(one_token(self._llm.invoke(prompt.text(self.tokens)), self.tokens))


class LlamaIndexLLM(Contender):
    """`HuggingFaceLLM.complete`."""

    name = "llama-index HuggingFaceLLM"

    def __init__(self, model: PreTrainedModel, tokens: PromptTokens) -> None:
        from llama_index.llms.huggingface import HuggingFaceLLM

        self.tokens, self.device_type = tokens, model.device.type
        self._llm = HuggingFaceLLM(
            model=model,
            tokenizer=tokens.tokenizer,
            context_window=model.config.max_position_embeddings,
            max_new_tokens=1,
            generate_kwargs={"do_sample": False},
            is_chat_model=False,
        )

    def first_token(self, prompt: RagPrompt) -> FirstToken:
        answer = self._llm.complete(prompt.text(self.tokens), formatted=True).text
        return FirstToken(one_token(answer, self.tokens))


class PublishedKVBoost(Contender):
    """The package `kvboost` from PyPI. It stores chunks of a prompt as it answers; `warm` is called per document."""

    def __init__(self, model: PreTrainedModel, tokens: PromptTokens, documents: Sequence[str], strategy: str) -> None:
        from kvboost.engine import InferenceEngine

        self.name = f"kvboost 0.9.0, {strategy}"
        self.tokens, self.device_type = tokens, model.device.type
        self._engine = InferenceEngine(
            model,
            tokens.tokenizer,
            max_cache_bytes=8 << 30,
            max_chunks=4096,
            recompute_strategy=strategy,
            device=model.device.type,
        )
        for document in documents:
            self._engine.warm(document)

    def first_token(self, prompt: RagPrompt) -> FirstToken:
        from kvboost.engine import GenerationMode

        result = self._engine.generate(
            prompt.text(self.tokens),
            max_new_tokens=1,
            mode=GenerationMode.CHUNK_KV_REUSE,
            do_sample=False,
        )
        return FirstToken(one_token(result.output_text, self.tokens), result.prompt_tokens, result.cached_tokens)


class Missing(Contender):
    """A peer that could not be made: its row says why."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self._error = name, error

    def first_token(self, prompt: RagPrompt) -> FirstToken:
        raise self._error


def peers(model: PreTrainedModel, tokens: PromptTokens, documents: Sequence[str]) -> list[Contender]:
    """All of them; those that are not installed, or do not start with these versions, say so in their row."""
    makers: dict[str, Callable[[], Any]] = {
        LangChainPipeline.name: lambda: LangChainPipeline(model, tokens),
        LlamaIndexLLM.name: lambda: LlamaIndexLLM(model, tokens),
        "kvboost 0.9.0, cacheblend": lambda: PublishedKVBoost(model, tokens, documents, "cacheblend"),
        "kvboost 0.9.0, selective": lambda: PublishedKVBoost(model, tokens, documents, "selective"),
    }
    return [_made(name, make) for name, make in makers.items()]


def _made(name: str, make: Callable[[], Contender]) -> Contender:
    try:
        return make()
    except Exception as error:  # whatever a peer does on versions it was not written for
        return Missing(name, error)
