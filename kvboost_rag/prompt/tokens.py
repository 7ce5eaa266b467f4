"""Text to token ids, one way for warming and answering alike.

Each span of a prompt is tokenised on its own and the ids are spliced, so that a document has the same ids wherever
it stands. Three things would break that and are handled here: tokenizers that put a space before every text they
are given, special tokens that would be added a second time, and documents that spell out control tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from kvboost_rag.datamodels import Segment, SegmentKind, TextSpan
from kvboost_rag.prompt.chat_template import render_messages, user_message_head
from kvboost_rag.prompt.control_tokens import control_tokens, cuts_inside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANCHORS = ("\n", "=", ")", "a", ".")
_PROBES = (("a", "b"), ("The", "end"), (".", "It"), (")", "1"), ("one", " two"))
_CACHED_DOCUMENTS = 1024


class PromptTokens:
    """Tokenises prompts for one tokenizer. Safe to use from several threads; never changes the tokenizer.

    Control tokens are the tokenizer's special tokens and those added tokens that its chat template writes or that
    look like markup (`<…>`, `[…]`). They take effect in text outside documents, as everywhere in transformers; a
    document that spells one out gets the ids of its characters instead, so that it cannot open a new turn.

    Args:
        tokenizer: any transformers tokenizer, fast or slow.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()  # a fast tokenizer's options are shared state that each call sets
        self._control = control_tokens(tokenizer)
        self._leading_ids = self._find_leading_ids()
        self._anchors = self._find_anchors()
        self._cached_document_ids = lru_cache(_CACHED_DOCUMENTS)(self._encode_document)

    @property
    def control_texts(self) -> tuple[str, ...]:
        """What control tokens look like in text."""
        return tuple(self._control.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        documents: Sequence[str | Mapping[str, str]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Chat messages as prompt text, through the chat template (see `chat_template.render_messages`).

        Raises:
            TypeError, ValueError: as described there; the message says what to do.
        """
        return render_messages(
            self.tokenizer, messages, tools, documents, add_generation_prompt=add_generation_prompt, **template_kwargs
        )

    def segment(self, spans: Sequence[TextSpan], rendered: bool) -> tuple[Segment, ...]:
        """Tokenise each span on its own and lay the pieces end to end.

        Args:
            spans: as `split_prompt` gives them.
            rendered: the text comes out of a chat template, which has written the special tokens: none are added.
                Otherwise the tokenizer's own leading special tokens (BOS) become part of the first segment, unless
                its text begins with them; before a leading document they form a prefix segment. Trailing ones (EOS)
                are never added: the prompt is to be continued.

        Returns:
            Segments in order; `start` counts from 0 and the ids joined are the prompt. Text that has no tokens of its
            own (some tokenizers drop white space) keeps its place as a segment of no tokens, which is no document.

        Raises:
            ValueError: no text, or no token in it.
        """
        pieces = self._pieces(spans, rendered)
        if not any(ids for _, ids in pieces):
            raise ValueError("the prompt has no text that the tokenizer has tokens for: there is nothing to answer")
        segments: list[Segment] = []
        start = 0
        for span, ids in pieces:
            kind = SegmentKind.TEXT if span.kind is SegmentKind.DOCUMENT and not ids else span.kind
            segments.append(Segment(kind, span.text, ids, start))
            start += len(ids)
        return tuple(segments)

    def document_ids(self, text: str) -> tuple[int, ...]:
        """Token ids of a document's text, the same wherever it stands in a prompt and in whatever process."""
        if not isinstance(text, str):
            raise TypeError(f"document text must be a str, got {type(text).__name__}")
        return self._cached_document_ids(text)

    def default_anchor_ids(self, text: str | None = None) -> tuple[int, ...]:
        """The anchor of a chunk's encoding context: what usually stands at the very start of a prompt.

        Args:
            text: the anchor's text, if it is to be another than the default; tokenised like the start of a prompt.

        Returns:
            The chat template's head up to where a user message's content begins; without a usable template the
            beginning-of-sequence token; nothing where there is neither.
        """
        if text is None:
            text = user_message_head(self.tokenizer)
            if text is None:
                return self._leading_ids or self._bos_ids()
            return self._encode(text)
        if not isinstance(text, str):
            raise TypeError(f"anchor text must be a str, got {type(text).__name__}")
        return self._with_leading(self._encode(text))

    def ids(self, text: str) -> tuple[int, ...]:
        """Token ids of `text` by itself, special tokens not added."""
        return self._encode(text)

    def count(self, text: str) -> int:
        """Tokens of `text` by itself, special tokens not added."""
        return len(self.ids(text))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`, white space as it is."""
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _pieces(self, spans: Sequence[TextSpan], rendered: bool) -> list[tuple[TextSpan, tuple[int, ...]]]:
        pieces = []
        for i, span in enumerate(spans):
            if span.kind is SegmentKind.DOCUMENT:
                pieces.append((span, self.document_ids(span.text)))
            else:
                # The prompt's start is tokenised as it would be without us; later pieces must not grow a space.
                pieces.append((span, self._encode(span.text) if i == 0 else self._encode_glued(span.text)))
        if rendered or not pieces or not self._leading_ids:
            return pieces
        span, ids = pieces[0]
        if span.kind is SegmentKind.DOCUMENT:
            return [(TextSpan(SegmentKind.PREFIX, ""), self._leading_ids), *pieces]
        return [(span, self._with_leading(ids)), *pieces[1:]]

    def _with_leading(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return ids if ids[: len(self._leading_ids)] == self._leading_ids else self._leading_ids + ids

    def _encode(self, text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
        with self._lock:
            encoded = self.tokenizer(
                text, add_special_tokens=add_special_tokens, padding=False, truncation=False, verbose=False
            )
        return tuple(encoded["input_ids"])

    def _encode_glued(self, text: str, anchors: Sequence[str] | None = None) -> tuple[int, ...]:
        """Ids of `text` as it continues something: tokenised behind an anchor whose ids are then taken off.

        An anchor is used only if its own ids come out unchanged in front of the text, that is if nothing merged.
        """
        for anchor in self._anchors if anchors is None else anchors:
            anchor_ids = self._encode(anchor)
            ids = self._encode(anchor + text)
            if ids[: len(anchor_ids)] == anchor_ids:
                return ids[len(anchor_ids) :]
        return self._encode(text)

    def _encode_document(self, text: str) -> tuple[int, ...]:
        """Glued ids without control tokens: where one comes out, the text is cut inside it and the parts spliced."""
        ids = self._encode_glued(text)
        found = {self._control[i] for i in ids if i in self._control}
        if not found:
            return ids
        if len(text) == 1:
            # No text spells this character without the control token: left out, unless it stands for "unknown".
            return tuple(i for i in ids if i not in self._control or i == self.tokenizer.unk_token_id)
        cuts = cuts_inside(text, found)
        if not cuts:
            if all(i == self.tokenizer.unk_token_id for i in ids if i in self._control):
                return ids
            cuts = [len(text) // 2]  # matched after normalisation (case, width): halving gets there too
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return tuple(i for part in parts for i in self._encode_document(part))

    def _find_leading_ids(self) -> tuple[int, ...]:
        """What the tokenizer itself puts before a text."""
        bare, full = self._encode("a"), self._encode("a", add_special_tokens=True)
        for at in range(len(full) - len(bare) + 1):
            if full[at : at + len(bare)] == bare:
                return full[:at]
        return ()

    def _bos_ids(self) -> tuple[int, ...]:
        bos = self.tokenizer.bos_token_id
        return () if bos is None else (bos,)

    def _find_anchors(self) -> tuple[str, ...]:
        """No anchor where texts tokenised apart decode to their concatenation, else those that make it so."""
        if self._joins_without_space(self._encode):
            return ()
        return tuple(a for a in _ANCHORS if self._joins_without_space(partial(self._encode_glued, anchors=(a,))))

    def _joins_without_space(self, encode: Any) -> bool:
        return all(self.decode(self._encode(a) + encode(b)).strip() == a + b for a, b in _PROBES)
