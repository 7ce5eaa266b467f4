"""Chat messages to prompt text, through the tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvboost_rag.prompt.template_fallbacks import Abilities, fit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTENT_MARK = "KVBOOSTUSERCONTENT"
_ABILITIES: WeakKeyDictionary[Any, tuple[str, Abilities]] = WeakKeyDictionary()


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    documents: Sequence[str | Mapping[str, str]] | None = None,
    **template_kwargs: Any,
) -> str:
    """The prompt text of `messages`, special tokens written out.

    Consecutive messages of one role are merged only where the template refuses them as they are; what it would drop
    (tools, tool calls, tool results, system text) is written as text (`template_fallbacks`).

    Args:
        messages: `{"role": …, "content": …}`; content is a string, None (tool calls) or a list of text blocks.
        tools, documents: passed to the template; one that knows no documents ignores them. A plain string becomes
            `{"title": "", "text": …}`, which is what templates read.
        template_kwargs: `add_generation_prompt` and whatever else the template reads.

    Raises:
        TypeError: messages are not a list of mappings, or content is not text.
        ValueError: no message, no chat template, or the template refused the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "this tokenizer has no chat template, so chat messages cannot be rendered: pass the prompt as one string, "
            "set tokenizer.chat_template, or load the instruction-tuned variant of the model"
        )
    plain = [_plain_message(message) for message in _checked_list(messages)]
    if documents is not None:
        documents = [{"title": "", "text": doc} if isinstance(doc, str) else dict(doc) for doc in documents]

    if tools or any(message["role"] in ("system", "tool") or message.get("tool_calls") for message in plain):
        plain, tools = fit(plain, tools, template_abilities(tokenizer))

    def render(conversation: list[dict[str, Any]]) -> str:
        rendered = tokenizer.apply_chat_template(
            conversation,
            tools=list(tools) if tools else None,
            documents=documents,
            tokenize=False,
            **template_kwargs,
        )
        return str(rendered)

    return _render_or_merge(render, plain)


def template_abilities(tokenizer: PreTrainedTokenizerBase) -> Abilities:
    """What the chat template writes by itself; found once per tokenizer and template."""
    template = str(tokenizer.chat_template)
    known = _ABILITIES.get(tokenizer)
    if known is None or known[0] != template:

        def render(conversation: list[dict[str, Any]], tools: Sequence[Any] | None) -> str:
            options: dict[str, Any] = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
            return str(tokenizer.apply_chat_template(conversation, **options))

        known = _ABILITIES[tokenizer] = (template, Abilities.of(render))
    return known[1]


def user_message_head(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """What the chat template writes before the content of a first user message; None without a usable template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        rendered = render_messages(tokenizer, [{"role": "user", "content": _CONTENT_MARK}], add_generation_prompt=False)
    except ValueError:
        return None
    head, mark, _ = rendered.partition(_CONTENT_MARK)
    return head if mark else None


def supports_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template itself writes offered tools into the prompt."""
    return bool(getattr(tokenizer, "chat_template", None)) and template_abilities(tokenizer).tools


def merge_same_role(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Consecutive messages of one role joined by a line break; those with more than text content stay apart."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        previous = merged[-1] if merged else None
        if previous and previous["role"] == message["role"] and _is_text_only(previous) and _is_text_only(message):
            previous["content"] += "\n" + message["content"]
        else:
            merged.append(dict(message))
    return merged


def _render_or_merge(render: Any, messages: list[dict[str, Any]]) -> str:
    from jinja2.exceptions import TemplateError

    merged = merge_same_role(messages)
    for conversation in [messages, merged] if len(merged) < len(messages) else [messages]:
        try:
            return str(render(conversation))
        except (TemplateError, TypeError) as error:
            refusal = error
    raise ValueError(
        f"the chat template cannot render these messages ({refusal}); roles in order: "
        f"{', '.join(str(message['role']) for message in messages)}"
    ) from refusal


def _checked_list(messages: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of {{'role': …, 'content': …}}, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages is empty: there is nothing to answer")
    return messages


def _plain_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise TypeError(f"a chat message must be a mapping with 'role' and 'content', got {message!r:.200}")
    return {**message, "content": _plain_content(message.get("content"))}


def _plain_content(content: Any) -> Any:
    """Text blocks joined without anything between them, as templates of multimodal models write them."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise TypeError(f"message content must be text, got {type(content).__name__}")
    texts = []
    for block in content:
        text = block.get("text") if isinstance(block, Mapping) else block
        if not isinstance(text, str):
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            raise TypeError(f"only text blocks can be used in message content, got a block of type {kind!r}")
        texts.append(text)
    return "".join(texts)


def _is_text_only(message: Mapping[str, Any]) -> bool:
    return set(message) <= {"role", "content"} and isinstance(message.get("content"), str)
