"""Attention of few rows on a CPU: by torch, and by the loops that numba compiles for matrix tiles.

usage: python benchmarks/row_attention.py [--tokens 4139] [--rounds 9]

Shapes of SmolLM2-135M in bfloat16, as in a partial forward over a prompt of 16 documents: the 54 rows of a question,
and with 204 document rows that repair chose. Every layer has keys and values of its own, so that nothing is in core's
cache because the layer before had it. Times are medians over all 30 layers in ms: SDPA with one mask, torch's attention
in blocks (`forward/attention_blocks.py`), attention mass by torch, and where the processor has matrix tiles both by
them. Outputs are compared first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from kvbench.machine import this_machine
from kvbench.tables import plain_table

from kvboost_rag.forward import amx_attention
from kvboost_rag.forward.attention_blocks import attend_blocks, attend_masked
from kvboost_rag.forward.attention_call import AttentionCall
from kvboost_rag.forward.attention_mass import attention_mass
from kvboost_rag.forward.attention_plan import plan_blocks
from kvboost_rag.forward.causal_rows import CausalRows

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
QUESTION = 54


@dataclass
class Clock:
    """Runs everything once uncounted, then `rounds` times in turn, so that a busy minute hits all alike."""

    rounds: int

    def medians(self, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in runs}
        for round_ in range(self.rounds + 1):
            for name, run in runs.items():
                begin = time.perf_counter()
                run()
                if round_:
                    times[name].append(1e3 * (time.perf_counter() - begin))
        return {name: statistics.median(taken) for name, taken in times.items()}


def attention(rows: torch.Tensor, tokens: int, clock: Clock) -> dict[str, float]:
    """Attention of all layers, and its mass."""
    draw = torch.Generator().manual_seed(1)
    buffers = [torch.randn(2, 1, KV_HEADS, tokens, HEAD_DIM, generator=draw).bfloat16() for _ in range(LAYERS)]
    query = torch.randn(1, HEADS, len(rows), HEAD_DIM, generator=draw).bfloat16()
    mask = (torch.arange(tokens) <= rows[:, None])[None, None]
    blocks, causal = plan_blocks(mask[0, 0], HEADS // KV_HEADS), CausalRows(rows, None)
    calls = [AttentionCall(query, key, value, mask, HEAD_DIM**-0.5) for key, value in buffers]
    whole = plan_blocks(torch.ones(len(rows), tokens, dtype=torch.bool), 1)[0]
    by_torch = [attend_blocks(call, blocks) for call in calls]
    runs: dict[str, Callable[[], object]] = {
        "one mask": lambda: [attend_masked(call, whole) for call in calls],
        "blocks": lambda: [attend_blocks(call, blocks) for call in calls],
        "mass": lambda: [attention_mass(call, lse, 0) for call, (_, lse) in zip(calls, by_torch, strict=True)],
    }
    by_tiles = [amx_attention.attend(call, causal) for call in calls if amx_attention.takes(call)]
    if by_tiles:
        for (output, _), done in zip(by_torch, by_tiles, strict=True):
            torch.testing.assert_close(done.output, output, atol=2e-2, rtol=2e-2)
        runs["tiles"] = lambda: [amx_attention.attend(call, causal) for call in calls]
        runs["mass, tiles"] = lambda: [done.mass(0) for done in by_tiles]
    return clock.medians(runs)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4139)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print(f"{this_machine().line()}\n")
    clock, end = Clock(args.rounds), args.tokens - QUESTION
    chosen = torch.randperm(end, generator=torch.Generator().manual_seed(3))[: end // 20].sort().values
    question = torch.arange(end, args.tokens)
    table, head = [], ["rows"]
    for rows in (question, torch.cat([chosen, question])):
        times = attention(rows, args.tokens, clock)
        head = ["rows", *times]
        table.append([str(len(rows)), *(f"{ms:.1f}" for ms in times.values())])
    print(plain_table(head, table))


if __name__ == "__main__":
    main()
