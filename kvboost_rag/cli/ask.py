"""`kvboost-rag ask`: answer from what was warmed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvboost_rag.cli import options
from kvboost_rag.cli.console import console

if TYPE_CHECKING:
    from kvboost_rag.config import GenerationParams
    from kvboost_rag.datamodels import GenerationResult
    from kvboost_rag.engine import KVBoost


def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    model: options.Model = options.DEFAULT_MODEL,
    store: options.Store = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    namespace: options.Namespace = "",
    passages: options.Passages = 8,
    reuse: Annotated[str, typer.Option(help="blend, exact or off.")] = "blend",
    repair: Annotated[str | None, typer.Option(help="Repair strategy. Default: query.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer at most.")] = 128,
    memory_budget: options.MemoryBudget = None,
    disk_budget: options.DiskBudget = None,
    metrics_port: options.MetricsPort = None,
) -> None:
    """Answer a question from warmed documents, and show what was reused.

    Example: kvboost-rag ask "How are chunks evicted?" --passages 8
    """
    from kvboost_rag.adapters.reuse_settings import check_reuse
    from kvboost_rag.cli.asking import PassageSearch, messages_for
    from kvboost_rag.cli.model_choice import ModelChoice
    from kvboost_rag.cli.session import open_engine
    from kvboost_rag.cli.tables import reuse_table
    from kvboost_rag.config import GenerationParams
    from kvboost_rag.indexing.corpus import CorpusError

    overrides: dict[str, Any] = {"reuse": reuse, "repair": repair}
    check_reuse(overrides)  # refuses what is not known, before a model is loaded
    if not question.strip():
        raise CorpusError("the question is empty")
    kept = options.StoreChoice.of(store, memory_budget, disk_budget)
    if not kept.folder.is_dir():
        raise CorpusError(f"nothing has been warmed: no store at {kept.folder}; kvboost-rag warm PATH")
    with open_engine(ModelChoice(model, dtype, device), kept, namespace, metrics_port) as engine:
        chosen = PassageSearch(engine).nearest(question, passages)
        params = GenerationParams(max_new_tokens=max_new_tokens)
        console.print()
        result = _stream(engine, messages_for(question, chosen), params, overrides)
        console.print("\n")
        console.print(reuse_table(result, chosen))


def _stream(
    engine: KVBoost, messages: list[dict[str, str]], params: GenerationParams, overrides: dict[str, Any]
) -> GenerationResult:
    """Print the answer as it comes."""
    for event in engine.stream(messages, params=params, **overrides):
        console.print(event.delta, end="", highlight=False, soft_wrap=True)
        if event.result is not None:
            return event.result
    raise RuntimeError("the answer ended without a result")
