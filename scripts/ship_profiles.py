"""Calibrate a bundled model as `kvboost-rag calibrate` does, and put its profile into the package.

usage: python scripts/ship_profiles.py hotpotqa_60.json musique_60.json [--model bundled:smollm2] [--dtype float32]
           [--questions 2] [--max-kl 0.05] [--budget 9]

Asked are the last questions of each file, in turn. Where `benchmarks/quality.py` is given fewer than all it asks the
first ones, so that what a profile was chosen by is not what is reported of it. A profile in the package is everybody's:
only ways that recompute rows are tried, however near the others come on these few questions.
"""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path

from kvboost_rag.cli.calibrate import calibration_table
from kvboost_rag.cli.console import console
from kvboost_rag.measure.calibrate import CalibrationPlan, EvalQuestion, calibrate, read_questions
from kvboost_rag.models.load import load_model
from kvboost_rag.models.profile import SHIPPED, Setting, save_profile

SETTINGS = tuple(Setting("query", ratio, neighbours=4, contexts=2) for ratio in (0.05, 0.10, 0.20))


def last_questions(files: list[Path], count: int) -> list[EvalQuestion]:
    """`count` of each file, in turn."""
    return list(chain.from_iterable(zip(*(read_questions(file)[-count:] for file in files), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--questions", type=int, default=2, help="of each file")
    parser.add_argument("--max-kl", type=float, default=0.05)
    parser.add_argument("--budget", type=float, default=9, help="minutes, about")
    args = parser.parse_args()
    data = f"the last {args.questions} questions of each of {', '.join(file.name for file in args.files)}"
    questions = last_questions(args.files, args.questions)
    plan = CalibrationPlan(questions, data, SETTINGS, (), args.max_kl, budget_s=60 * args.budget)
    profile = calibrate(load_model(args.model, dtype=args.dtype), plan)
    console.print(calibration_table(profile))
    if not profile.passed:
        raise SystemExit(f"no setting is within {args.max_kl:g} nats: nothing was written")
    for old in SHIPPED.glob(f"{profile.fingerprint[:32]}-*.json"):
        old.unlink()
    print(save_profile(profile, SHIPPED))


if __name__ == "__main__":
    main()
