"""From prompt or messages to segments with the chunks behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvboost_rag.chunks.registry import ChunkRegistry
from kvboost_rag.chunks.served import ServedPrompt, ServedSegment
from kvboost_rag.config import HALF_CHARACTER, lone_surrogate
from kvboost_rag.datamodels import ChunkRecord, Segment, SegmentKind
from kvboost_rag.prompt.segments import KnownTexts, split_prompt
from kvboost_rag.prompt.template_text import TemplateText
from kvboost_rag.prompt.tokens import PromptTokens
from kvboost_rag.stores import StoreError

Messages = Sequence[Mapping[str, Any]]


def document_texts(documents: Sequence[Any] | None) -> list[str]:
    """Texts of explicit documents: strings, or objects with `page_content` or `text`.

    Raises:
        TypeError: something that is neither; the message names its type and place.
        ValueError: a text that is not valid Unicode.
    """
    if documents is None:
        return []
    if isinstance(documents, str):
        raise TypeError("documents must be a list of texts, got one str; write [text]")
    texts = []
    for index, document in enumerate(documents):
        text = document if isinstance(document, str) else None
        for attribute in ("page_content", "text"):
            text = getattr(document, attribute, None) if text is None else text
        if not isinstance(text, str):
            raise TypeError(f"documents[{index}] is a {type(document).__name__}; expected a str")
        if (at := lone_surrogate(text)) is not None:
            raise ValueError(f"documents[{index}] is not valid Unicode: half a character at {at}; {HALF_CHARACTER}")
        texts.append(text)
    return texts


STORE_FAULTS = (OSError, StoreError)
"""What a catalog raises when it cannot be read; everything else that `locate` raises is about the prompt."""


def locate_without_store(
    tokens: PromptTokens, prompt: str | Messages, documents: Sequence[str], template: Mapping[str, Any]
) -> ServedPrompt:
    """The prompt for plain prefill when the catalog cannot be asked; raises as `locate` does."""
    text, markup = _rendered(tokens, prompt, template)
    spans = split_prompt(text, KnownTexts(), documents, markup)
    return ServedPrompt.of(tuple(map(ServedSegment, tokens.segment(spans, rendered=markup is not None))))


def locate(
    registry: ChunkRegistry,
    prompt: str | Messages,
    documents: Sequence[str],
    namespace: str,
    given: Callable[[str], ChunkRecord] | None,
    template: Mapping[str, Any],
) -> ServedPrompt:
    """Find the namespace's chunks in a prompt and tokenise it.

    Args:
        prompt: text, or chat messages that go through the tokenizer's chat template.
        documents: texts that may stand in the prompt and are to be reused, indexed or not; for this call only. A hint:
            they never add text.
        given: makes a chunk of a document that is not indexed; None: such documents are cut out all the same (so that
            the token ids do not depend on it) but have no record.
        template: arguments for the chat template (`tools`, …).

    Raises:
        TypeError, ValueError: there is no usable prompt; the message says what came.
    """
    text, markup = _rendered(registry.tokens, prompt, template)
    while True:
        known = registry.known_texts(namespace)
        spans = split_prompt(text, known, documents, markup)
        keys = [s.key for s in spans if s.key is not None]
        found = registry.store.catalog.get_many(keys)
        gone = [key for key in keys if key not in found]
        if not gone:
            break
        for key in gone:  # removed by another process a moment ago
            known.remove(key)
    own = registry.own if given is not None else _as_it_is
    by_text = {s.text: own(found[s.key]) for s in spans if s.key is not None}
    segments = registry.tokens.segment(spans, rendered=markup is not None)
    records = [_record(s, by_text, given) if given else by_text.get(s.text) for s in segments]
    return ServedPrompt.of(tuple(map(ServedSegment, segments, records)))


def _rendered(
    tokens: PromptTokens, prompt: str | Messages, template: Mapping[str, Any]
) -> tuple[str, TemplateText | None]:
    """The prompt's text, and what a chat template wrote of it."""
    if isinstance(prompt, str):
        return prompt, None
    text = tokens.render(prompt, **template)
    return text, TemplateText(text, prompt, template, tokens)


def _as_it_is(record: ChunkRecord) -> ChunkRecord:
    return record


def _record(
    segment: Segment, by_text: dict[str, ChunkRecord], given: Callable[[str], ChunkRecord]
) -> ChunkRecord | None:
    if segment.kind is not SegmentKind.DOCUMENT:
        return None
    record, end = by_text.get(segment.text), segment.chunk_start + len(segment.token_ids)
    if record is None or record.token_ids[segment.chunk_start : end] != segment.token_ids:
        record = given(segment.text)
    return record
