"""How far the first answer tokens are from full prefill, by encoding context and repair strategy.

usage: python benchmarks/evidence.py DATA.json [--questions 12] [--answer-tokens 16] [--model bundled:smollm2]
           [--neighbours 0 4] [--strategies none cacheblend:0.15 query:0.15] [--dtype float32]

DATA.json: records with `question` and `docs` (HotpotQA or MuSiQue, reshaped). For each question the prompt is a short
system head, its paragraphs and the question; the reference is full prefill on the same token ids. Printed: KL(full ‖
ours) in nats at the first answer token and over the reference's greedy answer (teacher-forced), and the share of
those tokens with the same argmax. Neighbours are the most similar other paragraphs of the file by all-MiniLM-L6-v2.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.indexing.embeddings import load_embedder
from kvboost_rag.measure.calibrate import prompt_of
from kvboost_rag.repair import STRATEGIES, QueryRepair, RepairStrategy
from kvboost_rag.stores import MemoryStore

SYSTEM = "You answer questions using the passages."
TASK = "Answer the question using only the passages below."


def messages(question: str, docs: Sequence[str]) -> list[dict[str, str]]:
    body = "\n\n".join([TASK, *docs, f"Question: {question}\nAnswer with a short phrase."])
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": body}]


def nearest_texts(texts: Sequence[str], count: int) -> dict[str, list[str]]:
    """For each text the most similar other ones, nearest last."""
    vectors = load_embedder()(texts)
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -1)
    order = np.argsort(-similarity, axis=1)[:, :count]
    return {text: [texts[j] for j in order[i][::-1]] for i, text in enumerate(texts)}


def divergence(reference: torch.Tensor, ours: torch.Tensor) -> tuple[float, float, float]:
    """(KL first, KL mean, agreement) of logits `[num_tokens, vocab_size]`."""
    p, q = reference.log_softmax(-1), ours.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    agree = (p.argmax(-1) == q.argmax(-1)).float().mean()
    return float(kl[0]), float(kl.mean()), float(agree)


def parse_strategy(text: str) -> tuple[str, RepairStrategy, float]:
    name, _, ratio = text.partition(":")
    if name == "query*dev":
        return text, QueryRepair(weight="deviation"), float(ratio or 0.05)
    return text, STRATEGIES[name](), float(ratio or 0.05)


def run(args: argparse.Namespace) -> dict[str, list[tuple[float, float, float]]]:
    records = json.loads(Path(args.data).read_text())
    texts = list(dict.fromkeys(text for record in records for text in record["docs"]))
    near = nearest_texts(texts, max(args.neighbours)) if max(args.neighbours) else {}
    results: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for count in args.neighbours:
        with KVBoost.from_pretrained(args.model, dtype=args.dtype, store=MemoryStore(4 << 30)) as engine:
            for index, record in enumerate(records[: args.questions]):
                docs = record["docs"]
                engine.warm(docs, neighbours=[near[d][-count:] for d in docs] if count else None)
                prompt = prompt_of(engine.tokenizer, messages(record["question"], docs))
                answer = engine.generate(
                    prompt, reuse="off", params=GenerationParams(max_new_tokens=args.answer_tokens)
                ).token_ids
                reference = engine.logits(prompt, answer[:-1], reuse="off")
                for name, strategy, ratio in map(parse_strategy, args.strategies):
                    ours = engine.logits(prompt, answer[:-1], repair=strategy, recompute_ratio=ratio, strict=True)
                    results[f"{count} neighbours, {name}"].append(divergence(reference, ours))
                print(f"\r{count} neighbours: question {index + 1}/{args.questions}", end="", flush=True)
        print()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--strategies", nargs="+", default=["none", "cacheblend:0.15", "query:0.15", "query:0.05"])
    args = parser.parse_args()
    for name, rows in run(args).items():
        first, mean, agree = np.mean(rows, axis=0)
        print(f"{name:36s} KL first {first:.4f}  KL mean {mean:.4f}  agree {agree:.3f}  ({len(rows)} questions)")


if __name__ == "__main__":
    main()
