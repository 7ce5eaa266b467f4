"""How close answers stay to full prefill, by what chunks were encoded after and which rows are recomputed.

usage: python benchmarks/index_quality.py DATA.json [--questions 24] [--rows alone=cacheblend:0.15 neighbours=none …]
           [--out FILE.jsonl] [--model bundled:smollm2] [--dtype float32] [--answer-tokens 16]

DATA.json: records with `question` and `docs` (HotpotQA or MuSiQue, reshaped). Reference: full prefill on the same token
ids. Printed: means of KL(full ‖ ours) in nats at the first answer token and over the reference's greedy answer
(teacher-forced), the share of those tokens with the same argmax, and the tokens forwarded per document token at index
time (anchors included).

Encoding contexts: `alone` (anchor only), `neighbours` (the four most similar chunks of the file, nearest last),
`groups` (chains of five similar chunks, each behind those before it). Rows recomputed: a repair strategy and its ratio.

Every figure is written to --out as soon as it is known; the same command goes on from there, and with --questions 0 it
prints the table of what is there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from evidence import divergence, messages, parse_strategy
from kvbench.measured import Measured

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.config import EncodingConfig
from kvboost_rag.indexing.embeddings import load_embedder
from kvboost_rag.indexing.neighbour_groups import group_chunks, group_contexts
from kvboost_rag.indexing.neighbours import Contexts, NeighbourRules, choose_contexts
from kvboost_rag.indexing.vector_index import VectorIndex
from kvboost_rag.models.load import load_model
from kvboost_rag.stores import MemoryStore

ROWS = ("alone=none", "alone=cacheblend:0.15", "neighbours=none", "neighbours=query:0.05")
ROWS += ("neighbours=sensitivity:0.05", "groups=none", "groups=query:0.05")


def contexts_of(texts: Sequence[str], num_tokens: Mapping[str, int], anchor: int) -> dict[str, tuple[Contexts, float]]:
    """By name: each text's neighbours, and tokens forwarded per document token."""
    index = VectorIndex()
    index.add(texts, load_embedder()(texts))
    total = sum(num_tokens[text] for text in texts)
    groups = group_chunks(index, texts, num_tokens)
    cheap = (total + anchor * len(groups)) / total
    found = {
        "alone": (dict.fromkeys(texts, ((),)), (total + anchor * len(texts)) / total),
        "groups": (group_contexts(groups), cheap),
        "groups twice": (group_contexts(groups, contexts=2), 2 * cheap),
    }
    for name, contexts in (("neighbours", 1), ("two contexts", 2)):
        chosen = choose_contexts(index, texts, num_tokens, NeighbourRules(contexts=contexts))
        sizes = (anchor + sum(num_tokens[n] for n in c) + num_tokens[text] for text in texts for c in chosen[text])
        found[name] = chosen, sum(sizes) / total
    return found


def report(measured: Measured, rows: Sequence[str]) -> str:
    lines = ["| encoded | rows recomputed | KL first | KL mean | agree | tokens per document token | questions |"]
    lines.append("|---|---|---|---|---|---|---|")
    num_questions, means = measured.means(rows)
    for row, (first, mean, agree, cost) in means.items():
        cells = f"{first:.4f} | {mean:.4f} | {agree:.3f} | {cost:.2f} | {num_questions}"
        lines.append(f"| {' | '.join(row.split('='))} | {cells} |")
    return "\n".join(lines)


def measure(args: argparse.Namespace, measured: Measured) -> None:
    records = json.loads(Path(args.data).read_text())
    loaded = load_model(args.model, dtype=args.dtype)
    engines = {
        sensitivity: KVBoost(loaded, store=MemoryStore(6 << 30), encoding=EncodingConfig(sensitivity=sensitivity))
        for sensitivity in {"=sensitivity" in row for row in args.rows}
    }
    engine = next(iter(engines.values()))
    texts = list(dict.fromkeys(text.strip() for record in records for text in record["docs"]))
    num_tokens = {text: len(engine.tokens.document_ids(text)) for text in texts}
    contexts = contexts_of(texts, num_tokens, len(engine.registry.describe("x", "").anchor_ids))
    params = GenerationParams(max_new_tokens=args.answer_tokens)
    for number, record in enumerate(records[: args.questions]):
        missing = [row for row in args.rows if number not in measured.rows[row]]
        if not missing:
            continue
        docs = [text.strip() for text in record["docs"]]
        prompt = messages(record["question"], docs)
        answer = engine.generate(prompt, reuse="off", documents=docs, params=params).token_ids
        reference = engine.logits(prompt, answer[:-1], reuse="off", documents=docs)
        for context in dict.fromkeys(row.split("=")[0] for row in missing):
            wanted = [row for row in missing if row.split("=")[0] == context]
            ours = engines[any("=sensitivity" in row for row in wanted)]
            neighbours, cost = contexts[context]
            ours.warm(docs, neighbours=[neighbours[text] for text in docs])
            for row in wanted:
                _, strategy, ratio = parse_strategy(row.split("=")[1])
                logits = ours.logits(prompt, answer[:-1], repair=strategy, recompute_ratio=ratio, strict=True)
                measured.add(row, number, (*divergence(reference, logits), cost))
            for key in list(ours.store.keys()):
                ours.store.delete(key)
        print(f"question {number + 1}/{args.questions}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    measured = Measured(args.out)
    if args.questions:
        measure(args, measured)
    print(report(measured, args.rows))


if __name__ == "__main__":
    main()
