"""A body's parameters as calls of the engine: one for each answer that is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost_rag.adapters import constrained
from kvboost_rag.adapters.tool_choice import chosen_tools
from kvboost_rag.config import GenerationParams
from kvboost_rag.engine import KVBoost
from kvboost_rag.server.bodies import ChatBody, CompletionBody, Generation
from kvboost_rag.server.errors import refused
from kvboost_rag.server.processors import LogitBias, LogprobRecord, OpenAIPenalties

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True)
class Call:
    """One answer to be computed.

    Attributes:
        prompt: text or chat messages.
        params: of decoding, with processors that belong to this answer alone.
        options: further ones for `KVBoost.stream`.
        tool_names: functions whose calls are looked for in the answer.
        parallel: whether more than one call counts.
        record: log probabilities of the answer's tokens, where they were asked for.
    """

    prompt: str | list[dict[str, Any]]
    params: GenerationParams
    options: Mapping[str, Any]
    tool_names: tuple[str, ...] = ()
    parallel: bool = True
    record: LogprobRecord | None = None


def chat_calls(engine: KVBoost, body: ChatBody, options: Mapping[str, Any], answer_tokens: int) -> list[Call]:
    """The calls of a chat completion.

    Raises:
        ApiError, ConfigError: a parameter that cannot be honoured.
    """
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise refused("max_tokens", "give it or max_completion_tokens, not both", "invalid_value")
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", "needs logprobs: true", "invalid_value")
    tools, form = _tools_and_form(body)
    length = body.max_tokens or body.max_completion_tokens or answer_tokens
    messages = [_message(m, i) for i, m in enumerate(body.messages)]
    options = {**options, "documents": hints(body.documents), "template": {"tools": tools} if tools else None}
    names = tuple(tool["function"]["name"] for tool in tools)
    calls = []
    for number in range(body.n or 1):
        record = LogprobRecord(body.top_logprobs or 0) if body.logprobs else None
        params = _params(engine, body, number, length, record, form)
        calls.append(Call(messages, params, options, names, body.parallel_tool_calls is not False, record))
    return calls


def completion_calls(
    engine: KVBoost, body: CompletionBody, options: Mapping[str, Any], answer_tokens: int
) -> list[Call]:
    """The calls of a text completion: `n` for each prompt.

    Raises:
        ApiError, ConfigError: a parameter that cannot be honoured.
    """
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    options = {**options, "documents": hints(body.documents)}
    calls = []
    for prompt in prompts:
        if not prompt:
            raise refused("prompt", "is empty: there is nothing to go on from", "invalid_value")
        for number in range(body.n or 1):
            record = LogprobRecord(body.logprobs) if body.logprobs is not None else None
            params = _params(engine, body, number, body.max_tokens or answer_tokens, record, None)
            calls.append(Call(prompt, params, options, record=record))
    return calls


def hints(documents: Sequence[str | dict[str, Any]] | None) -> list[str]:
    """Texts of `documents`: strings, or objects with `text`, `page_content` or `content`."""
    texts = []
    for number, document in enumerate(documents or ()):
        keys = ("text", "page_content", "content")
        text = document if isinstance(document, str) else next((document[k] for k in keys if k in document), None)
        if not isinstance(text, str):
            raise refused("documents", f"documents[{number}] has no text", "invalid_value")
        texts.append(text)
    return texts


def _message(message: dict[str, Any], number: int) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise refused("messages", f"messages[{number}].role is {role!r}; known: {', '.join(_ROLES)}", "invalid_value")
    known = {"developer": "system", "function": "tool"}
    return {k: v for k, v in message.items() if v is not None or k == "content"} | {"role": known.get(role, role)}


def _tools_and_form(body: ChatBody) -> tuple[list[Any], constrained.Form | None]:
    """The tools to offer, and what form the answer must have."""
    if not body.tools:
        form = constrained.of_response_format(body.response_format)
        if body.tool_choice not in (None, "none", "auto"):
            raise refused("tool_choice", "there are no tools to choose from", "invalid_value")
        return [], form
    try:
        tools = chosen_tools(body.tools, body.tool_choice)
    except ValueError as error:
        raise refused("tool_choice" if body.tool_choice else "tools", str(error), "invalid_value") from None
    forced = body.tool_choice == "required" or isinstance(body.tool_choice, dict)
    form = constrained.of_response_format(body.response_format, tools)
    if forced and form is not None:
        raise refused("response_format", "the answer is to be a tool call already", "invalid_value")
    return [dict(tool) for tool in tools], constrained.tool_call(tools) if forced else form


def _params(
    engine: KVBoost,
    body: Generation,
    number: int,
    length: int,
    record: LogprobRecord | None,
    form: constrained.Form | None,
) -> GenerationParams:
    """Parameters of answer `number`. Without a temperature, or a `top_p` alone, it is greedy."""
    extra: dict[str, Any] = {"logits_processor": _processors(engine, body, record, form)}
    if record is not None:
        extra["stopping_criteria"] = [record.criterion()]
    if body.min_p is not None:
        extra["min_p"] = body.min_p
    asked = any(value is not None for value in (body.top_p, body.top_k, body.min_p))
    sample = body.temperature > 0 if body.temperature is not None else asked
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return GenerationParams(
        max_new_tokens=length,
        do_sample=sample,
        temperature=body.temperature if sample else None,
        top_p=body.top_p if sample else None,
        top_k=(body.top_k or 0) if sample else None,
        repetition_penalty=body.repetition_penalty,
        seed=None if body.seed is None else (body.seed + number) % 2**63,
        stop=stop,
        extra=extra,
    )


def _processors(
    engine: KVBoost, body: Generation, record: LogprobRecord | None, form: constrained.Form | None
) -> list[Any]:
    """In the order in which they see the logits."""
    made: list[Any] = [record.processor()] if record is not None else []
    if body.presence_penalty or body.frequency_penalty:
        made.append(OpenAIPenalties(body.presence_penalty or 0.0, body.frequency_penalty or 0.0))
    if body.logit_bias:
        made.append(LogitBias(_bias(body.logit_bias, engine.model.config.get_text_config(decoder=True).vocab_size)))
    if form is not None:
        made.append(constrained.processor(form, engine.tokenizer, engine.eos_token_ids))
    return made


def _bias(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    bias = {}
    for token, value in given.items():
        if not token.isdecimal() or int(token) >= vocab_size:
            raise refused(
                "logit_bias", f"{token!r} is no token id of this model (0 to {vocab_size - 1})", "invalid_value"
            )
        bias[int(token)] = value
    return bias
