"""What LangChain's standard tests ask of a chat model, asked of ours under LlamaIndex, on the real bundled model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.llms import ChatMessage
from llama_index.core.query_engine import RouterQueryEngine
from llama_index.core.schema import TextNode
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import QueryEngineTool
from llama_index.llms.kvboost import KVBoostLLM, KVPrefetchPostprocessor, KVWarm
from llama_index_kvboost.helpers import WordEmbedding, own_settings

from kvboost_rag import KVBoost

pytestmark = pytest.mark.model

HELLO = [ChatMessage(role="user", content="Hello")]
FACTS = [
    "The lighthouse of Kelm was built in 1874 by the harbour master Ada Brandt. It is 31 metres high and was painted "
    "red and white until 1950, when the paint was removed.",
    "The bakery on Mill Street opens at six in the morning. Its owner, Tomas Reil, bakes rye bread on Mondays and "
    "plum cake on Fridays; the plum cake is usually gone by nine.",
    "The night train from Orlo to Kelm takes seven hours. It leaves at 22:40 from platform four, and beds have to be "
    "booked two days before.",
]


@pytest.fixture(scope="module")
def model(smollm2: Any) -> Iterator[KVBoostLLM]:
    with KVBoost(smollm2) as engine:
        yield KVBoostLLM(engine=engine, max_new_tokens=8, strict=True)


def content(response: Any) -> str:
    return str(response.message.content)


def test_is_an_llm(model: KVBoostLLM) -> None:
    assert isinstance(model, BaseLLM)
    assert 6000 < model.metadata.context_window < 8192, "room for an answer and the template around messages"
    assert model.metadata.is_chat_model


async def test_chat_in_four_ways(model: KVBoostLLM) -> None:
    whole = model.chat(HELLO)
    pieces = list(model.stream_chat(HELLO))
    apieces = [piece async for piece in await model.astream_chat(HELLO)]
    assert content(whole) == content(await model.achat(HELLO)) == content(pieces[-1]) == content(apieces[-1])
    assert len(content(whole)) > 0
    assert "Hello<|im_end|>" not in content(whole)
    assert "".join(p.delta for p in pieces) == "".join(p.delta for p in apieces) == content(whole)
    assert len(pieces) > 2


def test_usage_is_reported_once_and_right(model: KVBoostLLM) -> None:
    pieces = list(model.stream_chat(HELLO))
    assert [piece.raw is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    usage = pieces[-1].raw["usage"]
    assert usage == model.chat(HELLO).raw["usage"]
    assert usage["prompt_tokens"] == len(model.tokenize(model.messages_to_prompt(HELLO)))
    assert usage["completion_tokens"] == 8
    assert pieces[-1].raw["model"] == "bundled:smollm2"


async def test_batches(model: KVBoostLLM) -> None:
    conversations = [[ChatMessage(content=f"Say the number {n}.")] for n in range(3)]
    alone = [content(model.chat(c, max_new_tokens=4)) for c in conversations]
    with ThreadPoolExecutor(3) as pool:
        assert [content(r) for r in pool.map(lambda c: model.chat(c, max_new_tokens=4), conversations)] == alone
    together = await asyncio.gather(*(model.achat(c, max_new_tokens=4) for c in conversations))
    assert [content(r) for r in together] == alone


def test_conversation_with_system_message_and_two_users_in_a_row(model: KVBoostLLM) -> None:
    conversation = [
        ChatMessage(role="system", content="You answer in one word."),
        ChatMessage(role="user", content="hello", additional_kwargs={"name": "example"}),
        ChatMessage(role="assistant", content="hello"),
        ChatMessage(role="user", content="how are you"),
        ChatMessage(role="user", content="and the weather?"),
    ]
    assert content(model.chat(conversation))


def test_stop_sequence(model: KVBoostLLM) -> None:
    full = content(model.chat(HELLO))
    stop = full[3:6]
    assert len(stop) == 3
    cut = model.chat(HELLO, stop=[stop])
    assert content(cut) == full[: full.index(stop)]
    assert cut.raw["finish_reason"] == "stop"


def test_it_stops_by_itself(model: KVBoostLLM) -> None:
    response = model.chat([ChatMessage(content="Reply with the single word: yes")], max_new_tokens=60)
    assert response.raw["finish_reason"] == "stop"
    assert "<|im_end|>" not in content(response)


def test_temperature_and_seed(model: KVBoostLLM) -> None:
    story = [ChatMessage(content="Tell me a story.")]
    drawn = [content(model.chat(story, temperature=1.2, seed=seed)) for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1


@pytest.fixture
def index(model: KVBoostLLM) -> Iterator[VectorStoreIndex]:
    with own_settings() as settings:
        settings.llm, settings.tokenizer, settings.embed_model = model, model.tokenize, WordEmbedding()
        nodes = [TextNode(text=text, metadata={"source": f"note {i}"}) for i, text in enumerate(FACTS)]
        yield VectorStoreIndex(KVWarm(llm=model)(WordEmbedding()(nodes)))


def test_questions_are_answered_from_reused_documents(model: KVBoostLLM, index: VectorStoreIndex) -> None:
    """The answer does not depend on the cache: full repair gives full prefill's, cold gives warm's."""
    question = "Who built the lighthouse of Kelm?"

    def ask(**settings: Any) -> str:
        llm = model.model_copy(update=settings | {"max_new_tokens": 20})
        post = [KVPrefetchPostprocessor(llm=llm)]
        return str(index.as_query_engine(llm=llm, similarity_top_k=3, node_postprocessors=post).query(question))

    plain = ask(reuse="off")
    assert ask(repair="full") == plain
    hits = model.engine.stats().store_hits
    warm = ask()
    assert model.engine.stats().store_hits >= hits + 3
    for key in list(model.engine.store.keys()):
        model.engine.store.delete(key)
    assert ask() == warm
    assert "Ada Brandt" in plain
    assert "Ada Brandt" in warm


def test_chat_engine_reuses_documents_turn_by_turn(model: KVBoostLLM, index: VectorStoreIndex) -> None:
    chat = index.as_chat_engine(chat_mode="context", llm=model, similarity_top_k=3)
    first = chat.chat("When does the night train leave?")
    hits = model.engine.stats().store_hits
    second = "".join(chat.stream_chat("And from which platform?").response_gen)
    assert str(first)
    assert second
    assert model.engine.stats().store_hits >= hits + 3
    assert len(chat.chat_history) == 4


def test_a_router_lets_the_model_choose(model: KVBoostLLM, index: VectorStoreIndex) -> None:
    """The model's own words are parsed; a selector's answer needs some room."""
    tools = [
        QueryEngineTool.from_defaults(index.as_query_engine(llm=model), name=name, description=description)
        for name, description in (("trains", "Trains and their times"), ("buildings", "Lighthouses and buildings"))
    ]
    selector = LLMSingleSelector.from_defaults(model.model_copy(update={"max_new_tokens": 80}))
    hits = model.engine.stats().store_hits
    response = RouterQueryEngine(selector, tools, llm=model).query("Who built the lighthouse of Kelm?")
    assert response.metadata["selector_result"].ind in (0, 1)
    assert str(response)
    assert model.engine.stats().store_hits > hits
