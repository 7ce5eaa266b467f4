"""Which engine a KVBoostLLM stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvboost_rag.adapters.loading_kwargs import loading_options
from kvboost_rag.adapters.registry import EngineSpec, adopt


def engine_spec(given: Mapping[str, Any], model: Any, tokenizer: Any, engine: Any) -> EngineSpec:
    """The spec of an engine, a model object, or a model's name with loading arguments.

    Args:
        given: the fields of `KVBoostLLM`.

    Raises:
        ValueError: none of them, or two that contradict each other.
        TypeError: a loading argument that has no meaning.
    """
    if engine is not None:
        if model is not None:
            raise ValueError("engine= brings its model along; leave out model=")
        return engine if isinstance(engine, EngineSpec) else adopt(engine)
    options: dict[str, Any] = {}
    if model is None:
        if not given["model_name"]:
            raise ValueError("no model: pass model_name= (hub id, folder, .gguf file or bundled:…), model= or engine=")
        options = loading_options(
            **{"device_map": given["device_map"], "dtype": given["dtype"]} | given["model_kwargs"]
        )
    tokenizer = tokenizer or given["tokenizer_name"] or None
    if model is not None and tokenizer is None:
        tokenizer = getattr(model, "name_or_path", None) or None
    if tokenizer is not None and tokenizer != given["model_name"]:
        options["tokenizer"] = tokenizer
    kwargs = {name: value for name, value in given["tokenizer_kwargs"].items() if name != "max_length"}
    if kwargs:
        options["tokenizer_kwargs"] = kwargs
    return EngineSpec(given["model_name"] if model is None else model, given["store"], options)
