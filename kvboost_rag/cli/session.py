"""Loading a model and opening an engine, with progress shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvboost_rag.cli.console import bytes_text, console, progress_bar, seconds_text, styled
from kvboost_rag.cli.known_models import remember_fingerprint
from kvboost_rag.cli.model_choice import ModelChoice
from kvboost_rag.cli.options import StoreChoice

if TYPE_CHECKING:
    from kvboost_rag.config import EncodingConfig
    from kvboost_rag.engine import KVBoost
    from kvboost_rag.models.load import LoadedModel, LoadProgress
    from kvboost_rag.observe.metrics import Metrics


def load(choice: ModelChoice) -> LoadedModel:
    """Load the model, showing each step."""
    import transformers

    from kvboost_rag.models.load import load_model, with_digests

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device, dtype = choice.resolved_device(), choice.resolved_dtype()
    options: dict[str, Any] = {} if device == "cpu" else {"device_map": {"": device}}
    options["adapters"] = dict(choice.adapters)
    with progress_bar() as bar:
        task = bar.add_task(f"loading {choice.name}", total=None)

        def show(step: LoadProgress) -> None:
            bar.update(task, description=step.stage, total=step.num_steps, completed=step.step - 1)

        loaded = with_digests(load_model(choice.name, dtype=dtype, progress=show, **options))
        seconds = bar.tasks[0].elapsed or 0.0
    where = f"{str(loaded.model.dtype).removeprefix('torch.')} on {loaded.model.device}"
    console.print(f"model      {choice.name}, {where}, ready after {seconds_text(seconds)}", highlight=False)
    return loaded


@contextmanager
def open_engine(
    choice: ModelChoice,
    store: StoreChoice,
    namespace: str = "",
    metrics_port: int | None = None,
    encoding: EncodingConfig | None = None,
    metrics: Metrics | None = None,
) -> Iterator[KVBoost]:
    """An engine over the store's folder; closed at the end. Metrics are served meanwhile if a port is given.

    Args:
        metrics: what the engine reports to, where somebody else serves it.
    """
    from kvboost_rag.config import ReuseConfig
    from kvboost_rag.engine import KVBoost
    from kvboost_rag.stores import open_store

    config = ReuseConfig(namespace=namespace)
    with _metrics_server(metrics_port):  # before the model: a port that is taken shows at once
        loaded = load(choice)
        opened = open_store(
            store.folder,
            memory_bytes=store.memory_bytes,
            disk_bytes=store.disk_bytes,
            device=str(loaded.model.device),
        )
        recorder = metrics or metrics_port is not None
        with KVBoost(loaded, store=opened, config=config, encoding=encoding, metrics=recorder) as engine:
            remember_fingerprint(store.folder, choice, engine.registry.fingerprint)
            _describe(engine, store)
            yield engine


def _describe(engine: KVBoost, store: StoreChoice) -> None:
    budgets = (("memory", store.memory_bytes), ("disk", store.disk_bytes))
    limits = [f"{bytes_text(limit)} of {tier} at most" for tier, limit in budgets if limit is not None]
    console.print(f"store      {', '.join([str(store.folder), *limits])}", highlight=False)
    if not engine.probe.reusable:
        console.print(styled("no reuse", "yellow", f"   {engine.probe.reason}"))
    if notice := engine.profile_notice():
        console.print(f"profile    {notice}", highlight=False)


@contextmanager
def _metrics_server(port: int | None) -> Iterator[None]:
    """Serve metrics while the block runs, if there is a port."""
    if port is None:
        yield
        return
    from kvboost_rag.observe.metrics import start_metrics_server

    server, thread = start_metrics_server(port)
    console.print(f"metrics    http://127.0.0.1:{port}/metrics", highlight=False)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
