"""Sentence ends, by the `sentencex` library (rules for about 300 languages, no model, no download)."""

from __future__ import annotations


def sentence_ends(text: str, language: str = "en") -> list[int]:
    """Offsets at which a sentence of `text` ends and another begins, white space between them included.

    Raises:
        ImportError: the library is not installed; the message says how to get it.
    """
    try:
        import sentencex
    except ImportError as error:
        raise ImportError(
            "semantic chunking finds sentences with 'sentencex': pip install 'kvboost-rag[semantic]'"
        ) from error
    ends = []
    at = 0
    for sentence in sentencex.segment(language, text):
        found = text.find(sentence, at)
        if found < 0:  # the library normalised something; the pieces that follow still tell where they begin
            continue
        at = found + len(sentence)
        ends.append(at)
    return [end for end in ends if text[:end].strip() and text[end:].strip()]
