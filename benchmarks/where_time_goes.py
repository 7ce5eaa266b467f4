"""Where the time of `query` goes on this machine, pass by pass, beside what torch's own rates would make of it.

usage: python benchmarks/where_time_goes.py [--documents 16] [--model bundled:smollm2] [--dtype bfloat16]

One prompt of 256-token documents is assembled; full prefill, the suffix pass that measures attention, and the final
pass over the chosen rows are run under torch's profiler, each after a run that is not counted. Shown are milliseconds
of matrix products, of attention, and of everything else, beside the pass's share of full prefill: its rows in full
prefill's time a row (products), its pairs of row and visible position in full prefill's time a pair (attention). Full
prefill is plain transformers on torch, and the share what a pass would take if it ran as torch does with thousands of
rows. The loops that numba compiles for a processor with AMX can fall below it; without them products of the attention
mass count as products. Before that: placing all chunks, beside plain copies of as many bytes: memory bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from kvbench.machine import this_machine
from kvbench.tables import plain_table
from kvbench.texts import pydoc_documents
from kvbench.workloads import reordered
from torch.profiler import ProfilerActivity, profile, record_function

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.forward.amx_attention import can_compile
from kvboost_rag.forward.row_forward import RowPlan, observe_rows, row_forward
from kvboost_rag.kv.assemble import PlacedEntry, assemble
from kvboost_rag.kv.buffer import KVBuffer
from kvboost_rag.kv.numba_rotation import wait_until_compiled
from kvboost_rag.kv.realign import PositionTables
from kvboost_rag.models.hf_cache import BufferCache, cache_argument
from kvboost_rag.models.load import load_model
from kvboost_rag.repair import QueryRepair, RepairContext, RepairPlan, RepairStrategy
from kvboost_rag.repair.query import AttentionMass
from kvboost_rag.stores import MemoryStore

PRODUCTS = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise")
ATTENTION = ("aten::_scaled_dot_product", "aten::bmm", "aten::exp_", "aten::_softmax", "row_attention")


@dataclass
class Pass:
    """One profiled forward: rows, pairs of row and visible position, and self times in ms."""

    name: str
    rows: int
    pairs: int
    products_ms: float = 0.0
    attention_ms: float = 0.0
    other_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        return self.products_ms + self.attention_ms + self.other_ms

    def floor_ms(self, full: Pass) -> tuple[float, float]:
        """Products and attention at full prefill's rates."""
        return full.products_ms / full.rows * self.rows, full.attention_ms / full.pairs * self.pairs


@dataclass(frozen=True)
class Watched(RepairStrategy):
    """`query`, with its passes run once more under the profiler on the assembled prompt."""

    name: ClassVar[str] = "query, profiled"
    passes: list[Pass] = field(default_factory=list)

    def plan(self, context: RepairContext) -> RepairPlan:
        plan, model, ids = QueryRepair().plan(context), context.model, context.token_ids
        layers = context.buffer.layout.num_layers

        def full_prefill() -> None:
            cache = BufferCache(KVBuffer(context.buffer.layout, len(ids)))
            arguments: dict[str, Any] = {cache_argument(model): cache}
            with torch.no_grad():
                model(ids[None], logits_to_keep=1, use_cache=True, **arguments)

        def suffix_pass() -> None:
            mass = AttentionMass(layers // 3, len(context.question_rows), len(ids))
            observe_rows(model, context.buffer, ids, RowPlan(context.fresh_rows, observer=mass))

        everything = torch.arange(len(ids))
        self._profile("full prefill", everything, full_prefill)
        self._profile("suffix pass, with attention mass", context.fresh_rows, suffix_pass)
        final = plan.row_plan
        self._profile("final pass", final.rows, lambda: row_forward(model, context.buffer, ids, final))
        return plan

    def _profile(self, name: str, rows: torch.Tensor, run: Callable[[], Any]) -> None:
        run()
        done = Pass(name, len(rows), int((rows + 1).sum()))
        with named_loops(), profile(activities=[ProfilerActivity.CPU]) as seen:
            run()
        for event in seen.key_averages():
            ms = event.self_cpu_time_total / 1e3
            if event.key in PRODUCTS:
                done.products_ms += ms
            elif event.key.startswith(ATTENTION):
                done.attention_ms += ms
            else:
                done.other_ms += ms
        self.passes.append(done)


@contextmanager
def named_loops() -> Iterator[None]:
    """The loops that numba compiled, which the profiler does not see, under the names of their modules."""
    if not can_compile():
        yield
        return
    from kvboost_kernels import compiled

    plain = compiled.run

    def named(function: Any, work: Sequence[int], parts: int) -> None:
        with record_function(function.__wrapped__.__module__.split(".")[-2]):
            plain(function, work, parts)

    compiled.run = named
    try:
        yield
    finally:
        compiled.run = plain


@contextmanager
def warmed_engine(args: argparse.Namespace) -> Iterator[tuple[KVBoost, str]]:
    """An engine with the documents warm, and a prompt over them."""
    loaded = load_model(args.model, dtype=args.dtype)
    with KVBoost(loaded, store=MemoryStore(8 << 30), profile=None) as engine:
        documents = pydoc_documents(engine.tokens, args.documents)
        engine.warm(documents, neighbours=None)
        yield engine, reordered(documents, args.documents, 1)[0].text(engine.tokens)


def placement(engine: KVBoost, repeats: int = 9) -> str:
    """Median times of placing every stored chunk, and its two halves' plain copies."""
    records = engine.store.catalog.get_many(list(engine.store.keys())).values()
    entries = [chunk.payload for record in records if (chunk := engine.fetcher.load(record)) is not None]
    layout, starts = engine.probe.require_layout, [0]
    for entry in entries:
        starts.append(starts[-1] + len(entry.token_ids))
    buffer, tables = KVBuffer(layout, starts[-1]), PositionTables.of(layout, starts[-1])
    placed = [PlacedEntry(entry, start) for entry, start in zip(entries, starts, strict=False)]

    def copy(kind: str, buffers: Sequence[torch.Tensor]) -> None:
        for entry, start, end in zip(entries, starts, starts[1:], strict=False):
            for index, target in enumerate(buffers):
                target[:, :, start:end].copy_(entry.tensors[f"{kind}.{index}"])

    def median_ms(run: Callable[[], None]) -> float:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)

    assemble(buffer, placed, tables)
    wait_until_compiled()
    whole = median_ms(lambda: assemble(buffer, placed, tables))
    keys, values = (median_ms(partial(copy, *of)) for of in (("keys", buffer.keys), ("values", buffer.values)))
    return (
        f"placing {len(entries)} chunks ({sum(entry.num_bytes for entry in entries) / 1e6:.0f} MB): {whole:.1f} ms; "
        f"copied without rotation: keys {keys:.1f} ms, values {values:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    print(f"{args.model} {args.dtype}; {this_machine().line()}\n")
    watched = Watched()
    with warmed_engine(args) as (engine, prompt):
        print(placement(engine) + "\n")
        engine.generate(prompt, repair=watched, recompute_ratio=0.05, params=GenerationParams(max_new_tokens=1))
    full = watched.passes[0]
    table = []
    for done in watched.passes:
        products, attention = done.floor_ms(full)
        table.append(
            [
                done.name,
                str(done.rows),
                f"{done.pairs / 1e6:.2f} M",
                f"{done.products_ms:.0f} ({products:.0f})",
                f"{done.attention_ms:.0f} ({attention:.0f})",
                f"{done.other_ms:.0f}",
                f"{done.total_ms:.0f}",
            ]
        )
    head = ["ms (in brackets: its share of full prefill)", "rows", "pairs", "products", "attention", "other", "total"]
    print(plain_table(head, table))


if __name__ == "__main__":
    main()
