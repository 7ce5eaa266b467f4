"""`kvboost-rag warm`: encode documents before anybody asks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvboost_rag.cli import options
from kvboost_rag.cli.console import bytes_text, console, seconds_text


def warm(
    paths: Annotated[list[Path], typer.Argument(help="Text, Markdown or code files, and folders of them.")],
    model: options.Model = options.DEFAULT_MODEL,
    store: options.Store = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    namespace: options.Namespace = "",
    chunk_tokens: options.ChunkTokens = 256,
    neighbours: options.Neighbours = 4,
    memory_budget: options.MemoryBudget = None,
    disk_budget: options.DiskBudget = None,
    metrics_port: options.MetricsPort = None,
) -> None:
    """Chunk files and store the KV of every chunk.

    Can be stopped and run again: what is stored is left alone, files that changed are done anew, and the chunks of
    files that are gone are dropped.

    Example: kvboost-rag warm docs README.md
    """
    from kvboost_rag.chunking import FixedChunker
    from kvboost_rag.cli.indexing import ChunkPlan, index_sources, open_embedder
    from kvboost_rag.cli.session import ModelChoice, open_engine
    from kvboost_rag.corpus import CorpusError, read_paths

    FixedChunker(len, chunk_tokens)  # refuses a size that does not exist, before a model is loaded
    chosen = options.StoreChoice.of(store, memory_budget, disk_budget)
    corpus = read_paths(paths)
    for path, fault in corpus.skipped:
        console.print(f"skipped    {path} {fault}", highlight=False)
    if not corpus.texts:
        raise CorpusError(f"no text files in {', '.join(str(path) for path in paths)}")
    with open_engine(ModelChoice(model, dtype, device), chosen, namespace, metrics_port) as engine:
        if not engine.probe.reusable:
            raise CorpusError(f"{model} cannot be warmed: {engine.probe.reason}")
        folders = [path for path in paths if path.is_dir()]
        plan = ChunkPlan(chunk_tokens, neighbours)
        report = index_sources(engine, open_embedder(), corpus.texts, plan, folders)
    done = report.warm
    rate = done.encoded_tokens / done.seconds if done.encoded_tokens else 0
    console.print(
        f"{report.num_sources} files, {done.num_chunks} chunks, {done.chunk_tokens:,} tokens: "
        f"{done.num_encoded} encoded, {done.num_already_stored} stored already, {report.num_dropped} dropped; "
        f"{bytes_text(done.num_bytes)} written in {seconds_text(done.seconds)}"
        + (f" ({rate:,.0f} tokens/s, encoding contexts included)" if rate else ""),
        highlight=False,
    )
    if done.num_failed:
        raise CorpusError(f"{done.num_failed} chunks were not kept: the store's budget is used up")
