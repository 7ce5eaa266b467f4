"""LoRA adapters through LangChain: as a field, bound, and in a call; none is served another's KV or answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from adapter_helpers import save_adapters, with_two_adapters
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore

from kvboost_rag.models.adapters import AdapterError
from langchain_kvboost import ChatKVBoost, KVBoostLLM, KVBoostVectorStore, KVBoostWarmer

DOCUMENTS = [f"Kiln {i} fired {i + 12} pots a day until the clay of the valley was used up." for i in range(3)]
PROMPT = "\n\n".join([*DOCUMENTS, "Which kiln fired most?"])
ADAPTERS: tuple[Any, ...] = ("red", "blue", [])


@pytest.fixture
def model(fresh: Any) -> dict[str, Any]:
    """Constructor arguments; at rest `red` is active."""
    adapted = with_two_adapters(fresh)
    adapted.set_adapter("red")
    return {"model": adapted, "tokenizer": fresh.tokenizer, "max_tokens": 8, "min_new_tokens": 8}


def hits(message: Any) -> dict[str, int]:
    return message.response_metadata["kvboost"]["hits"]


def test_every_way_to_say_it_is_the_same(model: dict[str, Any]) -> None:
    chat = ChatKVBoost(reuse="exact", strict=True, **model)
    plain = {str(a): chat.invoke(PROMPT, adapter=a, reuse="off").content for a in ADAPTERS}
    assert len(set(plain.values())) == 3
    for adapter in (*ADAPTERS, *ADAPTERS):
        expected = plain[str(adapter)]
        assert chat.invoke(PROMPT, adapter=adapter).content == expected
        assert chat.bind(adapter=adapter).invoke(PROMPT).content == expected
        assert "".join(chunk.text for chunk in chat.stream(PROMPT, adapter=adapter)) == expected
        own = ChatKVBoost(reuse="exact", strict=True, adapter=adapter, **model)
        assert own.engine is chat.engine
        assert own.invoke(PROMPT).content == expected
        assert own.invoke(PROMPT, adapter="red").content == plain["red"]
    assert chat.invoke(PROMPT).content == plain["red"]


def test_chunks_are_each_adapters_own(model: dict[str, Any]) -> None:
    chat = ChatKVBoost(strict=True, **model)
    KVBoostWarmer(llm=chat).transform_documents([Document(text) for text in DOCUMENTS])
    assert hits(chat.invoke(PROMPT)) == {"approximate": 3}
    for adapter in ("blue", []):
        assert hits(chat.invoke(PROMPT, adapter=adapter)) == {"encoded": 3}
        assert hits(chat.invoke(PROMPT, adapter=adapter)) == {"approximate": 3}


def test_batches_that_mix_adapters(model: dict[str, Any]) -> None:
    chat = ChatKVBoost(strict=True, reuse="exact", **model)
    plain = {str(a): chat.invoke(PROMPT, adapter=a, reuse="off").content for a in ADAPTERS}
    bound = [chat.bind(adapter=a) for a in ADAPTERS] * 2

    async def together() -> list[Any]:
        return await asyncio.gather(*(runnable.ainvoke(PROMPT) for runnable in bound))

    answers = [message.content for message in asyncio.run(together())]
    assert answers == [plain[str(a)] for a in ADAPTERS] * 2


@pytest.mark.parametrize("through", ["warmer", "store"])
def test_documents_are_warmed_for_the_models_adapter(model: dict[str, Any], through: str) -> None:
    chat = ChatKVBoost(strict=True, adapter="blue", **model)
    documents = [Document(text) for text in DOCUMENTS]
    if through == "warmer":
        KVBoostWarmer(llm=chat).transform_documents(documents)
    else:
        store = KVBoostVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=8)), llm=chat)
        ids = store.add_documents(documents)
    assert hits(chat.invoke(PROMPT)) == {"approximate": 3}
    if through == "store":
        assert hits(chat.invoke(PROMPT, adapter="red")) == {"encoded": 3}
        store.delete(ids)
        assert len(chat.engine.store.catalog) == 0


def test_answers_that_langchain_caches_are_each_adapters_own(model: dict[str, Any]) -> None:
    cache = InMemoryCache()
    for made in (ChatKVBoost(cache=cache, **model), KVBoostLLM(cache=cache, **model)):
        first = {str(a): made.invoke(PROMPT, adapter=a) for a in ADAPTERS}
        again = {str(a): made.invoke(PROMPT, adapter=a) for a in ADAPTERS}
        assert len({str(getattr(answer, "content", answer)) for answer in first.values()}) == 3
        for name, answer in first.items():
            assert getattr(again[name], "content", again[name]) == getattr(answer, "content", answer)


def test_an_adapter_that_is_not_there_is_named(model: dict[str, Any]) -> None:
    chat = ChatKVBoost(**model)
    with pytest.raises(AdapterError, match="no adapter green: it has blue, red"):
        chat.invoke(PROMPT, adapter="green")
    with pytest.raises(ValueError, match="adapter"):
        ChatKVBoost(adapter=3, **model)


def test_adapters_from_folders(fresh: Any, tmp_path: Path) -> None:
    folders = {name: str(path) for name, path in save_adapters(fresh, tmp_path).items()}
    base = folders.pop("base")
    chat = ChatKVBoost(model=base, model_kwargs={"adapters": folders}, max_tokens=8, min_new_tokens=8, strict=True)
    answers = {name: chat.invoke(PROMPT, reuse="exact", adapter=name).content for name in folders}
    assert answers == {name: chat.invoke(PROMPT, reuse="off", adapter=name).content for name in folders}
    assert chat.invoke(PROMPT).content not in answers.values()
