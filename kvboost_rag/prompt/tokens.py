"""Text to token ids: a prompt's are those of the tokenizer on the whole text, a chunk's those on its text alone.

Which documents are known changes nothing about a prompt's ids; what of a chunk's ids stands among them unchanged is
found afterwards (`alignment`). The one exception: a document that spells out control tokens has the ids of their
characters, so that it cannot open a new turn.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvboost_rag.datamodels import Segment, SegmentKind, TextSpan
from kvboost_rag.prompt.alignment import SLACK, Run, runs_of
from kvboost_rag.prompt.chat_template import render_messages, user_message_head
from kvboost_rag.prompt.control_tokens import control_tokens, cuts_inside, edges_crossed

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
        min_chunk_tokens: shorter documents are computed like the text around them wherever they stand.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, min_chunk_tokens: int = 1) -> None:
        self.tokenizer = tokenizer
        self._min_chunk_tokens = min_chunk_tokens
        self._lock = threading.Lock()  # a fast tokenizer's options are shared state that each call sets
        self._control = control_tokens(tokenizer)
        self._leading_ids = self._find_leading_ids()
        self._anchors = self._find_anchors()
        self._cached_cuts = lru_cache(_CACHED_DOCUMENTS)(self._find_cuts)
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
        """Tokenise a prompt whole and cut its ids where chunks' ids stand unchanged.

        Args:
            spans: as `split_prompt` gives them.
            rendered: the text comes out of a chat template, which has written the special tokens: none are added.
                Otherwise the tokenizer's own leading special tokens (BOS) come first, unless the text begins with
                them. Trailing ones (EOS) are never added: the prompt is to be continued.

        Returns:
            Segments in order; `start` counts from 0 and the ids joined are the prompt. A document is one segment for
            each run of its chunk's ids; ids at its edges that the tokenizer made otherwise belong to what is beside it.

        Raises:
            ValueError: no text, or no token in it.
        """
        ids, places = self.prompt_ids(spans, rendered)
        if not ids:
            raise ValueError("the prompt has no text that the tokenizer has tokens for: there is nothing to answer")
        found: list[tuple[TextSpan, Run]] = []
        done = 0
        for span, (low, high) in zip(spans, places, strict=True):
            chunk = self.document_ids(span.text) if span.kind is SegmentKind.DOCUMENT and span.whole else ()
            if len(chunk) >= max(1, self._min_chunk_tokens):
                runs = runs_of(chunk, ids, max(low, done), high)
                found += [(span, run) for run in runs]
                done = runs[-1].end if runs else done
        return _cut(ids, found, "".join(span.text for span in spans))

    def prompt_ids(self, spans: Sequence[TextSpan], rendered: bool) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """A prompt's ids, and for each span the range of ids in which it stands; args as for `segment`."""
        text = "".join(span.text for span in spans)
        cuts = self._cuts(spans, text)
        ids: list[int] = []
        ends: list[tuple[int, int]] = []  # of each id, the characters it stands for
        for start, end in pairwise((0, *cuts, len(text))):
            piece, offsets = self._encode_at(text[start:end], start)
            keep = list(range(len(piece)))
            if any(start >= a and end <= b for a, b in self._guarded(spans)):
                keep = [i for i in keep if piece[i] not in self._control or piece[i] == self.tokenizer.unk_token_id]
            ids += [piece[i] for i in keep]
            ends += [offsets[i] for i in keep]
        if not rendered and self._leading_ids and tuple(ids[: len(self._leading_ids)]) != self._leading_ids:
            ids[:0] = self._leading_ids
            ends[:0] = [(0, 0)] * len(self._leading_ids)
        return tuple(ids), self._places(spans, ends)

    def _places(self, spans: Sequence[TextSpan], offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        if not self.tokenizer.is_fast:
            return self._estimated_places(spans, len(offsets))
        starts, ends = [a for a, _ in offsets], [b for _, b in offsets]
        places, at = [], 0
        for span in spans:
            end = at + len(span.text)
            places.append((bisect_right(ends, at), bisect_left(starts, end)))
            at = end
        return places

    def _estimated_places(self, spans: Sequence[TextSpan], num_tokens: int) -> list[tuple[int, int]]:
        """Of a tokenizer without offsets: where spans would stand tokenised one by one, with room for what merges."""
        places: list[tuple[int, int]] = []
        at = 0
        for span in spans:
            end = at + len(self._encode_glued(span.text))
            room = SLACK * (1 + len(places) // 4)
            places.append((min(max(0, at - room), num_tokens), min(end + room, num_tokens)))
            at = end
        return places

    def _cuts(self, spans: Sequence[TextSpan], text: str) -> list[int]:
        """Places in the prompt's text between whose sides nothing may merge: inside control tokens of documents."""
        documents = self._documents(spans)
        inside = {a + cut for (a, _), span in documents for cut in self._cached_cuts(span.text)}
        return sorted(inside | edges_crossed(text, [place for place, _ in documents], self.control_texts))

    def _guarded(self, spans: Sequence[TextSpan]) -> list[tuple[int, int]]:
        return [place for place, span in self._documents(spans) if self._cached_cuts(span.text)]

    @staticmethod
    def _documents(spans: Sequence[TextSpan]) -> list[tuple[tuple[int, int], TextSpan]]:
        found, at = [], 0
        for span in spans:
            if span.kind is SegmentKind.DOCUMENT:
                found.append(((at, at + len(span.text)), span))
            at += len(span.text)
        return found

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

    def _with_leading(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return ids if ids[: len(self._leading_ids)] == self._leading_ids else self._leading_ids + ids

    def _encode(self, text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
        with self._lock:
            encoded = self.tokenizer(
                text, add_special_tokens=add_special_tokens, padding=False, truncation=False, verbose=False
            )
        return tuple(encoded["input_ids"])

    def _encode_at(self, text: str, start: int) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Ids of a piece of a prompt, as its beginning or as it continues, and the characters they stand for.

        The characters are counted in the prompt; where the tokenizer does not tell them, all ids stand for the piece.
        """
        anchor = "" if start == 0 else self._anchor_for(text)
        with self._lock:
            options = {"return_offsets_mapping": True} if self.tokenizer.is_fast else {}
            encoded = self.tokenizer(
                anchor + text, add_special_tokens=False, padding=False, truncation=False, verbose=False, **options
            )
        skipped = len(self._encode(anchor)) if anchor else 0
        ids = tuple(encoded["input_ids"][skipped:])
        offsets = (
            encoded["offset_mapping"][skipped:] if options else [(len(anchor), len(anchor) + len(text))] * len(ids)
        )
        return ids, [(a - len(anchor) + start, b - len(anchor) + start) for a, b in offsets]

    def _encode_glued(self, text: str, anchors: Sequence[str] | None = None) -> tuple[int, ...]:
        """Ids of `text` as it continues something: tokenised after an anchor whose ids are then taken off."""
        anchor = self._anchor_for(text, anchors)
        return self._encode(anchor + text)[len(self._encode(anchor)) if anchor else 0 :]

    def _anchor_for(self, text: str, anchors: Sequence[str] | None = None) -> str:
        """An anchor whose own ids come out unchanged in front of the text, that is with which nothing merges."""
        for anchor in self._anchors if anchors is None else anchors:
            anchor_ids = self._encode(anchor)
            if self._encode(anchor + text)[: len(anchor_ids)] == anchor_ids:
                return anchor
        return ""

    def _encode_document(self, text: str) -> tuple[int, ...]:
        """Glued ids without control tokens: where one comes out, the text is cut inside it and the parts spliced."""
        parts = [text[a:b] for a, b in pairwise((0, *self._cached_cuts(text), len(text)))]
        spelled = (i for part in parts for i in self._encode_glued(part))
        # No text spells a control token of one character without it: left out, unless it stands for "unknown".
        return tuple(i for i in spelled if i not in self._control or i == self.tokenizer.unk_token_id)

    def _find_cuts(self, text: str) -> tuple[int, ...]:
        """Where to cut a document so that no part of it comes out as a control token; nowhere for nearly all."""
        found = {self._control[i] for i in self._encode_glued(text) if i in self._control}
        if not found or len(text) == 1:
            return ()
        cuts = cuts_inside(text, found)
        if not cuts:
            ids = [i for i in self._encode_glued(text) if i in self._control]
            if all(i == self.tokenizer.unk_token_id for i in ids):
                return ()
            cuts = [len(text) // 2]  # matched after normalisation (case, width): halving gets there too
        inner = (a + cut for a, b in pairwise((0, *cuts, len(text))) for cut in self._find_cuts(text[a:b]))
        return tuple(sorted({*cuts, *inner}))

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


def _cut(ids: tuple[int, ...], found: Sequence[tuple[TextSpan, Run]], text: str) -> tuple[Segment, ...]:
    """A prompt's ids as segments: the runs of documents, and what lies before, between and after them."""
    if not found:
        return (Segment(SegmentKind.SUFFIX, text, ids, 0),)
    segments: list[Segment] = []
    done = 0
    for span, run in found:
        between = SegmentKind.TEXT if segments else SegmentKind.PREFIX
        if run.start > done:
            segments.append(Segment(between, "", ids[done : run.start], done))
        segments.append(Segment(SegmentKind.DOCUMENT, span.text, ids[run.start : run.end], run.start, run.chunk_start))
        done = run.end
    if done < len(ids):
        segments.append(Segment(SegmentKind.SUFFIX, "", ids[done:], done))
    return tuple(segments)
