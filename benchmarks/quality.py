"""Is it still the same model? Strategies of reuse against full prefill on the same token ids.

usage: python benchmarks/quality.py --out FILE.jsonl [--files hotpotqa_60.json musique_60.json]
           [--datasets hotpotqa musique needle bugs code reference short turns]
           [--arms main|quick|half|fidelity|anchor|rows|ratio|…] [--orders rank reversed shuffled-1]
           [--cases 60] [--model bundled:smollm2] [--dtype float32] [--minutes 8] [--quick]

Each line of the output is one prompt answered by one arm: KL(full ‖ ours) in nats at the first token and over full
prefill's greedy answer, agreement, whether the greedy answers are identical, F1 and correctness of both answers, TTFT
of both, tokens reused and recomputed, and tokens forwarded per document token when it was indexed. Lines that are there
already are not measured again, so that a run can be stopped (or stops by itself after `--minutes`) and continued. A
table is printed at the end, and by `--show FILE.jsonl`; `python benchmarks/report.py` renders them.
Question files are those of HotpotQA or MuSiQue reshaped: records with `question`, `docs`, `answers`, `support`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvbench.arms import ABLATIONS, FIDELITY, HALF, MAIN, QUICK, Arm
from kvbench.cases import Case, bugs, conversations, from_file, needles, reordered
from kvbench.code import code
from kvbench.machine import this_machine
from kvbench.own_cases import reference, reference_documents, short
from kvbench.runner import Runner
from kvbench.summary import read_rows, summarise
from kvbench.tables import plain_table

from kvboost_rag.indexing.embeddings import Embed, load_embedder

OWN = ("needle", "bugs", "code", "reference", "short")
"""Data sets that need no file."""
WHOLE = 60
"""Cases that a data set consists of, however few of them are asked."""
DATASETS = ("hotpotqa", "musique", "turns", *OWN)


def make_cases(args: argparse.Namespace, runner: Runner, embed: Embed) -> list[list[Case]]:
    """The chosen data sets, whole: documents of cases that are not asked may stand in encoding contexts."""
    count = max(args.cases, WHOLE)
    files = {path.stem.partition("_")[0]: path for path in args.files}
    groups: list[list[Case]] = []
    for name in args.datasets:
        if name == "needle":
            groups.append(needles(runner.count_tokens, count))
        elif name == "bugs":
            groups.append(bugs(runner.count_tokens, count))
        elif name == "reference":
            groups.append(reference(runner.count_tokens, embed, count))
        elif name == "code":
            groups.append(code(count))
        elif name == "short":
            groups.append(short(count))
        elif name == "turns":
            groups.append(conversations(args.files[0], count))
        else:
            groups.append(from_file(files[name], count))
    return groups


def interleaved(groups: Sequence[Sequence[Case]], count: int) -> list[Case]:
    """The first `count` of each, so that a short run sees all data sets."""
    return [group[i] for i in range(count) for group in groups if i < len(group)]


def ordered(cases: Sequence[Case], orders: Sequence[str]) -> list[Case]:
    """Every case with its documents in every order."""
    return [case if order == "rank" else reordered(case, order) for case in cases for order in orders]


def check_files(args: argparse.Namespace) -> None:
    """Data sets that come from files need them; said before a model is loaded."""
    stems = {path.stem.partition("_")[0] for path in args.files}
    args.datasets = args.datasets or [d for d in DATASETS if d in stems or d in OWN]
    for name in args.datasets:
        if name not in (*OWN, "turns") and name not in stems:
            raise SystemExit(f"--datasets {name} needs its file: --files PATH/{name}_60.json")
        if name == "turns" and not args.files:
            raise SystemExit("--datasets turns needs a file of questions: --files PATH/hotpotqa_60.json")


def check_orders(orders: Sequence[str]) -> None:
    for order in orders:
        if order not in ("rank", "reversed") and not order.startswith("shuffled-"):
            raise SystemExit(f"--orders {order}: expected rank, reversed or shuffled-SEED")


def arms_of(names: Sequence[str]) -> tuple[Arm, ...]:
    known = {"main": MAIN, "quick": QUICK, "half": HALF, "fidelity": FIDELITY, **ABLATIONS}
    if unknown := [n for n in names if n not in known]:
        raise SystemExit(f"unknown arms {', '.join(unknown)}; known: {', '.join(known)}")
    return tuple(dict.fromkeys(arm for name in names for arm in known[name]))


def done_already(out: Path) -> set[tuple[str, str, str, str]]:
    if not out.exists():
        return set()
    rows = (json.loads(line) for line in out.read_text().splitlines())
    return {(r["model"], r["dtype"], r["case"], r["arm"]) for r in rows}


def measure(args: argparse.Namespace, runner: Runner, cases: Sequence[Case], arms: Sequence[Arm]) -> Iterator[dict]:
    """Prompts outside, arms inside: wherever a run stops, every arm has (nearly) the same prompts."""
    done, deadline = done_already(args.out), time.monotonic() + 60 * args.minutes
    head = {"model": args.model, "dtype": args.dtype, "machine": this_machine().as_dict()}
    for number, case in enumerate(cases):
        todo = [arm for arm in arms if (args.model, args.dtype, case.name, arm.name) not in done]
        if time.monotonic() > deadline:
            print(f"\n{args.minutes:g} minutes are over after {number} of {len(cases)} prompts; run again to go on")
            return
        for row in runner.rows(case, todo):
            yield {**head, **row}
        print(f"\r{number + 1}/{len(cases)} prompts", end="", flush=True)
    print()


def shown(path: Path) -> str:
    """The file's lines as a table: figures with 95 % intervals, on the prompts that every arm has."""
    rows = []
    for s in summarise(read_rows([path])):
        shift = "" if s.shift is None else s.shift.text(percent=True)
        kl = [s.kl_first.text(), s.kl_mean.text()]
        shares = [f"{s.agreement.mean:.1%}", s.identical.text(percent=True), shift]
        cost = "" if s.index_tokens is None else f"{s.index_tokens:.1f}"
        rows.append([s.arm, s.dataset, str(s.num_prompts), *kl, *shares, f"{s.ttft_ratio:.1f} x", cost])
    figures = ["KL first", "KL mean", "agree", "identical", "correct − full's", "TTFT full ÷", "index ÷"]
    header = ["arm", "data", "prompts", *figures]
    return plain_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("quality.jsonl"))
    parser.add_argument("--show", type=Path, help="only print what a file holds")
    parser.add_argument("--files", type=Path, nargs="+", default=[])
    parser.add_argument("--datasets", nargs="+", choices=DATASETS)
    parser.add_argument("--orders", nargs="+", default=["rank"], help="of documents: rank, reversed, shuffled-SEED")
    parser.add_argument("--arms", nargs="+", default=["main"])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--quick", action="store_true", help="four cases a data set, six arms")
    args = parser.parse_args()
    if args.quick:
        args.cases, args.arms = min(args.cases, 4), ["quick"]
    if args.show:
        print(shown(args.show))
        return
    check_files(args)
    check_orders(args.orders)
    arms = arms_of(args.arms)
    print(this_machine().line())
    with Runner(args.model, args.dtype, args.answer_tokens) as runner:
        embed = load_embedder()
        groups = make_cases(args, runner, embed)
        known = [case for group in groups for case in group]
        runner.read_corpora(known, embed, {"reference": reference_documents(runner.count_tokens)})
        cases = ordered(interleaved(groups, args.cases), args.orders)
        with args.out.open("a") as file:
            for row in measure(args, runner, cases, arms):
                print(json.dumps(row), file=file, flush=True)
    print(shown(args.out))


if __name__ == "__main__":
    main()
