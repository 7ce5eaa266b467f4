"""The texts of documents that can be recognised in a prompt."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kvboost_rag.prompt.text_search import WIDTHS, Bucket, Search, width_of


def canonical_text(text: str) -> str:
    """The form in which a document's text is known: without surrounding white space.

    Frameworks strip chunk texts when they split or format them; what surrounds a document in a prompt then belongs
    to the text segments around it, whichever way the document was written when it was indexed.

    Raises:
        TypeError: `text` is not a string.
    """
    if not isinstance(text, str):
        raise TypeError(f"document text must be a str, got {type(text).__name__}")
    return text.strip()


@dataclass(frozen=True)
class Match:
    """`prompt[start:end]` is a known text, registered under `key`.

    Attributes:
        whole: False for one (or a part of one) that cuts a word: a document's text, but not to be reused there.
    """

    start: int
    end: int
    key: str | None
    whole: bool = True


class KnownTexts:
    """The texts that can be recognised in a prompt, each under a key (a content hash, for instance).

    Contract: texts are kept in canonical form. A text has one key (the last one given); a key may have several
    texts. All methods may be called from several threads; `find` sees the texts of one moment.
    """

    def __init__(self) -> None:
        self._keys: dict[str, str | None] = {}
        self._texts_by_key: dict[str | None, set[str]] = {}
        self._buckets: dict[int, dict[str, Bucket]] = {width: {} for width in WIDTHS}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, text: str, key: str | None) -> None:
        """Make `text` known under `key`. White space around it is left out; adding it again replaces its key.

        Raises:
            TypeError: `text` is not a string.
            ValueError: nothing is left of `text` without white space.
        """
        text = canonical_text(text)
        if not text:
            raise ValueError("an empty text cannot be found in a prompt; leave it out")
        with self._lock:
            if text in self._keys:
                self._forget_key(text)
            else:
                width = width_of(text)
                self._buckets[width].setdefault(text[:width], Bucket()).add(text)
            self._keys[text] = key
            self._texts_by_key.setdefault(key, set()).add(text)

    def remove(self, key: str | None) -> bool:
        """Forget every text registered under `key`; True if there was one."""
        with self._lock:
            texts = self._texts_by_key.pop(key, set())
            for text in texts:
                del self._keys[text]
                width = width_of(text)
                bucket = self._buckets[width][text[:width]]
                bucket.remove(text)
                if not bucket.texts:
                    del self._buckets[width][text[:width]]
            return bool(texts)

    def keep_only(self, keys: Iterable[str]) -> None:
        """Forget every text whose key is not among `keys`; texts without a key stay."""
        with self._lock:
            gone = self._texts_by_key.keys() - {None, *keys}
            for key in gone:
                self.remove(key)

    def key_of(self, text: str) -> str | None:
        """The key of a text, or None if it is not known (or has no key)."""
        with self._lock:
            return self._keys.get(canonical_text(text))

    def num_beginnings(self, prompt: str) -> int:
        """Places of the prompt where the first characters of a long known text stand, whatever follows them."""
        with self._lock:
            index = self._buckets[WIDTHS[0]]
            return sum(prompt[i : i + WIDTHS[0]] in index for i in range(len(prompt) - WIDTHS[0] + 1)) if index else 0

    def find(self, prompt: str, extra: KnownTexts | None = None) -> list[Match]:
        """Known texts in `prompt`, in order of place, none overlapping another.

        Texts begin and end at word boundaries, or long ones side by side. The longest wins wherever they overlap, over
        the whole prompt; of two equally long ones the left.

        Args:
            extra: further texts to look for, for this call only. A text known here keeps its key.
        """
        sources = [self] if extra is None else [self, extra]
        with self._lock:
            spans, parts = Search(prompt, [source._buckets for source in sources]).run()
            matches = [Match(start, end, self._key_of(prompt[start:end], sources)) for start, end in spans]
            return sorted(
                [*matches, *(Match(start, end, None, whole=False) for start, end in parts)], key=attrgetter("start")
            )

    def _key_of(self, text: str, sources: Sequence[KnownTexts]) -> str | None:
        return next(source._keys[text] for source in sources if text in source._keys)

    def _forget_key(self, text: str) -> None:
        old = self._keys[text]
        self._texts_by_key[old].discard(text)
        if not self._texts_by_key[old]:
            del self._texts_by_key[old]
