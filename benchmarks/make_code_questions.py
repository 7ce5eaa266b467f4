"""Draw the questions of `benchmarks/data/code_40.json` from the standard library of the interpreter that runs.

usage: python benchmarks/make_code_questions.py [--count 40] [--seed 0] [--out benchmarks/data/code_40.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvbench.code import FILE, make_records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    records = make_records(lambda text: len(text) // 4, args.count, args.seed)
    args.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
