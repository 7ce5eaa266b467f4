"""The values that the stages hand to each other. Plain frozen dataclasses: no behaviour, no torch at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


DiskChoice = Literal["load", "recompute"]


class SegmentKind(str, Enum):
    """What a span of the prompt is. Only a `document` can be taken from the store."""

    PREFIX = "prefix"
    DOCUMENT = "document"
    TEXT = "text"
    SUFFIX = "suffix"


class HitKind(str, Enum):
    """Where a segment's keys and values came from."""

    EXACT = "exact"
    """The prefix hash matched: the KV is what full prefill would give."""
    APPROXIMATE = "approximate"
    """Only the content hash matched: realigned, then repaired."""
    ENCODED = "encoded"
    """Encoded during this call, then treated like a hit: a miss, or on disk and slower to load (`disk_choice`)."""
    DONOR = "donor"
    """Not stored itself: token-identical spans of a near-duplicate were reused, the rest of the chunk was computed."""
    PREFILLED = "prefilled"
    """Computed in this call and not kept as a chunk (text, suffix, or no reuse)."""


@dataclass(frozen=True)
class TextSpan:
    """A typed piece of the prompt's text, before tokenisation. The spans joined are the prompt, byte for byte.

    `key` is what the matched text was registered under (`KnownTexts.add`); None for text that is no known document.
    A document that is not `whole` cuts a word, or is a part of one that does: it is not reused there.
    """

    kind: SegmentKind
    text: str
    key: str | None = None
    whole: bool = True


@dataclass(frozen=True)
class Segment:
    """A typed span of the prompt's token ids.

    Attributes:
        text: of a document all of its chunk's text, whatever part of it stands here; else the prompt's text where it
            has no document, and empty where it has: ids at a document's edge may spell more than what is beside it.
        start: position of the first token.
        chunk_start: which of its chunk's tokens a document's first one is.
    """

    kind: SegmentKind
    text: str
    token_ids: tuple[int, ...]
    start: int
    chunk_start: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class ChunkRecord:
    """What the catalog remembers of a chunk, whether or not its KV is held at the moment.

    `anchor_ids`, then the token ids of each chunk named in `neighbours` (content hashes, nearest last), each followed
    by `separator_ids`, are the chunk's encoding context (`kv.keys.encoding_contexts`). Together with `token_ids`
    and the model they determine its KV. `forward_tokens` is the length of the forward of a chunk that was encoded with
    others after it: matrix kernels round differently at other lengths, so the last bits depend on it. 0: the context
    and the chunk are all.

    A chunk that was encoded after several contexts names them all in `neighbours`, one after the other, and `splits`
    says how many of these belong to each context. `mixture` identifies the weights by which the KV after each of them
    is combined (`encode.mixture`).
    """

    content_hash: str
    fingerprint: str
    namespace: str
    text: str
    token_ids: tuple[int, ...]
    anchor_ids: tuple[int, ...] = ()
    neighbours: tuple[str, ...] = ()
    separator_ids: tuple[int, ...] = ()
    forward_tokens: int = 0
    splits: tuple[int, ...] = ()
    mixture: str = ""

    @property
    def contexts(self) -> tuple[tuple[str, ...], ...]:
        """The chunks in each encoding context, nearest last; most chunks have one context."""
        if not self.splits:
            return (self.neighbours,)
        ends = tuple(accumulate(self.splits))
        return tuple(self.neighbours[end - size : end] for end, size in zip(ends, self.splits, strict=True))


@dataclass(frozen=True)
class ChunkKV:
    """Keys and values of consecutive tokens, every layer.

    Layers that share a shape and a rotation are stacked into one group (most models have one group).

    Attributes:
        keys: one tensor a group, `[num_layers_in_group, num_kv_heads, seq_len, key_head_dim]`; position-free
            for chunks, at their positions for exact blocks.
        values: one tensor a group, `[num_layers_in_group, num_kv_heads, seq_len, value_head_dim]`.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @property
    def seq_len(self) -> int:
        return int(self.keys[0].shape[2])

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


GIVEN = "given"
"""In the `meta` of a chunk's KV: the chunk was given with a call (`documents=`), and the catalog does not know it."""


@dataclass(frozen=True)
class StoreEntry:
    """One stored item, self-describing: everything needed to check that it is the item that was asked for.

    Attributes:
        key: SHA-256 hex digest (content hash of a chunk or prefix hash of an exact block).
        namespace, fingerprint: the namespace and the model it belongs to.
        token_ids: the ids whose KV this is.
        context_hash: hash of the encoding context (chunk), or the preceding block's prefix hash (exact block).
        tensors: the payload. Immutable once stored: readers must not write into it.
        meta: short strings that say how to read the payload (codec, layout) and what was measured (PSNR).
    """

    key: str
    namespace: str
    fingerprint: str
    token_ids: tuple[int, ...]
    context_hash: str
    tensors: Mapping[str, torch.Tensor]
    meta: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@dataclass(frozen=True)
class EntryCheck:
    """What a caller of `Store.get` knows about the entry it wants. Anything else is a counted miss, never a hit.

    `setting` is the codec that a chunk's KV must have (`meta["setting"]` of its entry); None: any.
    """

    namespace: str
    fingerprint: str
    token_ids: tuple[int, ...]
    context_hash: str
    setting: str | None = None


@dataclass(frozen=True)
class Usage:
    """Token counts of one call: `input_tokens` = cached + recomputed + prefilled; cached = exact + approximate."""

    input_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    prefilled_tokens: int
    created_tokens: int
    """Document and prefix tokens whose KV was computed during this call before the prompt was assembled, and stored
    except for donor hits (part of `cached_tokens` for documents: they are used like hits afterwards)."""
    output_tokens: int
    exact_tokens: int = 0
    """Tokens whose KV was stored as full prefill gives it."""
    approximate_tokens: int = 0
    """Document tokens whose KV was taken from their chunks as it is."""
    probe_rows: int = 0
    """Rows that repair forwarded only to choose what to recompute, such as the suffix pass of `query`."""
    accepted_tokens: int = 0
    """Of `output_tokens`, those that were guessed ahead and accepted: each saved a forward."""


@dataclass(frozen=True)
class SegmentReport:
    """How one segment of the prompt was served.

    Attributes:
        deviation: of a document at the probe layer, where it was measured.
        disk_choice: what was done about a document that lay on disk only: `load`, or `recompute` where that was
            estimated to be faster (`hit` is `encoded` then, the KV the same bits); None for everything else.
        num_donor_tokens: of a donor hit, the tokens whose KV was the donor's.
        text: of a document its chunk's text; else as in `Segment`. Never logged.
        token_ids: the segment's part of the prompt; never logged.
    """

    kind: SegmentKind
    hit: HitKind
    start: int
    num_tokens: int
    num_recomputed_tokens: int = 0
    content_hash: str | None = None
    deviation: float | None = None
    disk_choice: DiskChoice | None = None
    num_donor_tokens: int = 0
    text: str = field(default="", repr=False)
    token_ids: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class RepairReport:
    """What repair did.

    Attributes:
        strategy: its name.
        rows: positions of the recomputed document tokens, ascending.
        recompute_ratio: `len(rows)` / document tokens.
        deviation_per_chunk: mean deviation of each document segment at the probe layer, where it was measured.
        rows_per_layer: rows forwarded through each decoder layer in the final pass.
    """

    strategy: str
    rows: tuple[int, ...] = ()
    recompute_ratio: float = 0.0
    deviation_per_chunk: tuple[float, ...] | None = None
    rows_per_layer: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerationResult:
    """Text and everything that is known about how it came about. Holds no tensors.

    `timings_ms` has one entry per stage (`queue_ms`, `segment_ms`, `lookup_ms`, `load_ms`, `encode_ms`, `prefix_ms`,
    `realign_ms`, `repair_ms`, `suffix_ms`, …); the entries add up to `ttft_ms`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    reuse: str
    segments: tuple[SegmentReport, ...]
    repair: RepairReport
    timings_ms: Mapping[str, float]
    ttft_ms: float
    total_ms: float
    fallback_reason: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamEvent:
    """One piece of a streamed answer; the last one carries the result."""

    delta: str
    result: GenerationResult | None = None


@dataclass(frozen=True)
class WarmReport:
    """What a call of `warm` did."""

    num_chunks: int
    num_encoded: int
    num_already_stored: int
    num_failed: int
    chunk_tokens: int
    """Tokens of all chunks of the call."""
    encoded_tokens: int
    """Tokens forwarded, encoding contexts included."""
    num_bytes: int
    """Bytes of KV written by this call."""
    seconds: float
    content_hashes: tuple[str, ...] = ()
    encoded_chunk_tokens: int = 0
    """Of `encoded_tokens` those of the chunks themselves: the ratio of the two is the cost of the contexts."""
