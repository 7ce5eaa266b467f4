"""How far rounding alone takes a model from itself: full prefill in bfloat16 against float32, nothing reused.

usage: python benchmarks/rounding.py FILE.json … --out FILE.jsonl [--cases 60] [--model bundled:smollm2] [--minutes 30]

The scale for what the quality suite says of reuse: who runs a model in bfloat16 has accepted these differences. Lines
are those of `benchmarks/quality.py` (same prompts, same greedy answers, same figures), of an arm called `full prefill
in bfloat16`: from a file of its own in `benchmarks/results` the report shows them beside the others. Lines that are
there already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvbench.cases import from_file
from kvbench.machine import this_machine
from kvbench.rounded import ROUNDED, rounded_row
from kvbench.summary import UNREUSED, read_rows

from kvboost_rag import KVBoost
from kvboost_rag.measure.calibrate import reference_answer
from kvboost_rag.models.load import load_model
from kvboost_rag.stores import MemoryStore

DTYPE = "float32"


def lines(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of all prompts that have none yet."""
    known = read_rows([args.out]) if args.out.exists() else []
    done = {row["case"] for row in known if row["arm"] == UNREUSED and row["model"] == args.model}
    cases = [case for path in args.files for case in from_file(path, args.cases) if case.name not in done]
    head = {"model": args.model, "dtype": DTYPE, "machine": this_machine().as_dict()}
    deadline = time.monotonic() + 60 * args.minutes
    engines = [
        KVBoost(load_model(args.model, dtype=dtype), store=MemoryStore(1 << 20), profile=None)
        for dtype in (DTYPE, ROUNDED)
    ]
    with engines[0] as exact, engines[1] as rounded:
        for number, case in enumerate(cases):
            if time.monotonic() > deadline:
                print(f"\n{args.minutes:g} minutes are over after {number} of {len(cases)} prompts; run again to go on")
                return
            reference = reference_answer(exact, case, args.answer_tokens)
            yield {**head, **rounded_row(rounded, case, reference, args.answer_tokens)}
            print(f"\r{number + 1}/{len(cases)} prompts", end="", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--minutes", type=float, default=30)
    args = parser.parse_args()
    with args.out.open("a") as out:
        for line in lines(args):
            print(json.dumps(line), file=out, flush=True)


if __name__ == "__main__":
    main()
