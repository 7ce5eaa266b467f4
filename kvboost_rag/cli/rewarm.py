"""`kvboost-rag rewarm`: choose encoding contexts anew when the corpus has changed much."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvboost_rag.cli import options
from kvboost_rag.cli.console import console, progress_bar, seconds_text
from kvboost_rag.indexing.neighbours import RewarmPlan

if TYPE_CHECKING:
    from kvboost_rag.engine import KVBoost


def rewarm(
    model: options.Model = options.DEFAULT_MODEL,
    store: options.Store = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    namespace: options.Namespace = "",
    neighbours: options.Neighbours = None,
    need: Annotated[
        int, typer.Option(min=0, max=100, help="Percent of the chunks that must be worth it, else nothing is done.")
    ] = 10,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many chunks would change.")] = False,
    memory_budget: options.MemoryBudget = None,
    disk_budget: options.DiskBudget = None,
) -> None:
    """Give chunks other encoding contexts where the corpus has better ones now, and encode those chunks again.

    A chunk is worth it if a chunk that it was encoded after is gone, if another one stands before it in its document,
    if it would get more contexts, or if the mean cosine to the chunks in them rises by 0.05. Can be stopped and run
    again.

    Example: kvboost-rag rewarm --dry-run
    """
    from kvboost_rag.cli.model_choice import ModelChoice
    from kvboost_rag.cli.session import open_engine
    from kvboost_rag.config import EncodingConfig
    from kvboost_rag.indexing.corpus import CorpusError
    from kvboost_rag.indexing.neighbours import NeighbourRules

    chosen = options.StoreChoice.of(store, memory_budget, disk_budget)
    encoding = EncodingConfig(neighbours=neighbours)
    with open_engine(ModelChoice(model, dtype, device), chosen, namespace, encoding=encoding) as engine:
        with console.status("comparing chunks"):
            rules = NeighbourRules(engine.encoding.neighbours or 0, contexts=engine.encoding.contexts or 1)
            plan = engine.similar.replan(namespace, rules)
        if not plan.num_chunks:
            raise CorpusError(f"nothing has been warmed for {engine.name} here: kvboost-rag warm PATH")
        _print(engine, plan)
        if not plan.changes or 100 * plan.changed_ratio < need:
            console.print(f"no need: fewer than {need} % of the chunks are worth it; nothing is changed")
        elif not dry_run:
            _apply(engine, plan, namespace)


def _print(engine: KVBoost, plan: RewarmPlan) -> None:
    known = engine.store.catalog.get_many(plan.changes)
    num_tokens = sum(len(record.token_ids) for record in known.values())
    console.print(
        f"{plan.num_chunks} chunks: {plan.num_different} would get other neighbours, {len(plan.changes)} "
        f"({plan.changed_ratio:.0%}) are worth encoding again, {num_tokens:,} tokens without their contexts",
        highlight=False,
    )


def _apply(engine: KVBoost, plan: RewarmPlan, namespace: str) -> None:
    """Chunk by chunk, so that none waits long without KV, and what was stopped is in order as far as it came."""
    start = time.perf_counter()
    with progress_bar("{task.completed}/{task.total} chunks") as bar:
        for key, neighbours in bar.track(plan.changes.items(), description="encoding"):
            records = engine.similar.apply(RewarmPlan({key: neighbours}, 1, 1), namespace)
            engine.warm([record.text for record in records], neighbours=None, namespace=namespace)
    seconds = seconds_text(time.perf_counter() - start)
    console.print(f"{len(plan.changes)} chunks encoded again in {seconds}", highlight=False)
