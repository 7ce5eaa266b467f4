"""Adapters from peft's files: beside a base model, at rest, until a call asks for one by its name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from kvboost_rag.kv.keys import hash_fields
from kvboost_rag.models.adapters import adapter_layers, available_adapters
from kvboost_rag.models.digest_file import files_identity
from kvboost_rag.models.errors import ModelLoadError, reason

AdapterPaths = Mapping[str, "str | os.PathLike[str]"]
CONFIG = "adapter_config.json"


def base_of(folder: Path) -> str | None:
    """The model that the adapter in a folder was made for; None where the folder holds a whole model or neither.

    Raises:
        ModelLoadError: an adapter that does not say.
    """
    if not (folder / CONFIG).is_file() or (folder / "config.json").is_file():
        return None
    try:
        base = json.loads((folder / CONFIG).read_text("utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not base:
        raise ModelLoadError(f"{folder} is an adapter that names no base model: load that, with adapters={{name: …}}")
    return str(base)


def load_adapters(model: nn.Module, adapters: AdapterPaths) -> None:
    """Load adapters into a model, none of them active: requests choose (`ReuseConfig.adapter`).

    Args:
        adapters: folder or hub id by the name that calls will use.

    Raises:
        ModelLoadError: peft is missing, an adapter cannot be read or does not fit the model, or is of a kind that is
            no part of the model's layers.
    """
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise ModelLoadError("adapters need peft: pip install peft") from error
    wrapped: Any = None
    for name, path in adapters.items():
        where = os.fspath(path)
        try:
            config = PeftConfig.from_pretrained(where)
            if config.is_prompt_learning:
                raise ValueError("it puts learned tokens in front of every prompt; hand over its PeftModel instead")
            if wrapped is None:
                wrapped = PeftModel.from_pretrained(model, where, adapter_name=name, config=config)
            else:
                wrapped.load_adapter(where, adapter_name=name)
        except Exception as error:  # peft raises what it meets
            raise ModelLoadError(f"cannot load the adapter {name} from {where}: {reason(error)}") from error
    if missing := sorted(set(adapters) - set(available_adapters(model))):
        raise ModelLoadError(f"the adapter {', '.join(missing)} changed no layer of the model")
    for layer in adapter_layers(model):
        layer.enable_adapters(False)  # type: ignore[operator]


def activate(model: nn.Module, name: str) -> None:
    """Make an adapter the one that is active at rest."""
    for layer in adapter_layers(model):
        layer.set_adapter([name])  # type: ignore[operator]
        layer.enable_adapters(True)  # type: ignore[operator]


def with_adapter_files(identity: str | None, adapters: AdapterPaths) -> str | None:
    """The identity of a base model's files with those of the adapters (which may bring parts of the base along)."""
    parts = [identity, *(files_identity(Path(path), {}) for path in adapters.values())]
    return None if None in parts else hash_fields("adapter files", *(str(part).encode() for part in parts))
