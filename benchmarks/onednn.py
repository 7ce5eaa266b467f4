"""What oneDNN gives partial forwards on a processor where torch multiplies float32 by MKL, and whether it pays.

usage: python benchmarks/onednn.py [--documents 16] [--rounds 5] [--model bundled:smollm2]

Alone, with the products of SmolLM2-135M's 30 layers, and its attention of a question's rows and of chosen rows: MKL,
oneDNN, and oneDNN with weights packed beforehand (which would keep them twice). Then whole requests of one token in one
process, the arms in turn so that a busy minute hits all alike: transformers' full prefill and the oracle (transformers
with everything in front of the question cached), neither of which is changed by anything here; `none` and `query` 5 %
by torch alone, with oneDNN for attention only (nothing is intercepted), and for all products. Times are medians of wall
time from the call to the token, and of the process's CPU time, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from kvbench.machine import this_machine
from kvbench.tables import plain_table
from kvbench.texts import pydoc_documents
from kvbench.workloads import reordered
from torch.nn.functional import linear
from transformers import DynamicCache

from kvboost_rag import GenerationParams, KVBoost, ReuseConfig
from kvboost_rag.forward import onednn
from kvboost_rag.forward.attention_blocks import attend_blocks
from kvboost_rag.forward.attention_call import AttentionCall
from kvboost_rag.forward.attention_plan import FLASH, TWO_PRODUCTS, plan_blocks
from kvboost_rag.models.load import load_model
from kvboost_rag.stores import MemoryStore

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
WEIGHTS = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
QUESTION, TOKENS = 54, 4139
FIRST_TOKEN = GenerationParams(max_new_tokens=1)
Runs = dict[str, Callable[[], object]]


def medians(runs: Runs, rounds: int) -> dict[str, tuple[float, float]]:
    """Wall and CPU milliseconds of each, after an uncounted round."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if round_:
                times[name].append((1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)))
    return {
        name: (statistics.median(w for w, _ in taken), statistics.median(c for _, c in taken))
        for name, taken in times.items()
    }


@contextmanager
def by(way: str) -> Iterator[None]:
    """`torch` alone, oneDNN for `attention` only, or for `all` products of a partial forward."""
    with (
        mock.patch.object(onednn, "is_faster", return_value=way != "torch"),
        mock.patch.object(onednn, "Products", onednn.Products if way == "all" else nullcontext),
    ):
        yield


def products(rows: int, rounds: int) -> dict[str, tuple[float, float]]:
    """The products of all layers, each layer with weights of its own."""
    weights = [torch.randn(*shape) for _ in range(LAYERS) for shape in WEIGHTS]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
    inputs = {width: torch.randn(1, rows, width) for width in (576, 1536)}
    wide = [inputs[weight.shape[1]] for weight in weights]
    return medians(
        {
            "MKL": lambda: [linear(x, w) for x, w in zip(wide, weights, strict=True)],
            "oneDNN": lambda: [onednn.product(x, w) for x, w in zip(wide, weights, strict=True)],
            "packed": lambda: [onednn.product(x, w) for x, w in zip(wide, packed, strict=True)],
        },
        rounds,
    )


def attention(rows: torch.Tensor, rounds: int) -> dict[str, tuple[float, float]]:
    """Attention of all layers, each with keys and values of its own."""
    buffers = [torch.randn(2, 1, KV_HEADS, TOKENS, HEAD_DIM) for _ in range(LAYERS)]
    query, mask = torch.randn(1, HEADS, len(rows), HEAD_DIM), torch.arange(TOKENS) <= rows[:, None]
    calls = [AttentionCall(query, key, value, mask[None, None], HEAD_DIM**-0.5) for key, value in buffers]
    plans = {
        way: plan_blocks(mask, HEADS // KV_HEADS, costs) for way, costs in (("torch", FLASH), ("all", TWO_PRODUCTS))
    }

    def attend(way: str) -> None:
        with by(way):
            for call in calls:
                attend_blocks(call, plans[way])

    return medians({"MKL": lambda: attend("torch"), "oneDNN": lambda: attend("all")}, rounds)


def requests(args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Whole requests, over the same documents in another order each round."""
    loaded = load_model(args.model, dtype=torch.float32)
    with KVBoost(loaded, store=MemoryStore(8 << 30), profile=None, config=ReuseConfig(full_below=0)) as engine:
        documents = pydoc_documents(engine.tokens, args.documents)
        engine.warm(documents, neighbours=None)
        prompts = [p.text(engine.tokens) for p in reordered(documents, args.documents, 9)]
        numbers: dict[str, int] = {}

        def ours(way: str, repair: str) -> None:
            number = numbers[way + repair] = numbers.get(way + repair, -1) + 1
            with by(way):
                prompt = prompts[number % len(prompts)]
                engine.generate(prompt, repair=repair, recompute_ratio=0.05, params=FIRST_TOKEN, strict=True)

        ids = loaded.tokenizer(prompts[0], return_tensors="pt").input_ids
        cached: list[DynamicCache] = []

        @torch.no_grad()
        def full() -> None:
            cached[:] = [loaded.model(ids, use_cache=True, logits_to_keep=1).past_key_values]

        @torch.no_grad()
        def oracle() -> None:
            cached[0].crop(-QUESTION)
            loaded.model(ids[:, -QUESTION:], past_key_values=cached[0], logits_to_keep=1)

        runs: Runs = {"full prefill": full, "oracle": oracle}
        for repair in ("none", "query"):
            for way in ("torch", "attention", "all"):
                runs[f"{repair}, {way}"] = lambda way=way, repair=repair: ours(way, repair)
        return medians(runs, args.rounds)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="bundled:smollm2")
    args = parser.parse_args()
    print(f"{args.model} float32; {this_machine().line()}; oneDNN chosen here: {onednn.is_faster()}\n")
    end, table = TOKENS - QUESTION, []
    chosen = torch.randperm(end, generator=torch.Generator().manual_seed(3))[: end // 20].sort().values
    for name, rows in (
        ("question", torch.arange(end, TOKENS)),
        ("5 %", torch.cat([chosen, torch.arange(end, TOKENS)])),
    ):
        for what, times in (
            ("products", products(len(rows), args.rounds)),
            ("attention", attention(rows, args.rounds)),
        ):
            cells = [
                f"{times[way][0]:.0f} / {times[way][1]:.0f}" if way in times else "–"
                for way in ("MKL", "oneDNN", "packed")
            ]
            table.append([f"{what}, {name}", str(len(rows)), *cells])
    print(plain_table(["ms, wall / CPU", "rows", "MKL", "oneDNN", "packed"], table) + "\n")
    times = requests(args)
    (full, full_cpu), (oracle, oracle_cpu) = times["full prefill"], times["oracle"]
    cells = [
        [
            name,
            f"{wall:.0f} / {cpu:.0f}",
            f"{full / wall:.1f} / {full_cpu / cpu:.1f}",
            f"{wall / oracle:.2f} / {cpu / oracle_cpu:.2f}",
        ]
        for name, (wall, cpu) in times.items()
    ]
    print(plain_table(["request", "ms", "full ÷", "÷ oracle"], cells))


if __name__ == "__main__":
    main()
