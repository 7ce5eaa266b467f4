"""Which engine a KVBoostLLM stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvboost_rag.adapters.loading_kwargs import loading_options
from kvboost_rag.adapters.registry import EngineSpec, adopt

if TYPE_CHECKING:
    from llama_index.llms.kvboost.arguments import KVBoostArguments


def engine_spec(llm: KVBoostArguments, model: Any, tokenizer: Any, engine: Any) -> EngineSpec:
    """The spec of an engine, a model object, or a model's name with loading arguments.

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
        if not llm.model_name:
            raise ValueError("no model: pass model_name= (hub id, folder, .gguf file or bundled:…), model= or engine=")
        options = loading_options(**{"device_map": llm.device_map, "dtype": llm.dtype} | llm.model_kwargs)
    tokenizer = tokenizer or llm.tokenizer_name or None
    if model is not None and tokenizer is None:
        tokenizer = getattr(model, "name_or_path", None) or None
    if tokenizer is not None and tokenizer != llm.model_name:
        options["tokenizer"] = tokenizer
    kwargs = {name: value for name, value in llm.tokenizer_kwargs.items() if name != "max_length"}
    if kwargs:
        options["tokenizer_kwargs"] = kwargs
    return EngineSpec(llm.model_name if model is None else model, llm.store, options)
