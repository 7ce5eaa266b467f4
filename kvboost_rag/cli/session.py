"""Loading a model and opening an engine, with progress shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost_rag.cli.console import console, progress_bar, seconds_text

if TYPE_CHECKING:
    from kvboost_rag.engine import KVBoost
    from kvboost_rag.models.load import LoadedModel, LoadProgress


@dataclass(frozen=True)
class ModelChoice:
    """What the options say about the model."""

    name: str
    dtype: str | None = None
    device: str | None = None


def load(choice: ModelChoice) -> LoadedModel:
    """Load the model, showing each step."""
    import transformers

    from kvboost_rag.models.load import load_model

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = choice.device or _device()
    options: dict[str, Any] = {} if device == "cpu" else {"device_map": {"": device}}
    bundled = choice.name.startswith("bundled:")
    dtype = choice.dtype or (fast_dtype(device) if bundled else None)
    with progress_bar() as bar:
        task = bar.add_task(f"loading {choice.name}", total=None)

        def show(step: LoadProgress) -> None:
            bar.update(task, description=step.stage, total=step.num_steps, completed=step.step - 1)

        loaded = load_model(choice.name, dtype=dtype, progress=show, **options)
        seconds = bar.tasks[0].elapsed or 0.0
    where = f"{str(loaded.model.dtype).removeprefix('torch.')} on {loaded.model.device}"
    console.print(f"model      {choice.name}, {where}, ready after {seconds_text(seconds)}", highlight=False)
    return loaded


@contextmanager
def open_engine(choice: ModelChoice, store: Path, namespace: str = "") -> Iterator[KVBoost]:
    """An engine over the store's folder; closed at the end."""
    from kvboost_rag.config import ReuseConfig
    from kvboost_rag.engine import KVBoost

    loaded = load(choice)
    with KVBoost(loaded, store=store, config=ReuseConfig(namespace=namespace)) as engine:
        console.print(f"store      {store}", highlight=False)
        if not engine.probe.reusable:
            console.print(f"[yellow]no reuse[/]   {engine.probe.reason}", highlight=False)
        if notice := engine.profile_notice():
            console.print(f"profile    {notice}", highlight=False)
        yield engine


def fast_dtype(device: str) -> str:
    """Half precision where the hardware computes in it, else float32. The same on each run: stored KV depends on it."""
    import torch

    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "float32"
    return "bfloat16" if "bf16" in flags else "float32"


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
