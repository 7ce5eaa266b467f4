"""The demo as a picture: which tokens of each prompt were reused, recomputed and computed, both answers and times."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kvboost_rag.datamodels import GenerationResult, HitKind, SegmentKind

COLOURS = {"reused": "#9ad0b4", "recomputed": "#f2b35e", "computed": "#d8d8e4"}
MEANINGS = {
    "reused": "keys and values taken from the store",
    "recomputed": "in a document, and computed again with the whole prompt in view",
    "computed": "in no document: prefilled",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; color: #222 }
h2 { margin: 2em 0 .3em } .prompt { white-space: pre-wrap; font-size: 12px; line-height: 1.45; max-height: 22em;
overflow: auto; border: 1px solid #ccc; padding: .6em } table { border-collapse: collapse; margin: .6em 0 }
td, th { text-align: left; padding: .25em 1em .25em 0; vertical-align: top } svg { width: 100%; height: auto }
""" + "".join(f".{name} {{ background: {colour} }} " for name, colour in COLOURS.items())


@dataclass(frozen=True)
class Answered:
    """One question answered both ways.

    Attributes:
        pieces: the prompt's text by tokens, as the model saw it; `kinds`: what became of each of them.
    """

    question: str
    pieces: Sequence[str]
    kinds: Sequence[str]
    full: GenerationResult
    reuse: GenerationResult


def token_kinds(result: GenerationResult) -> list[str]:
    """What became of each prompt token."""
    kinds = ["computed"] * result.usage.input_tokens
    for segment in result.segments:
        if segment.kind is SegmentKind.DOCUMENT and segment.hit is not HitKind.PREFILLED:
            kinds[segment.start : segment.start + segment.num_tokens] = ["reused"] * segment.num_tokens
    kinds[: result.usage.exact_tokens] = ["reused"] * result.usage.exact_tokens  # a prefix that was there before
    for row in result.repair.rows:
        kinds[row] = "recomputed"
    return kinds


def page(answers: Sequence[Answered], setting: str) -> str:
    """A whole HTML document that needs nothing else.

    Args:
        setting: model, precision and machine, in words.
    """
    legend = " ".join(f'<span class="{kind}">&nbsp;{kind}&nbsp;</span> {MEANINGS[kind]}.' for kind in COLOURS)
    body = "\n".join(_section(number, answer) for number, answer in enumerate(answers, 1))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvboost-rag demo</title><style>{_STYLE}</style></head><body>
<h1>What was reused</h1>
<p>{html.escape(setting)}. Times run from the call with the prompt text to the first token; lookup, loading, realigning,
repair and prefill of the question included; one measurement each.</p>
<p>{legend}</p>
{picture(answers)}
{body}
</body></html>
"""


def picture(answers: Sequence[Answered]) -> str:
    """An SVG: for each question a strip of the prompt's tokens, and the times of both ways as bars of one scale."""
    longest = max((answer.full.ttft_ms for answer in answers), default=1.0)
    parts, y = [], 0
    for number, answer in enumerate(answers, 1):
        parts.append(_text(0, y + 16, f"{number}. {answer.question}", 15))
        total, x = len(answer.kinds), 0.0
        for kind, group in groupby(answer.kinds):
            width = len(list(group)) / total * 900
            parts.append(f'<rect x="{x:.2f}" y="{y + 24}" width="{width:.2f}" height="22" fill="{COLOURS[kind]}"/>')
            x += width
        for line, (name, result) in enumerate((("full prefill", answer.full), ("reuse", answer.reuse))):
            top, width = y + 54 + 20 * line, result.ttft_ms / longest * 240
            parts.append(f'<rect x="90" y="{top}" width="{width:.1f}" height="14" fill="#6c7a9c"/>')
            parts.append(_text(0, top + 12, name, 12))
            text = " ".join(result.text.split())
            shown = text if len(text) <= 72 else f"{text[:71]}…"
            parts.append(_text(98 + width, top + 12, f"{result.ttft_ms / 1000:.2f} s   {shown}", 12))
        y += 108
    for place, (kind, colour) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{place * 130}" y="{y}" width="14" height="14" fill="{colour}"/>')
        parts.append(_text(place * 130 + 20, y + 12, kind, 12))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {y + 20}" font-family="sans-serif">'
        f'<rect width="900" height="{y + 20}" fill="#fff"/>{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, size: int) -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" fill="#222">{html.escape(text)}</text>'


def _section(number: int, answer: Answered) -> str:
    usage, spans = answer.reuse.usage, []
    coloured = zip(answer.pieces, answer.kinds, strict=True)
    for kind, group in groupby(coloured, key=lambda pair: pair[1]):
        spans.append(f'<span class="{kind}">{html.escape("".join(piece for piece, _ in group))}</span>')
    counts = {kind: list(answer.kinds).count(kind) for kind in COLOURS}
    rows = "".join(
        f"<tr><th>{name}</th><td>{result.ttft_ms / 1000:.2f}&nbsp;s</td>"
        f"<td>{html.escape(result.text.strip())}</td></tr>"
        for name, result in (("full prefill", answer.full), ("reuse", answer.reuse))
    )
    told = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
    return (
        f"<h2>{number}. {html.escape(answer.question)}</h2>\n<table>{rows}</table>\n"
        f'<p>{usage.input_tokens:,} prompt tokens: {told}</p>\n<div class="prompt">{"".join(spans)}</div>'
    )
