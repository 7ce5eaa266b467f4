"""LoRA adapters through LlamaIndex: as an argument and in a call; none is served another's KV."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from adapter_helpers import with_two_adapters
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import TextNode
from llama_index.llms.kvboost import KVBoostLLM, KVWarm

from kvboost_rag.models.adapters import AdapterError

DOCUMENTS = [f"Kiln {i} fired {i + 12} pots a day until the clay of the valley was used up." for i in range(3)]
PROMPT = "\n\n".join([*DOCUMENTS, "Which kiln fired most?"])
MESSAGES = [ChatMessage(role="user", content=PROMPT)]
ADAPTERS: tuple[Any, ...] = ("red", "blue", [])


@pytest.fixture
def fields(tiny_model: Any) -> dict[str, Any]:
    """Constructor arguments; at rest `red` is active."""
    loaded = tiny_model("llama")
    model = with_two_adapters(loaded)
    model.set_adapter("red")
    return {
        "model": model,
        "tokenizer": loaded.tokenizer,
        "max_new_tokens": 8,
        "generate_kwargs": {"min_new_tokens": 8},
        "device_map": None,
        "strict": True,
    }


def test_every_way_to_say_it_is_the_same(fields: dict[str, Any]) -> None:
    llm = KVBoostLLM(reuse="exact", **fields)
    plain = {str(a): llm.complete(PROMPT, adapter=a, reuse="off").text for a in ADAPTERS}
    assert len(set(plain.values())) == 3
    for adapter in (*ADAPTERS, *ADAPTERS):
        expected = plain[str(adapter)]
        assert llm.complete(PROMPT, adapter=adapter).text == expected
        assert [r.text for r in llm.stream_complete(PROMPT, adapter=adapter)][-1] == expected
        assert asyncio.run(llm.acomplete(PROMPT, adapter=adapter)).text == expected
        chat = llm.chat(MESSAGES, adapter=adapter, reuse="off").message.content
        assert llm.chat(MESSAGES, adapter=adapter).message.content == chat
        own = KVBoostLLM(reuse="exact", adapter=adapter, **fields)
        assert own.complete(PROMPT).text == expected
        assert own.complete(PROMPT, adapter="red").text == plain["red"]


def test_nodes_are_warmed_for_the_models_adapter(fields: dict[str, Any]) -> None:
    llm = KVBoostLLM(adapter="blue", **fields)
    nodes = [TextNode(text=text) for text in DOCUMENTS]
    warm = KVWarm(llm=llm)
    warm(nodes)
    assert warm.report.num_encoded == 3
    assert llm.complete(PROMPT).raw["kvboost"]["hits"] == {"approximate": 3}
    assert llm.complete(PROMPT, adapter="red").raw["kvboost"]["hits"] == {"encoded": 3}
    assert llm.complete(PROMPT, adapter="red").raw["kvboost"]["hits"] == {"approximate": 3}


def test_an_adapter_that_is_not_there_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(AdapterError, match="no adapter green: it has blue, red"):
        KVBoostLLM(**fields).complete(PROMPT, adapter="green")
    with pytest.raises(ValueError, match="adapter"):
        KVBoostLLM(**fields).complete(PROMPT, adapter=3)
