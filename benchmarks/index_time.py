"""What index time costs and buys: neighbours, groups, their search, and donors.

usage: python benchmarks/index_time.py donors DATA.json [--model bundled:smollm2]
       python benchmarks/index_time.py edit DATA.json [--questions 6] [--neighbours 0] [--model bundled:smollm2]
       python benchmarks/index_time.py search [--sizes 10000 50000 100000]

DATA.json: records with `question` and `docs` (HotpotQA or MuSiQue, reshaped).

donors:  how surely MinHash finds the original of an edited 256-token chunk, by threshold and permutations, with the
         time and memory it takes. The file's paragraphs are the corpus; times include hashing and are per chunk.
edit:    one word in the middle of a stored 512-token chunk is replaced: tokens computed, TTFT with a donor and with the
         edited chunk encoded whole (taken in turn, medians), and KL(fresh ‖ donor) in nats at the first answer token.
         TTFT is what the engine reports: lookup, search for donors, encoding, realigning and the question included.
search:  seconds to choose four neighbours for every one of N random 384-dimensional vectors, by comparing all and by
         the approximate index (building it included), and the share of neighbours on which both agree.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from evidence import divergence, messages

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.encode.similarity import DonorIndex, DonorRules
from kvboost_rag.indexing.chunking import FixedChunker
from kvboost_rag.indexing.neighbours import NeighbourRules, choose_contexts
from kvboost_rag.indexing.vector_index import VectorIndex
from kvboost_rag.models.load import load_model
from kvboost_rag.prompt.tokens import PromptTokens
from kvboost_rag.stores import MemoryStore


def edited(ids: Sequence[int], following: Sequence[int], source: random.Random) -> dict[str, list[int]]:
    """Ways in which a chunk comes back changed; `following` is what stands after it in its document."""
    ids, at = list(ids), source.randrange(len(ids) - 40)
    words = [source.randrange(5, 40_000) for _ in range(20)]
    shift = len(ids) // 4
    spread = list(ids)
    for place in range(10, len(ids), len(ids) // 8):
        spread[place] = words[0]
    return {
        "one token": [*ids[:at], words[0], *ids[at + 1 :]],
        "20-token header": [*words, *ids],
        "20 tokens deleted": [*ids[:at], *ids[at + 20 :]],
        "8 tokens, spread": spread,
        "window moved by 1/4": [*ids[shift:], *following[:shift]],
        "window moved by 1/2": [*ids[2 * shift :], *following[: 2 * shift]],
    }


def donors(args: argparse.Namespace) -> None:
    tokens = PromptTokens(load_model(args.model).tokenizer)
    records = json.loads(Path(args.data).read_text())
    chunks = []
    for record in records:
        text = "\n\n".join(record["docs"])
        ids = [tokens.document_ids(chunk.text) for chunk in FixedChunker(tokens.count, 256).split(text)]
        chunks += [(a, b) for a, b in pairwise(ids) if len(a) > 200 and len(b) > 128]
    source = random.Random(0)
    cases = [edited(chunk, following, source) for chunk, following in chunks]
    kinds = list(cases[0])
    print(f"{len(chunks)} chunks of {np.mean([len(chunk) for chunk, _ in chunks]):.0f} tokens on average")
    print(
        f"| threshold | permutations | {' | '.join(kinds)} | others looked at per search | add ms | search ms | bytes |"
    )
    print("|---" * (len(kinds) + 6) + "|")
    for threshold in (0.3, 0.5, 0.7):
        for num_permutations in (64, 128, 256):
            rules = DonorRules(threshold=threshold, num_permutations=num_permutations)
            print(donor_row(rules, [chunk for chunk, _ in chunks], cases))


def donor_row(rules: DonorRules, chunks: Sequence[Sequence[int]], cases: Sequence[Mapping[str, Sequence[int]]]) -> str:
    index = DonorIndex(rules)
    start = time.perf_counter()
    index.add({str(i): chunk for i, chunk in enumerate(chunks)})
    add_ms = (time.perf_counter() - start) * 1e3 / len(chunks)
    found, others, searches = defaultdict(int), 0, 0
    start = time.perf_counter()
    for i, case in enumerate(cases):
        for kind, ids in case.items():
            candidates = index.candidates(ids)
            found[kind] += str(i) in candidates
            others += len(set(candidates) - {str(i)})
            searches += 1
    search_ms = (time.perf_counter() - start) * 1e3 / searches
    recall = " | ".join(f"{found[kind] / len(cases):.0%}" for kind in cases[0])
    cells = f"{others / searches:.2f} | {add_ms:.2f} | {search_ms:.2f} | {4 * rules.num_permutations}"
    return f"| {rules.threshold} | {rules.num_permutations} | {recall} | {cells} |"


def edited_word(text: str) -> str:
    words = text.split(" ")
    words[len(words) // 2] = "Zanzibar"
    return " ".join(words)


def edit(args: argparse.Namespace) -> None:
    records = json.loads(Path(args.data).read_text())[: args.questions]
    rows = []
    for record in records:
        with KVBoost.from_pretrained(args.model, dtype=args.dtype, store=MemoryStore(4 << 30)) as engine:
            chunker = FixedChunker(engine.tokens.count, 512)
            texts = [chunk.text for chunk in chunker.split("\n\n".join(record["docs"]))]
            engine.warm(texts, neighbours=args.neighbours)
            text = edited_word(texts[0])
            prompt = messages(record["question"], [text])
            options = {
                "documents": [text],
                "repair": "none",
                "strict": True,
                "params": GenerationParams(max_new_tokens=1),
            }
            results, logits = {}, {}
            for donors in (True, False, True, False, True, False):
                engine.store.delete(engine.registry.describe(text, "").content_hash)
                logits[donors] = engine.logits(prompt, documents=[text], repair="none", donors=donors)[0]
                engine.store.delete(engine.registry.describe(text, "").content_hash)
                results.setdefault(donors, []).append(engine.generate(prompt, donors=donors, **options))
                engine.finish_background()
            segment = next(s for s in results[True][0].segments if s.num_donor_tokens)
            ttft = [float(np.median([result.ttft_ms for result in results[donors]])) for donors in (True, False)]
            kl = divergence(logits[False][None], logits[True][None])[0]
            rows.append((segment.num_tokens, segment.num_tokens - segment.num_donor_tokens, *ttft, kl))
            print(".", end="", file=sys.stderr, flush=True)
    tokens, computed, with_donor, whole, kl = np.mean(rows, axis=0)
    print("| chunk tokens | computed | share | TTFT with donor, ms | encoded whole, ms | KL mean | KL max |")
    print("|---|---|---|---|---|---|---|")
    cells = f"{tokens:.0f} | {computed:.0f} | {computed / tokens:.0%} | {with_donor:.0f} | {whole:.0f}"
    print(f"| {cells} | {kl:.1e} | {max(row[-1] for row in rows):.1e} |")


def search(args: argparse.Namespace) -> None:
    print("| chunks | all compared, s | approximate, s | agreement |")
    print("|---|---|---|---|")
    for size in args.sizes:
        # Clustered, as texts are: random directions alone are all equally far from each other.
        generator = np.random.default_rng(0)
        centres = generator.normal(size=(max(1, size // 50), 384))
        vectors = centres[generator.integers(len(centres), size=size)] + 0.7 * generator.normal(size=(size, 384))
        vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
        keys = [str(i) for i in range(size)]
        seconds, chosen = [], []
        for limit in (size, size - 1):
            index = VectorIndex(exact_limit=limit)
            index.add(keys, vectors)
            start = time.perf_counter()
            chosen.append(choose_contexts(index, keys, dict.fromkeys(keys, 256), NeighbourRules()))
            seconds.append(time.perf_counter() - start)
        shared = np.mean([len(set(chosen[0][key]) & set(chosen[1][key])) / 4 for key in keys])
        print(f"| {size} | {seconds[0]:.1f} | {seconds[1]:.1f} | {shared:.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for run in (donors, edit):
        command = commands.add_parser(run.__name__)
        command.set_defaults(run=run)
        command.add_argument("data")
        command.add_argument("--model", default="bundled:smollm2")
    command = commands.choices["edit"]
    command.add_argument("--questions", type=int, default=6)
    command.add_argument("--dtype", default="float32")
    command.add_argument("--neighbours", type=int, default=0)
    command = commands.add_parser("search")
    command.set_defaults(run=search)
    command.add_argument("--sizes", type=int, nargs="+", default=[10_000, 50_000, 100_000])
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
