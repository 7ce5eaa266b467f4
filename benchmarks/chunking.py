"""Fixed against semantic chunk boundaries on real text, at the same number of chunks.

usage: python benchmarks/chunking.py DATA.json [--questions 12] [--chunk-tokens 128] [--model bundled:smollm2]
           [--strategies none query:0.05] [--dtype float32] [--boundaries-only] [--out FILE.jsonl]

DATA.json: records with `question` and `docs` (HotpotQA or MuSiQue, reshaped). The paragraphs of a question, joined by
blank lines, are one document. It is cut by `FixedChunker` and by `SemanticChunker`, the latter's maximum chosen so
that both give as many chunks (or the semantic one more, where no maximum gives as many).

Printed: how many boundaries fall inside a sentence, judged by NLTK's punkt model, which neither chunker uses (it comes
with llama-index-core); and, without --boundaries-only, KL(full ‖ ours) in nats at the first answer token and over the
reference's greedy answer. Both prompts hold the same text; each is compared with full prefill on its own token ids.
Chunks are encoded without neighbours, so that the boundaries alone make the difference.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from evidence import divergence, messages, parse_strategy
from kvbench.measured import Measured

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.indexing.chunking import FixedChunker, SemanticChunker, TextChunk
from kvboost_rag.indexing.embeddings import load_embedder
from kvboost_rag.stores import MemoryStore

Cut = dict[str, list[TextChunk]]


def caching_embedder() -> Callable[[Sequence[str]], np.ndarray]:
    """Each sentence is embedded once, however many sizes are tried."""
    embed = load_embedder()
    known = cache(lambda text: embed([text])[0])
    return lambda texts: np.stack([known(text) for text in texts])


def cut_both_ways(text: str, chunk_tokens: int, count: Callable[[str], int], embed: Callable) -> Cut:
    fixed = FixedChunker(count, chunk_tokens).split(text)
    tried = []
    for maximum in range(chunk_tokens, 4 * chunk_tokens, 4):
        chunks = SemanticChunker(count, embed, min_tokens=chunk_tokens // 4, max_tokens=maximum).split(text)
        tried.append(chunks)
        if len(chunks) == len(fixed):
            break
    no_fewer = [chunks for chunks in tried if len(chunks) >= len(fixed)]
    return {"fixed": fixed, "semantic": min(no_fewer, key=len)}


def punkt() -> Callable[[str], set[int]]:
    """Offsets at which a sentence ends, white space behind it left out."""
    import nltk

    folder = Path(next(iter(find_spec("llama_index.core").submodule_search_locations)))
    nltk.data.path.append(str(folder / "_static" / "nltk_cache"))
    tokenizer = nltk.tokenize.PunktTokenizer("english")
    return lambda text: {end for _, end in tokenizer.span_tokenize(text)}


def report_boundaries(cuts: Sequence[tuple[str, Cut]]) -> None:
    sentence_ends = punkt()
    for name in ("fixed", "semantic"):
        inside = total = 0
        for text, cut in cuts:
            ends = sentence_ends(text)
            boundaries = [chunk.end for chunk in cut[name][:-1]]
            inside += sum(end not in ends for end in boundaries)
            total += len(boundaries)
        chunks = sum(len(cut[name]) for _, cut in cuts)
        print(f"{name:10s} {chunks} chunks, {inside} of {total} boundaries inside a sentence ({inside / total:.1%})")


def measure_divergence(
    engine: KVBoost, records: Sequence[dict], cuts: Sequence[tuple[str, Cut]], args: argparse.Namespace
) -> Measured:
    measured = Measured(args.out)
    params = GenerationParams(max_new_tokens=args.answer_tokens)
    for index, (record, (text, cut)) in enumerate(zip(records, cuts, strict=True)):
        for name, chunks in cut.items():
            missing = [s for s in args.strategies if index not in measured.rows[f"{name}={s}"]]
            if not missing:
                continue
            documents = [chunk.text for chunk in chunks]
            engine.warm(documents, neighbours=None)
            prompt = messages(record["question"], [text])
            answer = engine.generate(prompt, reuse="off", params=params).token_ids
            reference = engine.logits(prompt, answer[:-1], reuse="off")
            for label, strategy, ratio in map(parse_strategy, missing):
                ours = engine.logits(prompt, answer[:-1], repair=strategy, recompute_ratio=ratio, strict=True)
                measured.add(f"{name}={label}", index, divergence(reference, ours))
            engine.evict(documents)  # the other way of cutting must not find these
        print(f"question {index + 1}/{len(records)}", flush=True)
    return measured


def report_divergence(measured: Measured, strategies: Sequence[str]) -> str:
    lines = ["| boundaries | rows recomputed | KL first | KL mean | agree | questions |", "|---|---|---|---|---|---|"]
    num_questions, means = measured.means([f"{name}={s}" for s in strategies for name in ("fixed", "semantic")])
    for row, (first, mean, agree) in means.items():
        cells = f"{first:.4f} | {mean:.4f} | {agree:.3f} | {num_questions}"
        lines.append(f"| {' | '.join(row.split('='))} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--chunk-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--strategies", nargs="+", default=["none", "query:0.05"])
    parser.add_argument("--boundaries-only", action="store_true")
    parser.add_argument("--out", type=Path, help="keep each figure as soon as it is known, and go on from there")
    args = parser.parse_args()
    records = json.loads(Path(args.data).read_text())[: args.questions]
    with KVBoost.from_pretrained(args.model, dtype=args.dtype, store=MemoryStore(4 << 30)) as engine:
        embed = caching_embedder()
        texts = ["\n\n".join(record["docs"]) for record in records]
        cuts = [(text, cut_both_ways(text, args.chunk_tokens, engine.tokens.count, embed)) for text in texts]
        report_boundaries(cuts)
        if not args.boundaries_only:
            print(report_divergence(measure_divergence(engine, records, cuts, args), args.strategies))


if __name__ == "__main__":
    main()
