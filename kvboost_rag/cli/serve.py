"""`kvboost-rag serve`: an OpenAI-compatible server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvboost_rag.cli import options
from kvboost_rag.cli.console import console
from kvboost_rag.cli.model_choice import ModelChoice


def serve(
    model: options.Model = options.DEFAULT_MODEL,
    store: options.Store = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    model_name: Annotated[str | None, typer.Option(help="Model id for clients. Default: the model's name.")] = None,
    keys_file: Annotated[Path | None, typer.Option(help="API keys (JSON); KVBOOST_API_KEY adds one.")] = None,
    allow_no_key: Annotated[bool, typer.Option(help="Serve anybody, on any address.")] = False,
    enabled: Annotated[bool, typer.Option(help="Reuse where a request does not say (x-kvboost-enabled).")] = True,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests at once, waiting ones included.")] = 64,
    deadline: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 600.0,
    drain: Annotated[float, typer.Option(help="Seconds for running answers after SIGTERM.")] = 60.0,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer whose request does not say.")] = 1024,
    max_body: Annotated[str, typer.Option(help="Longest request body, such as 8MiB.")] = "8MiB",
    chunk_tokens: options.ChunkTokens = 256,
    open_metrics: Annotated[bool, typer.Option(help="/metrics without a key.")] = False,
    switch_file: Annotated[Path | None, typer.Option(help="While it says `off`, nothing is reused.")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of a LoRA adapter, served as the model NAME; repeatable.")
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    memory_budget: options.MemoryBudget = None,
    disk_budget: options.DiskBudget = None,
) -> None:
    """Serve a model to OpenAI clients: chat, completions, embeddings, documents, metrics.

    Example: kvboost-rag serve --model bundled:smollm2 --port 8000
    """
    from kvboost_rag.server.keys import Keys
    from kvboost_rag.server.settings import ServerSettings

    settings = ServerSettings(
        host=host,
        port=port,
        model_name=model_name or model,
        keys=Keys.read(keys_file, os.environ),
        allow_no_key=allow_no_key,
        max_requests=max_requests,
        deadline_s=options.finite(deadline) or 0.0,
        drain_s=options.finite(drain) or 0.0,
        max_body_bytes=options.parse_bytes("--max-body", max_body) or 0,
        answer_tokens=answer_tokens,
        enabled=enabled,
        chunk_tokens=chunk_tokens,
        open_metrics=open_metrics,
        switch_file=switch_file,
    )
    choice = ModelChoice(model, dtype, device, parse_adapters(adapter or []))
    _run(settings, choice, options.StoreChoice.of(store, memory_budget, disk_budget))


def parse_adapters(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Name and folder of each `NAME=FOLDER`.

    Raises:
        typer.BadParameter: another form, or a name twice.
    """
    parsed: dict[str, str] = {}
    for text in given:
        name, _, folder = text.partition("=")
        if not name or not folder or name in parsed:
            raise typer.BadParameter(f"--adapter {text!r}: expected NAME=FOLDER, each name once")
        parsed[name] = folder
    return tuple(parsed.items())


def _run(settings: object, model: ModelChoice, kept: options.StoreChoice) -> None:
    from prometheus_client import CollectorRegistry

    from kvboost_rag.cli.session import open_engine
    from kvboost_rag.observe.metrics import Metrics
    from kvboost_rag.server.app import create_app
    from kvboost_rag.server.run import serve as run_server
    from kvboost_rag.server.settings import ServerSettings

    assert isinstance(settings, ServerSettings)
    registry = CollectorRegistry()
    metrics = Metrics(model.name, registry)
    with open_engine(model, kept, metrics=metrics) as engine:
        app = create_app(engine, settings, registry)
        console.print(
            f"serving    http://{settings.host}:{settings.port}/v1, model {settings.model_name}", highlight=False
        )
        run_server(app, settings)
