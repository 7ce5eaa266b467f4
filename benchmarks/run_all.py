"""Everything that docs/benchmarks.md shows, one after the other: speed suites, quality suite, report.

usage: python benchmarks/run_all.py [--quick] [--files hotpotqa_60.json musique_60.json]

The pages of this repository are made anew, README's table included. `--quick` is for a look (under 15 minutes on two
cores): fewer prompts, SmolLM2 only, everything below `.benchmarks/quick`. Without `--files` the quality suite has
needles and bugs only. Quality is measured in float32, so that rounding is no part of it, speed in bfloat16.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from kvbench.machine import ROOT

MODELS = ("bundled:smollm2", "bundled:gemma3")
ABLATION_CASES = 20
QUICK_QUALITY_MINUTES = 4


def commands(args: argparse.Namespace) -> list[list[str]]:
    """The scripts with their arguments, in order."""
    quick = ["--quick"] if args.quick else []
    files = ["--files", *map(str, args.files)] if args.files else []
    speed = [["ttft.py", "all", *quick, "--out", str(args.results / "ttft.jsonl")]]
    quality = []
    for model in MODELS[:1] if args.quick else MODELS:
        out = ["--model", model, "--out", str(args.results / f"quality_{model.partition(':')[2]}.jsonl")]
        limit = ["--minutes", str(QUICK_QUALITY_MINUTES)] if args.quick else []
        quality.append(["quality.py", *files, *out, *quick, *limit])
        if not args.quick and files:
            ablations = ["anchor", "rows", "neighbours", "ratio", "quantisation", "chunks", "edited"]
            out[-1] = out[-1].replace("quality_", "quality_ablations_")
            more = ["--datasets", "hotpotqa", "--cases", str(ABLATION_CASES), "--arms", *ablations]
            quality.append(["quality.py", *files, *out, *more])
    pages = ["report.py", "--results", str(args.results), "--docs", str(args.docs), "--readme", str(args.readme)]
    return [*speed, *quality, pages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, nargs="+", default=[])
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    base = ROOT / ".benchmarks" / "quick" if args.quick else ROOT
    args.results, args.docs, args.readme = base / "benchmarks" / "results", base / "docs", base / "README.md"
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / "ttft.jsonl").unlink(missing_ok=True)  # quality continues where it was, times are taken anew
    for script, *arguments in commands(args):
        print(f"\n$ python benchmarks/{script} {' '.join(arguments)}", flush=True)
        start = time.monotonic()
        subprocess.run([sys.executable, str(ROOT / "benchmarks" / script), *arguments], check=True)
        print(f"({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
