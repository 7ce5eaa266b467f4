"""Where the documents stand in a prompt: text in, typed spans out. Nothing is added to the prompt or taken from it."""

from __future__ import annotations

from collections.abc import Iterable

from kvboost_rag.config import HALF_CHARACTER, lone_surrogate
from kvboost_rag.datamodels import SegmentKind, TextSpan
from kvboost_rag.prompt.known_texts import KnownTexts, Match, canonical_text
from kvboost_rag.prompt.template_text import TemplateText

__all__ = ["KnownTexts", "Match", "canonical_text", "check_prompt", "split_prompt"]


def check_prompt(prompt: str) -> None:
    """Raise if `prompt` is nothing that can be answered.

    Raises:
        TypeError: not a string; the message names the type that came.
        ValueError: the empty string, or not valid Unicode.
    """
    if not isinstance(prompt, str):
        raise TypeError(f"prompt must be a str (or a list of chat messages), got {type(prompt).__name__}")
    if not prompt:
        raise ValueError("the prompt is empty: there is nothing to answer")
    if (at := lone_surrogate(prompt)) is not None:
        raise ValueError(f"the prompt is not valid Unicode: half a character at {at}; {HALF_CHARACTER}")


def split_prompt(
    prompt: str, known: KnownTexts, extra_texts: Iterable[str] = (), template: TemplateText | None = None
) -> list[TextSpan]:
    """Cut `prompt` at the known documents in it.

    Args:
        prompt: the whole prompt as the model is to see it.
        known: texts of indexed documents.
        extra_texts: texts of documents given with this call. They are looked for as well, and that is all: a text
            that does not stand in the prompt changes nothing. Empty ones are passed over.
        template: of a rendered prompt, what the chat template wrote: no document is found in it.

    Returns:
        Spans that joined are `prompt`, none empty: `prefix` before the first document, `document`s with their key
        (None for one that came with `extra_texts` only), `text` between them, `suffix` after the last. Without a
        document everything is `suffix`: it is all to be prefilled.

    Raises:
        TypeError, ValueError: the prompt is not text or empty, or an extra text is not text.
    """
    check_prompt(prompt)
    extra = _as_known(extra_texts)
    if not known and extra is None:
        matches = []
    elif template is None:
        matches = known.find(prompt, extra)
    else:
        matches = template.find(known, extra)
    spans: list[TextSpan] = []
    done = 0
    for match in matches:
        between = SegmentKind.TEXT if spans else SegmentKind.PREFIX
        spans.append(TextSpan(between, prompt[done : match.start]))
        spans.append(TextSpan(SegmentKind.DOCUMENT, prompt[match.start : match.end], match.key, match.whole))
        done = match.end
    spans.append(TextSpan(SegmentKind.SUFFIX, prompt[done:]))
    return [span for span in spans if span.text]


def _as_known(texts: Iterable[str]) -> KnownTexts | None:
    if isinstance(texts, str):
        raise TypeError("documents must be a list of texts, got one str; write [text]")
    extra = KnownTexts()
    for text in texts:
        if canonical_text(text):
            extra.add(text, None)
    return extra if len(extra) else None
