"""Donors for chunks that are not stored: nearly equal chunks, and which of their tokens may be reused.

MinHash (Broder, 1997) with locality-sensitive hashing, by the datasketch library, finds candidates; nothing is reused
on its word. A comparison token by token gives the spans that are identical, and only those count, so that a changed
number, negation or name is never served from the donor.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvboost_rag.encode.token_diff import ReusedSpan, reusable_spans

Signature = NDArray[np.uint32]
"""MinHash values of a chunk's token shingles, `[num_permutations]`."""

_SCHEME = "affine32"
_SEED = 1


@dataclass(frozen=True)
class DonorRules:
    """When a stored chunk may stand in for another one. Trade-offs in numbers: `docs/indexing.md`.

    Attributes:
        threshold: Jaccard similarity of the shingle sets from which a chunk is likely to be looked at. Low by default:
            looking at a chunk in vain costs one comparison of token ids.
        num_permutations: MinHash values of a chunk; more find donors near the threshold more surely and cost memory.
        shingle_tokens: consecutive tokens that count as one item of the set.
        min_span_tokens: shorter identical spans are recomputed.
        settle_tokens: tokens that are recomputed after each change although they are identical, because they were
            computed with another text before them. None: all up to the chunk's end, so that only what stands before
            the first change is reused, which is as good as new if the encoding context is the same.
        max_candidates: donors compared token by token.
        context: `computed`: the encoding context is forwarded again, so that what is computed after it is what
            encoding the chunk would give, up to rounding. `stored`: stored KV of the chunks in it is taken instead,
            which is several times as fast after neighbours, and approximate.
        min_saving: least share of the tokens that encoding the chunk would forward (context included) that a donor
            must spare; a partial forward costs more per token than a whole one.
    """

    threshold: float = 0.3
    num_permutations: int = 128
    shingle_tokens: int = 5
    min_span_tokens: int = 16
    settle_tokens: int | None = None
    max_candidates: int = 4
    context: Literal["computed", "stored"] = "computed"
    min_saving: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold={self.threshold!r}: expected a number between 0 and 1")
        least = {"num_permutations": 16, "shingle_tokens": 1, "min_span_tokens": 1, "max_candidates": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected at least {bound}")
        if self.context not in ("computed", "stored"):
            raise ValueError(f"context={self.context!r}: expected computed or stored")
        if not 0 <= self.min_saving <= 1:
            raise ValueError(f"min_saving={self.min_saving!r}: expected a number from 0 to 1")
        if self.settle_tokens is not None and self.settle_tokens < 0:
            raise ValueError(f"settle_tokens={self.settle_tokens!r}: expected 0 or more, or None for the chunk's end")

    @property
    def signature_kind(self) -> str:
        """Signatures of one kind can be compared; names their kind where they are kept."""
        return f"minhash/{_SCHEME}/{_SEED}/{self.num_permutations}/{self.shingle_tokens}"


@dataclass(frozen=True)
class DonorPlan:
    """How to make a chunk out of a donor. Everything outside `spans` is to be computed.

    Attributes:
        donor: the donor's key.
        num_tokens: of the wanted chunk.
        spans: in order, not overlapping, none empty.
    """

    donor: str
    num_tokens: int
    spans: tuple[ReusedSpan, ...]

    @property
    def num_reused(self) -> int:
        return sum(span.num_tokens for span in self.spans)


class SignatureTable(Protocol):
    """Where signatures survive a restart (`stores.chunk_arrays.ChunkArrays`)."""

    def items(self) -> Iterator[tuple[str, Any]]: ...

    def put(self, arrays: Mapping[str, Any]) -> None: ...

    def delete(self, keys: Iterable[str]) -> None: ...


class DonorIndex:
    """Chunks of one namespace and one model, searchable for near-duplicates.

    Contract: `find` names only what was added and not removed since. Methods may be called from several threads.
    Several processes may share a table; each sees the others' chunks once it opens the index anew.

    Args:
        rules: see `DonorRules`.
        table: keeps signatures of `rules.signature_kind`; None keeps them in memory only.

    Raises:
        ImportError: datasketch is not installed; the message says how to get it.
    """

    def __init__(self, rules: DonorRules | None = None, table: SignatureTable | None = None) -> None:
        self.rules = rules or DonorRules()
        self._minhash, lsh = _datasketch()
        self._lsh = lsh(threshold=self.rules.threshold, num_perm=self.rules.num_permutations)
        self._permutations = self._minhash(self.rules.num_permutations, seed=_SEED, scheme=_SCHEME).permutations
        self._signatures: dict[str, Signature] = {}
        self._table = table
        self._lock = threading.RLock()
        for key, signature in table.items() if table is not None else ():
            if len(signature) == self.rules.num_permutations:  # else damaged: it counts as missing
                self._insert(key, np.asarray(signature, dtype=np.uint32))

    def __len__(self) -> int:
        return len(self._signatures)

    def __contains__(self, key: object) -> bool:
        return key in self._signatures

    def add(self, token_ids_by_key: Mapping[str, Sequence[int]]) -> None:
        """Make chunks known as donors; those known already cost nothing, those shorter than a span are left out."""
        fresh = {
            key: self.signature(ids)
            for key, ids in token_ids_by_key.items()
            if key not in self._signatures and len(ids) >= self._least_tokens
        }
        with self._lock:
            for key, signature in fresh.items():
                if key not in self._signatures:
                    self._insert(key, signature)
        if self._table is not None and fresh:
            self._table.put(fresh)

    def remove(self, keys: Iterable[str]) -> None:
        """Forget chunks; unknown keys are passed over."""
        keys = list(keys)
        with self._lock:
            for key in keys:
                if self._signatures.pop(key, None) is not None:
                    self._lsh.remove(key)
        if self._table is not None:
            self._table.delete(keys)

    def keep_only(self, keys: Iterable[str]) -> None:
        """Forget all chunks but these."""
        with self._lock:
            gone = self._signatures.keys() - set(keys)
        if gone:
            self.remove(gone)

    def candidates(self, token_ids: Sequence[int]) -> list[str]:
        """Keys of chunks that may be near-duplicates, by estimated similarity, best first."""
        if len(token_ids) < self._least_tokens:
            return []
        wanted = self.signature(token_ids)
        with self._lock:
            found = self._lsh.query(self._sketch(wanted))
            similarity = {key: float(np.mean(self._signatures[key] == wanted)) for key in found}
        return sorted(similarity, key=lambda key: (-similarity[key], key))

    def find(self, token_ids: Sequence[int], token_ids_of: Callable[[str], Sequence[int] | None]) -> DonorPlan | None:
        """The donor that spares most tokens, or None if there is none with a span worth reusing.

        Args:
            token_ids: of the wanted chunk.
            token_ids_of: a chunk's token ids by its key, None if it cannot serve (its KV is not stored).
        """
        best: DonorPlan | None = None
        for key in self.candidates(token_ids)[: self.rules.max_candidates]:
            donor_ids = token_ids_of(key)
            if donor_ids is None:
                continue
            spans = reusable_spans(donor_ids, token_ids, self.rules.min_span_tokens, self.rules.settle_tokens)
            plan = DonorPlan(key, len(token_ids), spans)
            if plan.spans and (best is None or plan.num_reused > best.num_reused):
                best = plan
        return best

    def signature(self, token_ids: Sequence[int]) -> Signature:
        """MinHash values of the token shingles, `[num_permutations]` uint32."""
        ids = array("q", token_ids).tobytes()
        width = self.rules.shingle_tokens * 8
        shingles = {ids[at : at + width] for at in range(0, max(1, len(ids) - width + 8), 8)}
        sketch = self._sketch(None)
        sketch.update_batch(sorted(shingles))
        return np.asarray(sketch.hashvalues, dtype=np.uint32)

    @property
    def _least_tokens(self) -> int:
        return max(self.rules.min_span_tokens, self.rules.shingle_tokens)

    def _insert(self, key: str, signature: Signature) -> None:
        self._signatures[key] = signature
        self._lsh.insert(key, self._sketch(signature), check_duplication=False)

    def _sketch(self, hashvalues: Signature | None) -> Any:
        return self._minhash(
            self.rules.num_permutations,
            seed=_SEED,
            hashvalues=hashvalues,
            permutations=self._permutations,
            scheme=_SCHEME,
        )


def _datasketch() -> tuple[Any, Any]:
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError as error:
        raise ImportError("near-duplicates are found with datasketch: pip install 'kvboost-rag[semantic]'") from error
    return MinHash, MinHashLSH
