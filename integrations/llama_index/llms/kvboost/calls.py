"""One call of the model: from LlamaIndex' arguments to a request of the engine, and its answer in four shapes."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.kvboost.messages import cited_texts, template_messages
from llama_index.llms.kvboost.nodes import node_texts
from llama_index.llms.kvboost.responses import Collector, Make, Response, whole

from kvboost_rag.adapters.aio import iterate
from kvboost_rag.adapters.generation_kwargs import merge_params
from kvboost_rag.adapters.registry import EngineSpec
from kvboost_rag.adapters.reuse_settings import check_reuse, settles
from kvboost_rag.adapters.tool_choice import chosen_tools
from kvboost_rag.config import GenerationParams
from kvboost_rag.datamodels import GenerationResult, StreamEvent

REUSE_SETTINGS = ("reuse", "repair", "recompute_ratio", "settle", "adapter", "namespace", "strict")
"""Fields of `ReuseConfig` that a model or a single call may set."""


@dataclass(frozen=True)
class ChatTemplate:
    """`messages_to_prompt` by the tokenizer's chat template; without one, roles and contents line by line."""

    spec: EngineSpec

    def __call__(self, messages: Sequence[ChatMessage]) -> str:
        engine = self.spec.get()
        if not engine.tokenizer.chat_template:
            return generic_messages_to_prompt(messages)
        return engine.tokens.render(template_messages(messages))


@dataclass(frozen=True)
class Call:
    """What is asked of the engine.

    Attributes:
        prompt: text, or messages for the chat template.
        options: keyword arguments of `KVBoost.stream`.
        tool_names: tools that were offered.
    """

    spec: EngineSpec
    prompt: str | Sequence[ChatMessage]
    options: Mapping[str, Any]
    tool_names: tuple[str, ...] = field(default=())

    def events(self, cancelled: threading.Event | None = None) -> Generator[StreamEvent, None, None]:
        """The engine's events; blocks while the model is loaded and computes. Setting `cancelled` ends them.

        Raises:
            ValueError: tools, but no chat template that could write them into the prompt.
        """
        engine = self.spec.get()
        prompt: Any = self.prompt
        options = dict(self.options)
        if self.tool_names and (isinstance(prompt, str) or not engine.tokenizer.chat_template):
            raise ValueError(
                "tools are written into the prompt by the tokenizer's chat template, and this call does not use one: "
                "leave out messages_to_prompt, set tokenizer.chat_template, or use a ReActAgent"
            )
        if not isinstance(prompt, str):
            options["settle"] = settles(engine, options["settle"])
            has_template = bool(engine.tokenizer.chat_template)
            prompt = template_messages(prompt) if has_template else generic_messages_to_prompt(prompt)
        with closing(engine.stream(prompt, cancelled=cancelled, **options)) as events:
            yield from events

    def answer(self, make: Make[Response], model_name: str) -> Response:
        """The whole answer."""
        return whole(make, _last(list(self.events())), model_name, self.tool_names)

    def stream(self, make: Make[Response], model_name: str) -> Generator[Response, None, None]:
        """The answer piece by piece."""
        collector = Collector(make, model_name, self.tool_names)
        with closing(self.events()) as events:
            for event in events:
                if (response := collector.push(event)) is not None:
                    yield response

    async def aanswer(self, make: Make[Response], model_name: str) -> Response:
        """The whole answer; the event loop stays free."""
        async with aclosing(iterate(self.events)) as events:
            collected = [event async for event in events]
        return whole(make, _last(collected), model_name, self.tool_names)

    async def astream(self, make: Make[Response], model_name: str) -> AsyncGenerator[Response, None]:
        """The answer piece by piece; the event loop stays free."""
        collector = Collector(make, model_name, self.tool_names)
        async with aclosing(iterate(self.events)) as events:
            async for event in events:
                if (response := collector.push(event)) is not None:
                    yield response


def _last(events: Sequence[StreamEvent]) -> GenerationResult:
    result = events[-1].result if events else None
    if result is None:
        raise RuntimeError("the request ended without a result")
    return result


@dataclass(frozen=True)
class CallDefaults:
    """What a model's constructor fixed for all of its calls."""

    spec: EngineSpec
    params: GenerationParams
    reuse: Mapping[str, Any]
    template: Mapping[str, Any]

    def call(self, prompt: str | Sequence[ChatMessage], given: Mapping[str, Any]) -> Call:
        """A call with the keywords it was given.

        Raises:
            ConfigError: a value that cannot be used.
        """
        own = dict(given)
        documents = node_texts(own.pop("documents", None) or ())
        given_settings = {name: own.pop(name, None) for name in REUSE_SETTINGS}
        settings = dict(self.reuse) | {name: value for name, value in given_settings.items() if value is not None}
        check_reuse(settings)
        template = dict(self.template) | dict(own.pop("chat_template_kwargs", None) or {})
        tools = chosen_tools(own.pop("tools", None) or (), own.pop("tool_choice", None))
        options: dict[str, Any] = {"params": merge_params(self.params, own), **settings}
        if not isinstance(prompt, str):
            documents += [text for text in cited_texts(prompt) if text not in documents]
            options["template"] = template | ({"tools": tools} if tools else {})
        options["documents"] = documents
        return Call(self.spec, prompt, options, tuple(tool["function"]["name"] for tool in tools))
