"""Whether `reuse="off"`, `repair="full"` and `reuse="exact"` are stock transformers, on prompts of real text.

usage: python benchmarks/stock.py FILE.json [--model bundled:smollm2] [--cases 20] [--documents 4] [--answer-tokens 16]

FILE is a question file as for `benchmarks/quality.py`. Every other prompt goes through the chat template (of models
that have one), the others are plain text. Compared in float32: ids with `tokenizer(text)`, every logit along the stock
answer with `model.forward`, the greedy answer with `model.generate`. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from kvbench.stock import compare

from kvboost_rag import KVBoost
from kvboost_rag.measure.calibrate import read_questions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--documents", type=int, default=4, help="of each question's, in a prompt")
    parser.add_argument("--answer-tokens", type=int, default=16)
    args = parser.parse_args()
    failures, worst, num_tokens, num_compared = 0, 0.0, 0, 0
    with KVBoost.from_pretrained(args.model, dtype=torch.float32, profile=None) as engine:
        for number, question in enumerate(read_questions(args.file)[: args.cases]):
            asked = replace(question, documents=question.documents[: args.documents], support=())
            messages = asked.messages()
            text = "\n\n".join(message["content"] for message in messages)
            prompt = messages if number % 2 == 0 and engine.tokenizer.chat_template else text
            for found in compare(engine, prompt, list(asked.documents), args.answer_tokens):
                failures += not found.holds
                num_compared += 1
                num_tokens += found.num_tokens
                worst = max(worst, found.max_difference)
                print(f"{number} {'as it should' if found.holds else 'DIFFERS'} {found}", flush=True)
    print(f"{args.model}: {failures} of {num_compared} differ; {num_tokens} prompt tokens; worst logit {worst:.2g}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
