"""Would it pay to keep the differences between a chunk's contexts, and to fit them on the recomputed rows?

usage: python benchmarks/compensation.py hotpotqa_60.json [--cases 6] [--model bundled:smollm2] [--out FILE.jsonl]
           [--minutes 9]

Each line of the output is one prompt by one way: KL(full ‖ ours) at the first token and over full prefill's greedy
answer. Lines that are there already are not measured again; the means are printed at the end. Contexts are those that
documents get by default, drawn from all documents of the file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from kvbench.arms import Arm
from kvbench.cases import Case, from_file
from kvbench.compensated import CompensatedRepair, Parts
from kvbench.runner import STORE_BYTES, Corpus

from kvboost_rag import KVBoost
from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.encode.encoder import Encoder, EncodingJob
from kvboost_rag.indexing.embeddings import load_embedder
from kvboost_rag.measure.calibrate import prompt_of, reference_answer
from kvboost_rag.models.load import load_model
from kvboost_rag.observe.divergence import kl_per_token
from kvboost_rag.repair import NoRepair
from kvboost_rag.stores import MemoryStore

ALONE = 2
"""Number of the part that was encoded behind the anchor alone; 0 and 1 are the two contexts."""
WAYS: dict[str, tuple[float, int, tuple[tuple[int, int], ...]]] = {
    "one context, 5 %": (0.05, 1, ()),
    "two contexts, 5 %": (0.05, 2, ()),
    "two contexts, 10 %": (0.10, 2, ()),
    "two contexts, 5 %, their difference fitted": (0.05, 2, ((1, 0),)),
    "two contexts, 5 %, both differences fitted": (0.05, 2, ((1, 0), (0, ALONE))),
    "one context, 5 %, difference from alone fitted": (0.05, 1, ((0, ALONE),)),
}
"""Share of rows, how many parts are averaged, and which differences of parts are fitted."""


class _Chunks:
    """KV of one prompt's documents behind each context."""

    def __init__(self, engine: KVBoost, case: Case, corpus: Corpus) -> None:
        identity = engine.registry.identity
        encoder = Encoder(engine.model, engine.probe.require_layout)
        contexts = corpus.contexts(case.documents, Arm(NoRepair(), 0.0, 4, contexts=2)) or []
        self._parts: dict[tuple[int, ...], Parts] = {}
        for text, behind in zip(case.documents, contexts, strict=True):
            own = engine.registry.describe(text, "").token_ids
            parts = []
            for context in (*(behind * 2)[:2], ()):  # a chunk with one context has it twice
                records = [engine.registry.describe(other, "") for other in context]
                before = [i for record in records for i in (*record.token_ids, *identity.separator_ids)]
                parts.append(encoder.encode(EncodingJob(own, (*identity.anchor_ids, *before))))
            self._parts[own] = parts

    def of(self, ids: tuple[int, ...]) -> Parts:
        """Of the run of a chunk that has these ids."""
        for own, parts in self._parts.items():
            for first in range(len(own) - len(ids) + 1):
                if own[first : first + len(ids)] == ids:
                    return [_cut(part, first, first + len(ids)) for part in parts]
        raise KeyError("the prompt holds a document that was not encoded")


def _cut(kv: ChunkKV, start: int, end: int) -> ChunkKV:
    return ChunkKV(tuple(k[:, :, start:end] for k in kv.keys), tuple(v[:, :, start:end] for v in kv.values))


def lines(engine: KVBoost, case: Case, corpus: Corpus, todo: list[str]) -> Iterator[dict[str, object]]:
    """One prompt by every way of `todo`."""
    chunks, reference = _Chunks(engine, case, corpus), reference_answer(engine, case)
    engine.warm(case.documents, neighbours=None)
    prompt = prompt_of(engine.tokenizer, case.messages())
    for way in todo:
        ratio, used, directions = WAYS[way]
        logits = engine.logits(
            prompt,
            reference.token_ids[:-1],
            documents=case.documents,
            repair=CompensatedRepair(chunks.of, used, directions),
            recompute_ratio=ratio,
            reuse="blend",
            strict=True,
        )
        kl = kl_per_token(reference.logits, logits)
        yield {"case": case.name, "arm": way, "kl_first": float(kl[0]), "kl_mean": float(kl.mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", type=int, default=6)
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--out", type=Path, default=Path("compensation.jsonl"))
    parser.add_argument("--minutes", type=float, default=1e9)
    args = parser.parse_args()
    known = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done, cases, begun = {(r["case"], r["arm"]) for r in known}, from_file(args.file, 60), time.monotonic()
    with KVBoost(load_model(args.model, dtype="float32"), store=MemoryStore(STORE_BYTES), profile=None) as engine:
        corpus = Corpus.of([[d] for c in cases for d in c.documents], load_embedder(), engine.tokens.count)
        with args.out.open("a") as out:
            for case in cases[: args.cases]:
                todo = [way for way in WAYS if (case.name, way) not in done]
                if todo and time.monotonic() - begun < 60 * args.minutes:
                    for line in lines(engine, case, corpus, todo):
                        print(json.dumps(line), file=out, flush=True)
    print(shown(args.out))


def shown(path: Path) -> str:
    """Means of every way."""
    figures = defaultdict(list)
    for row in map(json.loads, path.read_text().splitlines()):
        figures[row["arm"]].append((row["kl_first"], row["kl_mean"]))
    return "\n".join(
        f"{arm:50s} {fmean(f for f, _ in kl):.4f} / {fmean(m for _, m in kl):.4f} ({len(kl)} prompts)"
        for arm, kl in figures.items()
    )


if __name__ == "__main__":
    main()
