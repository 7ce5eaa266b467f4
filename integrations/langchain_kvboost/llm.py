"""KVBoostLLM: a string-in, string-out model that runs in this process and takes documents' KV from a store."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LangSmithParams
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import Runnable
from pydantic import PrivateAttr

from kvboost_rag.adapters.aio import iterate
from kvboost_rag.adapters.result_summary import usage_dict
from kvboost_rag.datamodels import GenerationResult, StreamEvent
from langchain_kvboost.identity import plain
from langchain_kvboost.messages import document_hints
from langchain_kvboost.outputs import llm_metadata, text_chunk
from langchain_kvboost.parameters import KVBoostParameters

_OF_THE_RUN = ("tags", "metadata", "run_name", "run_id", "documents")
"""Keywords of a call that no answer depends on."""


class KVBoostLLM(KVBoostParameters, BaseLLM):
    """Local completion model with document-level KV reuse, in the place of `HuggingFacePipeline`.

    The prompt is continued as it is, without a chat template; the answer never repeats it. Prompts of a batch are
    answered one after the other by the one model. For instruction-tuned models use `ChatKVBoost`.

    Instantiate:
        `KVBoostLLM.from_model_id("gpt2", task="text-generation", pipeline_kwargs={"max_new_tokens": 10})`,
        `KVBoostLLM(pipeline=pipe)` or `KVBoostLLM(model="…", store="./kv")`. See `KVBoostParameters`.
    """

    _call: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "kvboost"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return super()._identifying_params | ({"call": self._call} if self._call else {})

    def generate(
        self, prompts: list[str], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        """As in LangChain; its cache tells apart what was asked for in the call too, not only by the object."""
        return super(KVBoostLLM, self._told(kwargs)).generate(prompts, stop, callbacks, **kwargs)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        """As `generate`."""
        return await super(KVBoostLLM, self._told(kwargs)).agenerate(prompts, stop, callbacks, **kwargs)

    def batch(
        self, inputs: list[Any], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """As in LangChain; with `return_exceptions` an input that fails costs its own answer, not all of them."""
        if return_exceptions:
            return Runnable.batch(self, inputs, config, return_exceptions=True, **kwargs)
        return super().batch(inputs, config, **kwargs)

    async def abatch(
        self, inputs: list[Any], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """As `batch`."""
        if return_exceptions:
            return await Runnable.abatch(self, inputs, config, return_exceptions=True, **kwargs)
        return await super().abatch(inputs, config, **kwargs)

    def _told(self, kwargs: Mapping[str, Any]) -> KVBoostLLM:
        """This object, or a copy that knows what a call asks for and an answer depends on."""
        call = {name: plain(value) for name, value in sorted(kwargs.items()) if name not in _OF_THE_RUN}
        if not call:
            return self
        copy = self.model_copy()
        copy._call = call
        return copy

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._ls_params("llm", stop, kwargs)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        results = []
        for prompt in prompts:
            *_, last = self._prompt_events(prompt, stop, kwargs)
            results.append(last.result)
        return self._llm_result(results)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        results = []
        for prompt in prompts:
            last = None
            async with aclosing(self._aprompt_events(prompt, stop, kwargs)) as events:
                async for event in events:
                    last = event
            results.append(last.result if last else None)
        return self._llm_result(results)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with closing(self._prompt_events(prompt, stop, kwargs)) as events:
            for event in events:
                chunk = text_chunk(event, self.model_name)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        async with aclosing(self._aprompt_events(prompt, stop, kwargs)) as events:
            async for event in events:
                chunk = text_chunk(event, self.model_name)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _prompt_events(
        self,
        prompt: str,
        stop: Sequence[str] | None,
        kwargs: dict[str, Any],
        cancelled: threading.Event | None = None,
    ) -> Generator[StreamEvent, None, None]:
        call = dict(kwargs)
        return self._events(prompt, stop, document_hints(call.pop("documents", None)), call, cancelled)

    def _aprompt_events(
        self, prompt: str, stop: Sequence[str] | None, kwargs: dict[str, Any]
    ) -> AsyncGenerator[StreamEvent, None]:
        return iterate(partial(self._prompt_events, prompt, stop, kwargs))

    def _llm_result(self, results: Sequence[GenerationResult | None]) -> LLMResult:
        generations, usage = [], {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        for result in results:
            if result is None:
                raise RuntimeError("the request ended without a result")
            generations.append([Generation(text=result.text, generation_info=llm_metadata(result, self.model_name))])
            usage = {name: count + usage_dict(result)[name] for name, count in usage.items()}
        return LLMResult(generations=generations, llm_output={"model_name": self.model_name, "token_usage": usage})
