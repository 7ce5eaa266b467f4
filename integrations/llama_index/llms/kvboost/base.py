"""KVBoostLLM: a local Hugging Face model that takes the KV of known documents from a store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.llms.kvboost.arguments import KVBoostArguments
from llama_index.llms.kvboost.calls import Call, CallDefaults, ChatTemplate
from llama_index.llms.kvboost.chat_room import memory_window
from llama_index.llms.kvboost.responses import chat_response, completion

from kvboost_rag.adapters.generation_kwargs import merge_params
from kvboost_rag.config import GenerationParams
from kvboost_rag.prompt.chat_template import supports_tools

logger = logging.getLogger(__name__)


class KVBoostLLM(KVBoostArguments):
    """A local Hugging Face model, with the KV of documents taken from a store instead of computed again.

    Takes the arguments of `HuggingFaceLLM`, and in place of a loaded model also an engine. Nothing is loaded until
    something is asked for; equal instances share one model. Prompts stay what they are: documents that were warmed
    (`KVWarm`) or retrieved (`KVPrefetchPostprocessor`) are recognised inside them.

    Examples:
        ```python
        from llama_index.llms.kvboost import KVBoostLLM

        llm = KVBoostLLM(model_name="Qwen/Qwen2.5-1.5B-Instruct", store="kv-store", max_new_tokens=128)
        response = llm.complete("The capital of France is")
        print(response.text, response.raw["usage"], response.raw["kvboost"])
        ```

    Every call takes, beside the generation parameters of transformers (`max_new_tokens`, `temperature`, `stop`, …):
    `documents` (texts or nodes that may stand in this prompt and are to be reused; they add no text),
    `reuse`, `repair`, `recompute_ratio`, `settle`, `namespace`, `strict`, and in chats `tools` and
    `chat_template_kwargs`.

    Raises:
        TypeError, ValueError: from the constructor, an unknown argument, or no model named.
        kvboost_rag.models.load.ModelLoadError: at first use, the model cannot be loaded.
        kvboost_rag.serving.decode.ContextOverflowError: from a call, the prompt does not fit into the context.
    """

    @classmethod
    def class_name(cls) -> str:
        """Name used in serialisation."""
        return "KVBoost_LLM"

    @property
    def engine(self) -> Any:
        """The shared `kvboost_rag.KVBoost`; loaded when first asked for."""
        return self._spec.get()

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans with. Loads the model.

        Unless `context_window` was given, the window of a chat model is the model's without room for an answer and for
        what the template writes around each message: a `ChatMemoryBuffer` fills three quarters of it, and counts texts
        alone.
        """
        engine, wanted = self.engine, self.context_window
        limit = engine.context_tokens
        if wanted is not None and limit is not None and wanted > limit:
            logger.warning("context_window=%d is more than the model's %d, which counts", wanted, limit)
            self.context_window = wanted = limit
        has_template = bool(engine.tokenizer.chat_template)
        is_chat_model = has_template if self.is_chat_model is None else self.is_chat_model
        calls_functions = self.is_function_calling_model
        if calls_functions is None:
            calls_functions = is_chat_model and supports_tools(engine.tokenizer)
        if wanted is None and limit is not None and is_chat_model:
            limit = memory_window(engine.tokens, limit, self.max_new_tokens)
        return LLMMetadata(
            context_window=wanted or limit or DEFAULT_CONTEXT_WINDOW,
            num_output=self.max_new_tokens,
            is_chat_model=is_chat_model,
            is_function_calling_model=bool(calls_functions),
            model_name=self.model_name,
        )

    def to_payload(self) -> dict[str, Any]:
        """What events carry about this model. Never loads it, so that async callers are not held up."""
        if self._spec.peek() is None:
            return {"class_name": self.class_name(), "model_name": self.model_name, "num_output": self.max_new_tokens}
        return super().to_payload()

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, for `Settings.tokenizer` and token counters."""
        return list(self.engine.registry.text_ids(text, self.engine.config.namespace_or_own(self.namespace)))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue a text; unless it is `formatted`, the wrapper and system prompts are put around it first."""
        return self._completion_call(prompt, formatted, kwargs).answer(completion, self.model_name)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """`complete`, piece by piece. Closing the generator stops the model."""
        return self._completion_call(prompt, formatted, kwargs).stream(completion, self.model_name)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """`complete` without blocking the event loop. Cancelling the task stops the model."""
        return await self._completion_call(prompt, formatted, kwargs).aanswer(completion, self.model_name)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """`stream_complete` without blocking the event loop."""
        return self._completion_call(prompt, formatted, kwargs).astream(completion, self.model_name)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation, through the tokenizer's chat template (or `messages_to_prompt` if one was given)."""
        return self._chat_call(messages, kwargs).answer(chat_response, self.model_name)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """`chat`, piece by piece. Closing the generator stops the model."""
        return self._chat_call(messages, kwargs).stream(chat_response, self.model_name)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` without blocking the event loop. Cancelling the task stops the model."""
        return await self._chat_call(messages, kwargs).aanswer(chat_response, self.model_name)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """`stream_chat` without blocking the event loop."""
        return self._chat_call(messages, kwargs).astream(chat_response, self.model_name)

    def _completion_call(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> Call:
        return self._defaults().call(prompt if formatted else self._wrapped(prompt), kwargs)

    def _chat_call(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> Call:
        to_prompt = self.messages_to_prompt
        if to_prompt is None or isinstance(to_prompt, ChatTemplate):
            return self._defaults().call(messages, kwargs)
        return self._defaults().call(to_prompt(messages), kwargs)

    def _wrapped(self, prompt: str) -> str:
        """The one way in which a bare prompt becomes a formatted one, streaming or not."""
        text = self.query_wrapper_prompt.format(query_str=prompt)
        to_prompt = self.completion_to_prompt
        if to_prompt is not None and to_prompt is not default_completion_to_prompt:
            return to_prompt(text)
        return f"{self.system_prompt} {text}" if self.system_prompt else text

    def _defaults(self) -> CallDefaults:
        base = GenerationParams(max_new_tokens=self.max_new_tokens, stop_token_ids=tuple(self.stopping_ids))
        params = merge_params(base, self.generate_kwargs)
        return CallDefaults(self._spec, params, self._reuse_settings(), self.chat_template_kwargs)
