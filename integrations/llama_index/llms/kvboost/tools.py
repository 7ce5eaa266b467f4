"""Function calling, where the chat template tells the model about tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, TextBlock, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool


class ToolCalling(FunctionCallingLLM):
    """What `FunctionCallingLLM` asks for, over `chat(tools=…)`."""

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Arguments for `chat`. `tool_required` cannot be enforced; an answer without a call is an error later on."""
        messages = list(chat_history or [])
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        if user_msg is not None:
            messages.append(user_msg)
        specs = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        return {"messages": messages, "tools": specs, **kwargs}

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        """Only the first call is kept where one is asked for."""
        if not allow_parallel_tool_calls:
            calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
            dropped = {id(block) for block in calls[1:]}
            response.message.blocks = [block for block in response.message.blocks if id(block) not in dropped]
            if "tool_calls" in response.message.additional_kwargs:
                del response.message.additional_kwargs["tool_calls"][1:]
        return response

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls in an answer.

        Raises:
            ValueError: there is none and `error_on_no_tool_call` is set.
        """
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            text = "".join(block.text for block in response.message.blocks if isinstance(block, TextBlock))
            raise ValueError(f"the model answered without calling a tool: {text[:200]!r}")
        return [
            ToolSelection(tool_id=call.tool_call_id or "", tool_name=call.tool_name, tool_kwargs=_kwargs(call))
            for call in calls
        ]


def _kwargs(call: ToolCallBlock) -> dict[str, Any]:
    return json.loads(call.tool_kwargs) if isinstance(call.tool_kwargs, str) else dict(call.tool_kwargs)
