"""ChatKVBoost: a chat model that runs in this process and takes documents' KV from a store."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, model_validator
from typing_extensions import Self

from kvboost_rag.adapters.aio import iterate
from kvboost_rag.adapters.result_summary import usage_dict
from kvboost_rag.adapters.reuse_settings import settles
from kvboost_rag.adapters.tool_choice import chosen_tools
from kvboost_rag.datamodels import GenerationResult, StreamEvent
from langchain_kvboost.messages import carried_documents, document_hints, template_messages
from langchain_kvboost.outputs import ChatChunks, chat_generation
from langchain_kvboost.parameters import KVBoostParameters
from langchain_kvboost.profile import profile_of
from langchain_kvboost.structured import form_of, structured

if TYPE_CHECKING:
    from kvboost_rag.engine import KVBoost


class ChatKVBoost(KVBoostParameters, BaseChatModel):
    """Local chat model with document-level KV reuse.

    Setup:
        `pip install "kvboost-rag[langchain]"`

    Instantiate:
        `ChatKVBoost(model="Qwen/Qwen2.5-1.5B-Instruct", store="./kv")`, or in the place of `HuggingFacePipeline`:
        `ChatKVBoost.from_model_id("Qwen/Qwen2.5-1.5B-Instruct", task="text-generation", pipeline_kwargs={…})`.
        See `KVBoostParameters` for all parameters.

    Invoke, stream, batch, async:
        As with every chat model. Chunks that the store knows (`KVBoostWarmer`, `KVBoostVectorStore`) are found in the
        prompt by their text. `documents=[…]` in a call or in `bind`, `additional_kwargs["documents"]` of a message and
        documents in `ToolMessage.artifact` name further ones; they add no text.

    Tools:
        `bind_tools` writes tools through the chat template (in words where the template knows none). Whether one is
        called is up to the model, unless `tool_choice` says so (`"any"`, a name): with the extra `structured` the
        answer is then held to a call.

    Structured output:
        `with_structured_output` holds the answer to a schema (extra `structured`), or `response_format` of a call, as
        OpenAI writes it.

    Response metadata:
        `message.usage_metadata["input_token_details"]["cache_read"]`: tokens whose KV came from the store;
        `message.response_metadata["kvboost"]`: hits, repair and times of the call.
    """

    streaming: bool = False
    """Whether `invoke` goes through the streaming path."""

    @model_validator(mode="after")
    def _set_own_profile(self) -> Self:
        """After the model is known; LangChain's own validator runs before that."""
        if self.profile is None:
            self.profile = profile_of(self._spec, self.model_name, self.max_new_tokens)
        return self

    @property
    def engine(self) -> KVBoost:
        """The engine behind this model. What the profile could not say before the model was loaded it says then."""
        engine = super().engine
        if self.profile is not None and "max_input_tokens" not in self.profile:
            self.profile = {**profile_of(self._spec, self.model_name, self.max_new_tokens), **self.profile}
        return engine

    @property
    def _llm_type(self) -> str:
        return "chat-kvboost"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._ls_params("chat", stop, kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        result = None
        for event in self._chat_events(messages, stop, kwargs):
            result = event.result
        return self._chat_result(result, kwargs)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        result = None
        async with aclosing(iterate(partial(self._chat_events, messages, stop, kwargs))) as events:
            async for event in events:
                result = event.result
        return self._chat_result(result, kwargs)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        chunks = ChatChunks(self.model_name, _tool_names(kwargs))
        with closing(self._chat_events(messages, stop, kwargs)) as events:
            for event in events:
                for chunk in chunks.of(event):
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        chunks = ChatChunks(self.model_name, _tool_names(kwargs))
        async with aclosing(iterate(partial(self._chat_events, messages, stop, kwargs))) as events:
            async for event in events:
                for chunk in chunks.of(event):
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools to the model.

        Args:
            tools: as everywhere in LangChain; their schemas become part of the prompt.
            tool_choice: `"none"` offers none; a tool's name offers that one alone and asks for a call of it; `"any"`
                (or `"required"`) asks for a call; everything else leaves the choice to the model.
            kwargs: bound like those of `bind`; OpenAI's `strict` and `parallel_tool_calls` have no effect.

        Raises:
            ValueError: `tool_choice` names a tool that is not there, or a tool is no function (OpenAI's server tools).
        """
        for name in ("strict", "parallel_tool_calls"):
            kwargs.pop(name, None)
        choice = {} if tool_choice is None else {"tool_choice": tool_choice}
        return self.bind(tools=_offered(tools, tool_choice), **choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Answers as objects.

        Args:
            schema: a Pydantic class (its objects come out), a TypedDict or a JSON schema (dicts come out).
            method: `json_schema`: the answer is JSON of the schema; `function_calling`: a call of a tool of that
                schema; `json_mode`: the same as `json_schema`, and any JSON object without a schema.
            include_raw: a dict of `raw`, `parsed` and `parsing_error` comes out, and nothing is raised.
            strict: always so where the extra `structured` is installed.

        Raises:
            ValueError: an unknown method or argument, or no schema where one is needed.
            OutputParserException: (when it runs) what the model wrote does not fit, for example cut off.
        """
        if kwargs:
            raise ValueError(f"with_structured_output knows no {', '.join(sorted(kwargs))}")
        return structured(self, schema, method, include_raw)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that these messages make, chat template and tools included.

        Parts of a conversation that the template refuses (trimming asks about those) are counted message by message,
        each as a prompt of its own: rather too many tokens than too few.
        """
        if not messages:
            return 0
        offered, settings = _offered(tools), self._reuse_config()
        template, plain = {"tools": offered} if offered else None, template_messages(messages)

        def count(*asked: Mapping[str, Any], template: dict[str, Any] | None = None) -> int:
            documents = carried_documents(messages)
            return len(self.engine.token_ids(list(asked), documents=documents, template=template, **settings))

        try:
            return count(*plain, template=template)
        except ValueError:
            empty = {"role": "user", "content": ""}
            texts = (f"{message['content']}{message.get('tool_calls', '')}" for message in plain)
            alone = sum(count({"role": "user", "content": text}) for text in texts)
            return count(empty, template=template) - count(empty) + alone

    def _chat_events(
        self,
        messages: list[BaseMessage],
        stop: Sequence[str] | None,
        kwargs: dict[str, Any],
        cancelled: threading.Event | None = None,
    ) -> Generator[StreamEvent, None, None]:
        offered = _offered(kwargs.get("tools"), kwargs.get("tool_choice"))
        call = kwargs | {
            "tools": offered,
            "form": form_of(offered, kwargs.get("tool_choice"), kwargs.get("response_format")),
        }
        documents = document_hints(call.pop("documents", None)) + carried_documents(messages)
        call["settle"] = settles(self.engine, call.get("settle", self.settle))
        return self._events(template_messages(messages), stop, documents, call, cancelled)

    def _chat_result(self, result: GenerationResult | None, kwargs: dict[str, Any]) -> ChatResult:
        if result is None:
            raise RuntimeError("the request ended without a result")
        generation = chat_generation(result, self.model_name, _tool_names(kwargs))
        return ChatResult(
            generations=[generation], llm_output={"model_name": self.model_name, "token_usage": usage_dict(result)}
        )


def _tool_names(kwargs: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in _offered(kwargs.get("tools"), kwargs.get("tool_choice"))]


def _offered(tools: Sequence[Any] | None, tool_choice: Any = None) -> list[Mapping[str, Any]]:
    """The tools of a call, which `bind` and `invoke` take in every form that `bind_tools` takes."""
    # LangChain's False says nothing; tools are left out with "none".
    return chosen_tools([convert_to_openai_tool(tool) for tool in tools or ()], tool_choice or None)
