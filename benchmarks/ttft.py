"""Time to first token: ours beside transformers and the oracle, in one process on one clock.

usage: python benchmarks/ttft.py [core] [--documents 16] [--rounds 5] [--quick]   ours, transformers, oracle
       python benchmarks/ttft.py peers        and LangChain's, LlamaIndex's and PyPI's classes, a prefix cache by hand
       python benchmarks/ttft.py states       cold, from disk, quantised
       python benchmarks/ttft.py lengths      1k, 2k, 4k, 8k tokens
       python benchmarks/ttft.py decode       tokens per second after the first
       python benchmarks/ttft.py workloads    reordered, popular, edited, timestamp, turns
common: [--model bundled:smollm2] [--dtype bfloat16] [--out FILE.jsonl]

Prompts hold documents of 256 tokens (reference texts of the standard library), each time in another order, and a
question. A time runs from the call with the prompt's text to one generated token in the caller's hand: tokenising,
lookup, loading, realigning, repair and prefill included, device synchronised. Every round sends one prompt through all
rows; shown are medians over the rounds. Before the clock starts everything was called once. The documents are warm in
memory, without neighbours (which change nothing at query time). The oracle is transformers with everything in front of
the text behind the last document in a DynamicCache already. `peak/KV` is the most memory above what was held before the
call, divided by the bytes of the prompt's KV.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvbench.clock import Series, measure
from kvbench.contenders import FULL, Contender, Oracle, Ours, Plain, PrefixByHand, strategies
from kvbench.machine import this_machine
from kvbench.peers import peers
from kvbench.tables import plain_table, ttft_table
from kvbench.texts import RagPrompt, pydoc_documents
from kvbench.workloads import WORKLOADS, reordered

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.config import EncodingConfig
from kvboost_rag.models.load import LoadedModel, load_model
from kvboost_rag.stores import DiskStore, MemoryStore, Store

STORE_BYTES = 8 << 30
DECODED_TOKENS = 33
Results = Mapping[str, Series]


class Bench:
    """The loaded model, the arguments, and where results go."""

    def __init__(self, loaded: LoadedModel, args: argparse.Namespace) -> None:
        self.loaded, self.args = loaded, args
        self._head = {"machine": this_machine().as_dict(), "model": args.model, "dtype": args.dtype}

    @contextmanager
    def engine(
        self, documents: Sequence[str] = (), store: Store | None = None, codec: str = "none"
    ) -> Iterator[KVBoost]:
        """An engine with the documents warm."""
        encoding = EncodingConfig(quantization=codec)
        with KVBoost(self.loaded, store=store or MemoryStore(STORE_BYTES), encoding=encoding, profile=None) as engine:
            if documents:
                report = engine.warm(documents, neighbours=None)
                print(f"{report.num_chunks} documents, {report.chunk_tokens} tokens, warmed in {report.seconds:.1f} s")
            yield engine

    def documents(self, count: int) -> list[str]:
        from kvboost_rag.prompt.tokens import PromptTokens

        return pydoc_documents(PromptTokens(self.loaded.tokenizer), count, self.args.chunk_tokens)

    def record(self, suite: str, series: Results, **more: Any) -> None:
        """Append rows to the output file."""
        if self.args.out is None:
            return
        with self.args.out.open("a") as file:
            for row in series.values():
                print(json.dumps({"suite": suite, **self._head, **more, **row.as_dict()}), file=file)


def core(bench: Bench, with_peers: bool = False) -> None:
    args = bench.args
    documents = bench.documents(args.documents)
    with bench.engine(documents) as engine:
        model, tokens = engine.model, engine.tokens
        rows: list[Contender] = [*strategies(engine), Plain(model, tokens), Oracle(model, tokens)]
        if with_peers:
            rows += [PrefixByHand(model, tokens), *peers(model, tokens, documents)]
        rows = [c for c in rows if not args.only or any(word in c.name for word in args.only)]
        # Another order than any that is timed: those that keep the last prompt must not have it already.
        warm_up = reordered(documents, len(documents), 1, seed=99)[0]
        series = measure(rows, reordered(documents, len(documents), args.rounds), warm_up)
        print(ttft_table(series, engine.probe.require_layout.bytes_per_token))
    bench.record("peers" if with_peers else "core", series, documents=args.documents)


def with_peers(bench: Bench) -> None:
    core(bench, with_peers=True)


def states(bench: Bench) -> None:
    """Where the KV comes from, for the default strategy."""
    documents = bench.documents(bench.args.documents)
    with (
        tempfile.TemporaryDirectory() as folder,
        bench.engine(documents) as memory,
        bench.engine(documents, DiskStore(folder)) as disk,
        bench.engine(documents, codec="k8v8") as k8v8,
        bench.engine(documents, codec="k8v4") as k8v4,
        bench.engine() as fresh,
    ):
        rows = [
            Ours(FULL, memory, reuse="off"),
            Ours("query 5 %, from memory", memory, repair="query"),
            Ours("query 5 %, from memory, k8v8", k8v8, repair="query"),
            Ours("query 5 %, from memory, k8v4", k8v4, repair="query"),
            Ours("query 5 %, from disk (page cache warm)", disk, repair="query"),
            Ours("query 5 %, cold: documents encoded in the call", fresh, cold=True, repair="query"),
        ]
        series = measure(rows, reordered(documents, len(documents), bench.args.rounds))
        print(ttft_table(series, memory.probe.require_layout.bytes_per_token))
    bench.record("states", series, documents=bench.args.documents)


def lengths(bench: Bench) -> None:
    """How the ratios grow with the prompt."""
    table = []
    sizes = (4, 8) if bench.args.quick else (4, 8, 16, 31)
    documents = bench.documents(max(sizes))
    with bench.engine(documents) as engine:
        names = ("none", "query 5 %", "cacheblend 15 %")
        for count in sizes:
            rows = [c for c in strategies(engine) if c.name in (FULL, *names)] + [Oracle(engine.model, engine.tokens)]
            series = measure(rows, reordered(documents, count, bench.args.rounds))
            bench.record("lengths", series, documents=count)
            full, oracle = series[FULL], series[Oracle.name]
            cells = [f"{full.p50_ms / series[n].p50_ms:.1f} x" for n in names]
            table.append([f"{full.mean('prompt_tokens'):.0f}", f"{full.p50_ms:.0f}", f"{oracle.p50_ms:.0f}", *cells])
    print(plain_table(["prompt tokens", "full ms", "oracle ms", *names], table))


def decode(bench: Bench) -> None:
    """Speed behind the first token, by reuse and by transformers alone."""
    documents = bench.documents(bench.args.documents)
    rates: dict[str, list[float]] = {}
    with bench.engine(documents) as engine:
        params = GenerationParams(max_new_tokens=DECODED_TOKENS, extra={"min_new_tokens": DECODED_TOKENS})
        for prompt in reordered(documents, len(documents), bench.args.rounds + 1):
            text = prompt.text(engine.tokens)
            for name, options in (("transformers (reuse off)", {"reuse": "off"}), ("query 5 %", {"repair": "query"})):
                result = engine.generate(text, params=params, **options)
                rate = (DECODED_TOKENS - 1) / (result.total_ms - result.ttft_ms) * 1e3
                rates.setdefault(name, []).append(rate)
    medians = {name: sorted(values[1:])[len(values[1:]) // 2] for name, values in rates.items()}
    first = next(iter(medians.values()))
    print(plain_table(["", "tokens/s", "relative"], [[n, f"{r:.1f}", f"{r / first:.3f}"] for n, r in medians.items()]))


def workloads(bench: Bench) -> None:
    """Sequences of prompts; for each row what is reused, and after how many questions warming has paid off."""
    args = bench.args
    count, pool = max(4, args.rounds), 2 * args.documents
    documents = bench.documents(pool)
    for workload in WORKLOADS.values():
        if args.only and workload.name not in args.only:
            continue
        print(f"\n{workload.name}: {workload.what}")
        with bench.engine() as engine:
            prompts = workload.make(documents, args.documents, count, 0)
            known = [d for d in documents if any(d in p.documents for p in prompts)]
            report = engine.warm(known, neighbours=None)
            rows = [
                Ours(FULL, engine, reuse="off"),
                PrefixByHand(engine.model, engine.tokens),
                Ours("exact (a prefix cache)", engine, hint=True, reuse="exact"),
                Ours("none", engine, hint=True, repair="none"),
                Ours("query 5 %", engine, hint=True, repair="query"),
            ]
            series = measure(rows, prompts, RagPrompt("Are you there?", ()))  # nothing of the sequence is primed
        bench.record(f"workload {workload.name}", series, documents=args.documents, warm_seconds=report.seconds)
        print(_workload_table(series, report.seconds))


def _workload_table(series: Results, warm_seconds: float) -> str:
    full = series[FULL]
    rows = []
    for row in series.values():
        if row.failure is not None:
            rows.append([row.name, row.failure, *[""] * 5])
            continue
        saved_ms = full.p50_ms - row.p50_ms
        warmed = row.name in ("none", "query 5 %")
        pays = f"{warm_seconds * 1e3 / saved_ms:.1f}" if warmed and saved_ms > 0 else "never" if warmed else ""
        reused = row.mean("reused_tokens") / max(1.0, row.mean("prompt_tokens"))
        figures = [f"{row.p50_ms:.0f}", f"{row.p95_ms:.0f}", f"{full.p50_ms / row.p50_ms:.1f} x", f"{reused:.0%}"]
        rows.append([row.name, *figures, f"{warm_seconds:.1f}" if warmed else "", pays])
    return plain_table(["", "p50 ms", "p95 ms", "full ÷", "reused", "warm-up s", "paid off after questions"], rows)


SUITES: dict[str, Callable[[Bench], None]] = {
    "core": core,
    "peers": with_peers,
    "states": states,
    "lengths": lengths,
    "decode": decode,
    "workloads": workloads,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", default=["core"], help=f"of: {', '.join(SUITES)}, all")
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--chunk-tokens", type=int, default=256, choices=(64, 128, 256, 512))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[], help="words of the rows, or names of the workloads, to run")
    parser.add_argument("--quick", action="store_true", help="8 documents, 2 rounds")
    parser.add_argument("--out", type=Path, help="append rows as JSON lines")
    args = parser.parse_args()
    if unknown := [s for s in args.suites if s not in (*SUITES, "all")]:
        parser.error(f"unknown suites {', '.join(unknown)}; known: {', '.join(SUITES)}, all")
    if args.quick:
        args.documents, args.rounds = min(args.documents, 8), min(args.rounds, 2)
    print(f"{args.model} {args.dtype}; {this_machine().line()}")
    bench = Bench(load_model(args.model, dtype=args.dtype), args)
    for name in SUITES if "all" in args.suites else args.suites:
        print(f"\n{name}")
        SUITES[name](bench)


if __name__ == "__main__":
    main()
