"""LLMs over tiny random models, an index that needs no download, and clean global settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.llms.kvboost import KVBoostLLM
from llama_index_kvboost.helpers import MakeLLM, WordEmbedding, own_settings

if TYPE_CHECKING:
    from kvboost_rag.models.load import LoadedModel


@pytest.fixture(scope="session")
def tiny_loaded(tiny_model: Any) -> LoadedModel:
    return tiny_model("llama")


@pytest.fixture
def make_llm(tiny_loaded: LoadedModel) -> Iterator[MakeLLM]:
    """`make_llm(max_new_tokens=…)`: an LLM over one tiny model, each with a store of its own."""
    from kvboost_rag import KVBoost

    engines: list[KVBoost] = []

    def make(cls: type[KVBoostLLM] = KVBoostLLM, **fields: Any) -> KVBoostLLM:
        if "engine" not in fields:
            engines.append(KVBoost(tiny_loaded))
            fields["engine"] = engines[-1]
        return cls(**({"max_new_tokens": 8, "strict": True} | fields))

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def llm(make_llm: MakeLLM) -> Iterator[KVBoostLLM]:
    """An LLM that is also the global one, with its own tokenizer."""
    made = make_llm()
    with own_settings() as settings:
        settings.llm, settings.tokenizer, settings.embed_model = made, made.tokenize, WordEmbedding()
        yield made
