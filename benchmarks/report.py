"""Renders results: docs/benchmarks.md, its plots, an HTML page, and the table that README quotes.

usage: python benchmarks/report.py [--results benchmarks/results] [--docs docs] [--html FILE] [--check]

`benchmarks/results` holds `quality*.jsonl` (from quality.py) and `ttft*.jsonl` (from ttft.py --out). The same lines
give the same page. README quotes what stands between `<!-- headline -->` and `<!-- /headline -->`; `--check` fails if
that, or the page itself, is not what the results give.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from kvbench.machine import ROOT
from kvbench.markdown import headline, page
from kvbench.plots import growth, trade_off
from kvbench.summary import Row, read_rows, summarise

HEADLINE = re.compile(r"<!-- headline -->\n.*?<!-- /headline -->", re.DOTALL)


def quoted(text: str) -> str | None:
    """The quoted block of a page, with its markers, or None."""
    found = HEADLINE.search(text)
    return found[0] if found else None


def faults(readme: str, docs: str, expected: str) -> list[str]:
    """What does not agree with the results, in words."""
    found = []
    if docs != expected:
        found.append("docs/benchmarks.md is not what benchmarks/results gives: run python benchmarks/report.py")
    block = quoted(readme)
    if block is not None and block != quoted(expected):
        found.append("README.md quotes another table than docs/benchmarks.md: run python benchmarks/report.py")
    return found


def draw(docs: Path, quality: Sequence[Row], speed: Sequence[Row]) -> None:
    """Plots beside the page; without matplotlib there are none."""
    if find_spec("matplotlib") is None:
        print("no plots: pip install 'kvboost-rag[bench]'")
        return
    summaries = [s for s in summarise(quality) if "ablations" not in s.source]
    main = [s for s in summaries if s.dataset == "hotpotqa"] or summaries
    if main:
        groups = Counter((s.source, s.model) for s in main)  # the run that compares most
        chosen = max(groups, key=lambda group: groups[group])
        trade_off([s for s in main if (s.source, s.model) == chosen], docs / "figures" / "trade_off.svg")
    if lengths := [row for row in speed if row["suite"] == "lengths"]:
        growth(lengths, docs / "figures" / "ttft_by_length.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="whose quoted table is kept up to date")
    parser.add_argument("--html", type=Path, help="write the page as HTML too, plots inside")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    args = parser.parse_args()
    quality = read_rows(sorted(args.results.glob("quality*.jsonl")))
    speed = read_rows(sorted(args.results.glob("ttft*.jsonl")))
    text = page(quality, speed)
    target, readme = args.docs / "benchmarks.md", args.readme.read_text("utf-8") if args.readme.exists() else ""
    if args.check:
        found = faults(readme, target.read_text("utf-8") if target.exists() else "", text)
        print("\n".join(found) or "README.md and docs/benchmarks.md agree with the results")
        sys.exit(bool(found))
    args.docs.mkdir(parents=True, exist_ok=True)
    target.write_text(text, "utf-8")
    draw(args.docs, quality, speed)
    block = headline(quality, speed)
    if quoted(readme) is not None:
        args.readme.write_text(HEADLINE.sub(lambda _: block, readme), "utf-8")
    if args.html is not None:
        from kvbench.html import to_html

        args.html.write_text(to_html(text, args.docs), "utf-8")


if __name__ == "__main__":
    main()
