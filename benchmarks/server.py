"""The server under many clients: beside `transformers serve`, and for minutes with clients of every kind.

    python benchmarks/server.py compare [--model bundled:smollm2] [--clients 1 4 16] [--out FILE.jsonl]
    python benchmarks/server.py load [--streams 64] [--minutes 3] [--model tiny]

`compare` starts three servers one after the other, each in a process of its own, and sends each the same streamed,
greedy chats about overlapping documents: `transformers serve` with continuous batching, `kvboost-rag serve` without
reuse, and with it, the documents having been sent to `/v1/documents` before. Time to first token is a client's: from
sending the request to the first text in its hands, HTTP, tokenising, waiting for others and prefill included. Tokens/s
are those of all answers over the time from the first request to the end of the last answer, prefill included.

`load` keeps some streams open at once against one server process, mixed with clients that leave, send nonsense, send
far too much, or read slowly. Every answer must be the one that its prompt has alone, nothing may fail that is not the
client's fault, and the process's memory must not grow (`kvbench/server_load.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from kvbench.machine import this_machine
from kvbench.server_load import Load, LoadError
from kvbench.server_process import KVBOOST, TRANSFORMERS, running
from kvbench.server_rounds import HEADER, Round, Rounds, table_rows
from kvbench.tables import plain_table
from kvbench.texts import pydoc_documents
from kvbench.tiny import tiny_model
from kvbench.workloads import popular

from kvboost_rag.models.bundled import bundled_folder
from kvboost_rag.prompt.tokens import PromptTokens

CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}\n{% endfor %}<s>assistant\n"
THEIRS, PLAIN, REUSE = "transformers serve, continuous batching", "kvboost-rag serve, reuse off", "kvboost-rag serve"
SETTINGS_OF_THEIRS = ("--continuous-batching", "--cb-num-blocks", "256", "--cb-max-batch-tokens", "2048")


def model_folder(name: str) -> str:
    """A folder that both servers load."""
    if not name.startswith("bundled:"):
        return name
    return str(bundled_folder(name.removeprefix("bundled:"), lambda step: None))


def prompts_of(args: argparse.Namespace, documents: list[str]) -> list[list[dict[str, str]]]:
    """As many different prompts as all rounds need, and one to warm up with."""
    count = 1 + sum(clients * rounds for clients, rounds in zip(args.clients, args.rounds, strict=True))
    return [prompt.messages() for prompt in popular(documents, args.per_prompt, count, seed=args.seed)]


def compare(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    folder = model_folder(args.model)
    documents = pydoc_documents(PromptTokens(AutoTokenizer.from_pretrained(folder)), args.documents, args.chunk_tokens)
    warm_up, *rest = prompts_of(args, documents)
    prompts = {}
    for clients, rounds in zip(args.clients, args.rounds, strict=True):
        prompts[clients], rest = rest[: clients * rounds], rest[clients * rounds :]
    asked = Rounds(prompts, {"max_tokens": args.answer_tokens, "temperature": 0.0})
    seen: dict[str, list[Round]] = {}
    precision = ("--dtype", args.dtype, "--device", "cpu")
    with running([*TRANSFORMERS, folder, *SETTINGS_OF_THEIRS, *precision]) as server:
        seen[THEIRS] = asked.run(server.url, folder, warm_up)
    with tempfile.TemporaryDirectory() as store:
        command = [*KVBOOST, "--model", folder, "--model-name", "m", "--store", store, *precision]
        for name, flag in ((PLAIN, "--no-enabled"), (REUSE, "--enabled")):
            with running([*command, flag]) as server:
                if name == REUSE:
                    body = {"documents": [{"id": "all", "chunks": documents}], "wait": True}
                    httpx.post(f"{server.url}/v1/documents", json=body, timeout=900).raise_for_status()
                # Usage in a stream has to be asked for here.
                named = Rounds(prompts, asked.options | {"stream_options": {"include_usage": True}})
                seen[name] = named.run(server.url, "m", warm_up)
    report(args, seen)


def report(args: argparse.Namespace, seen: dict[str, list[Round]]) -> None:
    """Print the table; append a line of JSON where asked to."""
    rows = [row for name, rounds in seen.items() for row in table_rows(name, rounds, seen[PLAIN])]
    print(this_machine().line())
    print(
        f"{args.model}, {args.dtype}; {args.per_prompt} of {args.documents} documents of {args.chunk_tokens} tokens "
        f"in a prompt, answers of up to {args.answer_tokens} tokens"
    )
    print(plain_table(HEADER, rows))
    if args.out is not None:
        line = {"machine": this_machine().as_dict(), "options": {k: str(v) for k, v in vars(args).items()}}
        with args.out.open("a") as out:
            out.write(json.dumps(line | {"header": HEADER, "rows": rows}) + "\n")


def load(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(args.model) if args.model != "tiny" else save_tiny(Path(folder) / "model")
        store = ("--store", f"{folder}/store", "--memory-budget", "256MiB", "--disk-budget", "1GiB")
        with running([*KVBOOST, "--model", model, "--model-name", "m", "--max-requests", "512", *store]) as server:
            one = Load(server.url, "m", args.streams, args.seed)
            try:
                print(asyncio.run(one.run(60 * args.minutes, lambda: server.rss_bytes)))
            except LoadError as error:
                print(error)
                return 1
    return 0


def save_tiny(folder: Path) -> str:
    """The tiny model as a folder."""
    loaded: Any = tiny_model()
    loaded.tokenizer.chat_template = CHAT_TEMPLATE
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("compare")
    first.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    first.add_argument("--rounds", type=int, nargs="+", default=[4, 2, 1], help="requests of each client")
    first.add_argument("--documents", type=int, default=16)
    first.add_argument("--per-prompt", type=int, default=8)
    first.add_argument("--chunk-tokens", type=int, default=256)
    first.add_argument("--answer-tokens", type=int, default=32)
    first.add_argument("--dtype", default="float32")
    first.add_argument("--out", type=Path)
    second = commands.add_parser("load")
    second.add_argument("--streams", type=int, default=64)
    second.add_argument("--minutes", type=float, default=3.0)
    for command, model in ((first, "bundled:smollm2"), (second, "tiny")):
        command.add_argument("--model", default=model)
        command.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.command == "load":
        return load(args)
    compare(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
