"""What a log of prompts would gain: how much of it was seen before, in the same place, elsewhere, nearly, or never."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from kvboost_rag.encode.similarity import DonorIndex, DonorRules
from kvboost_rag.kv.keys import ROOT_HASH, hash_fields, token_bytes

Tokenize = Callable[[str], Sequence[int]]

BLOCK_TOKENS = 32
"""Prefixes are found in whole blocks, as prefix caches do."""
MIN_PIECE_TOKENS = 16
"""Shorter pieces of text are not worth storing on their own and count with what follows."""
SETTLE_TOKENS = 32
"""After an edit this many tokens are recomputed (`similarity.DonorRules.settle_tokens`)."""

_BLANK_LINES = re.compile(r"(?<=\n)[ \t]*\n\s*")
_WORDS = re.compile(r"\w{1,6}|[^\w\s]")


class TraceError(ValueError):
    """The log cannot be read. The message names the line."""


@dataclass(frozen=True)
class TracePrompt:
    """One request of the log. `documents`: texts in it that are known to be documents; paragraphs are found anyway."""

    text: str
    documents: tuple[str, ...] = ()


@dataclass(frozen=True)
class TraceProfile:
    """Tokens of a log by what could be done with them; `exact + moved + near + new` = all.

    Attributes:
        exact: in the same place after the same text as before: what a prefix cache finds.
        moved: pieces of text that stood elsewhere before: what position-independent reuse adds.
        near: unchanged parts of pieces that were edited since.
        new: never seen, or too short to be worth storing.
        prompt_tokens: median length of a prompt.
        piece_tokens: median length of the pieces that came back, 0 if none did.
        kept_tokens: tokens of all distinct pieces that came back: what a store would have to hold.
    """

    num_prompts: int
    exact: int
    moved: int
    near: int
    new: int
    prompt_tokens: float
    piece_tokens: float
    kept_tokens: int

    @property
    def total(self) -> int:
        return self.exact + self.moved + self.near + self.new

    def share(self, kind: str) -> float:
        """`exact`, `moved`, `near` or `new` tokens / all."""
        return float(getattr(self, kind)) / self.total if self.total else 0.0


@dataclass(frozen=True)
class Advice:
    """`verdict` is `reuse`, `prefix` or `none`; `settings` are those to use, for `reuse`."""

    verdict: str
    reason: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_trace(path: str | Path) -> Iterator[TracePrompt]:
    """Prompts of a JSON-lines file: `prompt` (text) or `messages` (chat), and optionally `documents`.

    Raises:
        TraceError: a line is not that.
    """
    with Path(path).open("rb") as file:
        for number, raw in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise TraceError(f"{where} is not UTF-8 text: {error}") from None
            if line.strip():
                yield _prompt(line, where)


def _prompt(line: str, where: str) -> TracePrompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where}: expected an object with prompt or messages")
    prompt, messages = record.get("prompt"), record.get("messages")
    if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
        prompt = "\n\n".join(str(m.get("content") or "") for m in messages)
    if not isinstance(prompt, str) or not prompt.strip():
        raise TraceError(f"{where}: expected a text under prompt, or chat messages under messages")
    documents = record.get("documents") or []
    if not isinstance(documents, list) or not all(isinstance(d, str) for d in documents):
        raise TraceError(f"{where}: documents must be a list of texts")
    return TracePrompt(prompt, tuple(documents))


def word_tokens() -> Tokenize:
    """A stand-in for a model's tokenizer: words in pieces of up to six letters, punctuation one by one."""
    ids: dict[str, int] = {}
    return lambda text: [ids.setdefault(word, len(ids)) for word in _WORDS.findall(text)]


class TraceProfiler:
    """Takes prompts in the order in which they came; what came before counts as cached, forever.

    Args:
        tokenize: text to token ids; default `word_tokens`, which comes within about a fifth of real tokenizers.
    """

    def __init__(self, tokenize: Tokenize | None = None) -> None:
        self._tokenize = tokenize or word_tokens()
        self._blocks: set[str] = set()
        self._pieces: dict[str, tuple[int, ...]] = {}
        self._came_back: Counter[str] = Counter()
        self._donors = DonorIndex(DonorRules(settle_tokens=SETTLE_TOKENS))
        self._lengths: list[int] = []
        self._counts: Counter[str] = Counter()

    def add(self, prompt: TracePrompt) -> None:
        """Count one prompt, then remember it."""
        pieces = [tuple(self._tokenize(text)) for text in split_pieces(prompt, self._tokenize)]
        ids = [i for piece in pieces for i in piece]
        exact = self._exact(ids)
        self._lengths.append(len(ids))
        self._counts["exact"] += exact
        start = 0
        fresh: dict[str, tuple[int, ...]] = {}
        for piece in pieces:
            inside = min(len(piece), max(0, exact - start))
            start += len(piece)
            if len(piece) >= MIN_PIECE_TOKENS:
                key = hash_fields("piece", token_bytes(piece))
                self._count_piece(key, piece, inside, fresh)
            else:
                self._counts["new"] += len(piece) - inside
        self._pieces |= fresh
        self._donors.add(fresh)

    def _count_piece(self, key: str, piece: tuple[int, ...], inside: int, fresh: dict[str, tuple[int, ...]]) -> None:
        """Book the part of a piece that is not in the exact prefix."""
        left = len(piece) - inside
        if key in self._pieces:
            self._came_back[key] += 1
            self._counts["moved"] += left
        elif key in fresh:  # twice in one prompt: the second is a copy of what this request computes
            self._counts["moved"] += left
        else:
            plan = self._donors.find(piece, self._pieces.get)
            near = min(left, plan.num_reused) if plan is not None else 0
            self._counts["near"] += near
            self._counts["new"] += left - near
            fresh[key] = piece

    def _exact(self, ids: Sequence[int]) -> int:
        """Tokens of the longest beginning that an earlier prompt had; remembers this prompt's blocks."""
        preceding, exact = ROOT_HASH, 0
        for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = ids[start : start + BLOCK_TOKENS]
            preceding = hash_fields("trace", preceding.encode(), token_bytes(block))
            exact += BLOCK_TOKENS if preceding in self._blocks else 0  # chained: known only if all before it is
            self._blocks.add(preceding)
        return exact

    def result(self) -> TraceProfile:
        back = [len(self._pieces[key]) for key in self._came_back]
        return TraceProfile(
            num_prompts=len(self._lengths),
            exact=self._counts["exact"],
            moved=self._counts["moved"],
            near=self._counts["near"],
            new=self._counts["new"],
            prompt_tokens=median(self._lengths) if self._lengths else 0.0,
            piece_tokens=median(back) if back else 0.0,
            kept_tokens=sum(back),
        )


def split_pieces(prompt: TracePrompt, tokenize: Tokenize) -> list[str]:
    """The prompt's text in pieces that may come back: its documents, and paragraphs between them.

    Paragraphs that are too short are joined with each other, but never with a longer one or a document.
    """
    text = prompt.text
    spans = _document_spans(text, prompt.documents)
    cuts = [0, *(at for span in spans for at in span), len(text)]
    pieces: list[str] = []
    for number, (start, end) in enumerate(pairwise(cuts)):
        if number % 2:  # [document start, document end)
            pieces.append(text[start:end])
        else:
            pieces += _paragraphs(text[start:end], tokenize)
    return [piece for piece in pieces if piece]


def _document_spans(text: str, documents: Iterable[str]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for document in sorted({d.strip() for d in documents} - {""}, key=len, reverse=True):
        at = text.find(document)
        while at >= 0:
            end = at + len(document)
            if all(end <= a or at >= b for a, b in spans):
                spans.append((at, end))
            at = text.find(document, end)
    return sorted(spans)


def _paragraphs(text: str, tokenize: Tokenize) -> list[str]:
    """Paragraphs, and the white space between them as pieces of its own."""
    ends = [m.end() for m in _BLANK_LINES.finditer(text)]
    pieces, held = [], ""
    for start, end in pairwise([0, *ends, len(text)]):
        paragraph = text[start:end]
        if held and len(tokenize(paragraph)) >= MIN_PIECE_TOKENS:
            pieces += _apart(held)
            held = ""
        held += paragraph
        if len(tokenize(held)) >= MIN_PIECE_TOKENS:
            pieces += _apart(held)
            held = ""
    return [*pieces, *_apart(held)]


def _apart(text: str) -> list[str]:
    """What stands between the white space at both ends, and that white space."""
    inner = text.strip()
    at = text.find(inner)
    return [text[:at], inner, text[at + len(inner) :]]


def advise(profile: TraceProfile, recompute_ratio: float = 0.05) -> Advice:
    """What to do with such prompts.

    Position-independent reuse must spare at least a tenth of all tokens beyond what a prefix cache spares, and
    prompts must be long enough for a prefill to be felt.
    """
    gain = profile.share("moved") * (1 - recompute_ratio) + profile.share("near")
    if profile.num_prompts < 2 or profile.prompt_tokens < 256:
        return Advice("none", "prompts are too few or too short for prefill to matter")
    if gain >= 0.10:
        left = 1 - profile.share("exact") - gain
        return Advice(
            "reuse",
            f"{gain:.0%} of the tokens stood elsewhere before, so a prefix cache misses them; "
            f"about {left:.0%} would still be computed",
            {
                "reuse": "blend",
                "chunk_tokens": _chunk_tokens(profile.piece_tokens),
                "recompute_ratio": recompute_ratio,
                "neighbours": 4,
                "donors": profile.share("near") >= 0.02,
            },
        )
    if profile.share("exact") >= 0.10:
        return Advice(
            "prefix",
            f"{profile.share('exact'):.0%} of the tokens are a prefix that was there before",
            {"reuse": "exact"},
        )
    return Advice("none", "next to nothing comes back")


def _chunk_tokens(piece_tokens: float) -> int | None:
    """The smallest chunk size that holds a typical piece whole; None: keep documents whole."""
    from kvboost_rag.config import CHUNK_TOKENS

    return next((size for size in CHUNK_TOKENS if piece_tokens <= size), None)
