"""Results of the engine as LangChain's messages and generations."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, GenerationChunk

from kvboost_rag.adapters.result_summary import cache_read_tokens, summary, usage_dict
from kvboost_rag.adapters.tool_calls import AnswerStream, ParsedAnswer, parse_tool_calls
from kvboost_rag.datamodels import GenerationResult, StreamEvent


def usage_metadata(result: GenerationResult) -> UsageMetadata:
    """Token counts; `cache_read`: KV that was there before the call, `cache_creation`: KV stored during it."""
    details = InputTokenDetails(cache_read=cache_read_tokens(result), cache_creation=result.usage.created_tokens)
    return UsageMetadata(  # type: ignore[typeddict-item]  # output_token_details need not be there
        input_tokens=result.usage.input_tokens,
        output_tokens=result.usage.output_tokens,
        total_tokens=result.usage.input_tokens + result.usage.output_tokens,
        input_token_details=details,
    )


def metadata(result: GenerationResult, model_name: str) -> dict[str, Any]:
    """What stands in `response_metadata` and `generation_info`."""
    return {
        "model_name": model_name,
        "model_provider": "kvboost",
        "finish_reason": result.finish_reason,
        "kvboost": summary(result),
    }


def llm_metadata(result: GenerationResult, model_name: str) -> dict[str, Any]:
    """`generation_info` of a string model, which has no place of its own for usage."""
    return metadata(result, model_name) | {"token_usage": usage_dict(result)}


def chat_generation(result: GenerationResult, model_name: str, tool_names: Collection[str]) -> ChatGeneration:
    """A whole answer, tool calls taken out of its text."""
    parsed = parse_tool_calls(result.text, tool_names)
    message = AIMessage(
        content=parsed.text,
        tool_calls=[tool_call(name=c.name, args=c.arguments, id=c.call_id or _new_id()) for c in parsed.calls],
        invalid_tool_calls=[
            invalid_tool_call(name=None, args=c.text, id=_new_id(), error=c.error) for c in parsed.invalid
        ],
        usage_metadata=usage_metadata(result),
        response_metadata=metadata(result, model_name),
    )
    return ChatGeneration(message=message, generation_info={"finish_reason": result.finish_reason})


class ChatChunks:
    """Stream events as chunks; merged, they are the message of `chat_generation`.

    Tool calls come in one piece after the text, usage and metadata with the last chunk only (they would add up).
    """

    def __init__(self, model_name: str, tool_names: Collection[str]) -> None:
        self._model_name = model_name
        self._answer = AnswerStream(tool_names)

    def of(self, event: StreamEvent) -> Iterator[ChatGenerationChunk]:
        """The chunks that an event gives rise to, often none."""
        text = self._answer.push(event.delta)
        if text:
            yield ChatGenerationChunk(message=AIMessageChunk(content=text))
        if event.result is not None:
            yield from self._last(event.result)

    def _last(self, result: GenerationResult) -> Iterator[ChatGenerationChunk]:
        text, parsed = self._answer.finish()
        if text or parsed.calls or parsed.invalid:
            yield ChatGenerationChunk(message=AIMessageChunk(content=text, tool_call_chunks=_call_chunks(parsed)))
        last = AIMessageChunk(
            content="",
            usage_metadata=usage_metadata(result),
            response_metadata=metadata(result, self._model_name),
            chunk_position="last",
        )
        yield ChatGenerationChunk(message=last, generation_info={"finish_reason": result.finish_reason})


def text_chunk(event: StreamEvent, model_name: str) -> GenerationChunk:
    """A piece of a string model's answer."""
    info = llm_metadata(event.result, model_name) if event.result is not None else None
    return GenerationChunk(text=event.delta, generation_info=info)


def _call_chunks(parsed: ParsedAnswer) -> list[Any]:
    chunks = [
        tool_call_chunk(
            name=c.name, args=json.dumps(c.arguments, ensure_ascii=False), id=c.call_id or _new_id(), index=i
        )
        for i, c in enumerate(parsed.calls)
    ]
    # LangChain makes an invalid call of a chunk whose arguments are not JSON.
    return chunks + [
        tool_call_chunk(name=None, args=c.text, id=_new_id(), index=len(chunks) + i)
        for i, c in enumerate(parsed.invalid)
    ]


def _new_id() -> str:
    """Nine letters and digits: what the strictest chat templates accept."""
    return uuid.uuid4().hex[:9]
