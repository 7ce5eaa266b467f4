"""Time to first token: ours beside transformers, in one process on one clock.

usage: python benchmarks/ttft.py [--quick] [--documents 16] [--rounds 5] [--model bundled:smollm2] [--dtype bfloat16]
           [--out FILE.jsonl]

Prompts hold the same documents of 256 tokens (reference texts of the standard library), each time in another order,
and a question. A time runs from the call with the prompt's text to one generated token in the caller's hand:
tokenising, lookup, loading, realigning, repair and prefill included, device synchronised. Every round sends one prompt
through all rows; shown is the median over the rounds. Before the clock starts everything was called once, and the
documents are in memory. `oracle` is transformers with everything in front of the text behind the last document in a
DynamicCache already.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from kvbench.clock import Series, measure
from kvbench.contenders import Oracle, Plain, strategies
from kvbench.machine import this_machine
from kvbench.texts import pydoc_documents, shuffled_prompts

from kvboost_rag import KVBoost
from kvboost_rag.stores import MemoryStore

FULL, ORACLE = "full prefill (reuse off)", Oracle.name


def run(args: argparse.Namespace) -> dict[str, Series]:
    with KVBoost.from_pretrained(args.model, dtype=args.dtype, store=MemoryStore(8 << 30)) as engine:
        documents = pydoc_documents(engine.tokens, args.documents, args.chunk_tokens)
        report = engine.warm(documents)
        kv_bytes = engine.probe.require_layout.bytes_per_token
        print(f"{report.num_chunks} documents, {report.chunk_tokens} tokens, warmed in {report.seconds:.1f} s")
        contenders = [*strategies(engine), Plain(engine.model, engine.tokens), Oracle(engine.model, engine.tokens)]
        chosen = [c for c in contenders if not args.only or any(word in c.name for word in args.only)]
        series = measure(chosen, shuffled_prompts(documents, args.rounds))
    print(table(series, kv_bytes))
    return series


def table(series: Mapping[str, Series], kv_bytes_per_token: int) -> str:
    """Medians, ratios and stages as text."""
    full, oracle = series.get(FULL), series.get(ORACLE)
    lines = [
        f"{'':46s} {'TTFT':>8s} {'min':>8s} {'p95':>8s} {'full ÷':>7s} {'÷ oracle':>8s} "
        f"{'prompt':>7s} {'reused':>7s} {'recomp.':>7s} {'peak/KV':>7s}"
    ]
    for row in series.values():
        if row.failure is not None:
            lines.append(f"{row.name:46s} {row.failure}")
            continue
        faster = f"{full.p50_ms / row.p50_ms:7.2f}" if full and full.samples else f"{'':7s}"
        slower = f"{row.p50_ms / oracle.p50_ms:8.2f}" if oracle and oracle.samples else f"{'':8s}"
        prompt = row.mean("prompt_tokens")
        peak = f"{row.peak_bytes / (kv_bytes_per_token * prompt):7.2f}" if row.peak_bytes is not None else f"{'':7s}"
        lines.append(
            f"{row.name:46s} {row.p50_ms:8.0f} {row.fastest_ms:8.0f} {row.p95_ms:8.0f} {faster} {slower} "
            f"{prompt:7.0f} {row.mean('reused_tokens'):7.0f} {row.mean('recomputed_tokens'):7.0f} {peak}"
        )
    lines.append("stages in ms (medians):")
    for row in series.values():
        stages = row.as_dict().get("stages_ms", {})
        if stages:
            shown = "  ".join(f"{name.removesuffix('_ms')} {ms:.1f}" for name, ms in stages.items() if ms >= 0.05)
            lines.append(f"  {row.name:44s} {shown}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--chunk-tokens", type=int, default=256, choices=(64, 128, 256, 512))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[], help="words of the rows to run")
    parser.add_argument("--quick", action="store_true", help="8 documents, 2 rounds")
    parser.add_argument("--out", type=Path, help="append rows as JSON lines")
    args = parser.parse_args()
    if args.quick:
        args.documents, args.rounds = min(args.documents, 8), min(args.rounds, 2)
    machine = this_machine()
    print(f"{args.model} {args.dtype}; {machine.line()}")
    series = run(args)
    if args.out:
        head = {"machine": machine.as_dict(), "model": args.model, "dtype": args.dtype, "documents": args.documents}
        with args.out.open("a") as file:
            for row in series.values():
                print(json.dumps(head | row.as_dict()), file=file)


if __name__ == "__main__":
    main()
