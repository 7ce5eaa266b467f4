"""What demanding applications do with LangChain's classes: odd input, profiles, caches, fallbacks, events, agents."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import BaseModel

from langchain_kvboost import ChatKVBoost, KVBoostEmbeddings, KVBoostLLM, KVBoostVectorStore, KVBoostWarmer

HALF = "half \ud83d of a pair stands in this text about the harbour"
TEXTS = ["A ship of the north left the harbour in May.", HALF, "The lamp of the tower burned all night long."]


class PlainEmbedding(DeterministicFakeEmbedding):
    """One that any text can be given to, as hosted ones are."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return super().embed_documents([text.encode("utf-8", "replace").decode() for text in texts])


@pytest.fixture(params=["chat", "llm"])
def make(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def said(answer: Any) -> str:
    return getattr(answer, "text", answer)


# Half a character costs the document it stands in, and the input of a batch it stands in.


@pytest.mark.parametrize("through", ["warmer", "store", "aadd"])
def test_half_a_character_costs_its_document(chat: Any, caplog: pytest.LogCaptureFixture, through: str) -> None:
    model = chat(neighbours=2)
    documents = [Document(text) for text in TEXTS]
    if through == "warmer":
        assert KVBoostWarmer(model).transform_documents(documents) is documents
    else:
        store = KVBoostVectorStore(InMemoryVectorStore(PlainEmbedding(size=8)), model)
        ids = store.add_documents(documents) if through == "store" else asyncio.run(store.aadd_documents(documents))
        assert [document.page_content for document in store.get_by_ids(ids)] == TEXTS
    assert len(model.engine.store.catalog) == 2
    assert "1 of 3 documents" in caplog.text
    prompt = "\n\n".join([TEXTS[0], TEXTS[2], "Which?"])
    assert model.invoke(prompt, strict=True).response_metadata["kvboost"]["hits"] == {"approximate": 2}


def test_half_a_character_in_an_id(chat: Any) -> None:
    model = chat()
    store = KVBoostVectorStore(InMemoryVectorStore(PlainEmbedding(size=8)), model)
    ids = store.add_documents([Document(TEXTS[0], id="a\ud83d"), Document(TEXTS[2], id="b")])
    assert len(model.engine.store.catalog) == 2
    store.delete([ids[0]])
    assert len(model.engine.store.catalog) == 1


def test_half_a_character_among_hints(make: Any) -> None:
    model = make()
    answer = model.invoke(f"{TEXTS[0]} And?", documents=[Document(text) for text in TEXTS], strict=True)
    whole = [Document(text) for text in TEXTS if text != HALF]
    assert said(answer) == said(model.invoke(f"{TEXTS[0]} And?", documents=whole, strict=True))


def test_an_input_that_fails_costs_its_own_answer(make: Any) -> None:
    model = make()
    expected = [said(model.invoke(text)) for text in ("One.", "Two.")]
    for answers in (
        model.batch(["One.", HALF, "Two."], return_exceptions=True),
        asyncio.run(model.abatch(["One.", HALF, "Two."], return_exceptions=True)),
    ):
        assert [said(answers[0]), said(answers[2])] == expected
        assert isinstance(answers[1], ValueError)
        assert "half a character" in str(answers[1])
    with pytest.raises(ValueError, match="half a character"):
        model.batch(["One.", HALF])


def test_half_a_character_is_embedded_as_a_question_mark(tiny_model: Any) -> None:
    from kvboost_rag import KVBoost
    from kvboost_rag.config import EncodingConfig

    seen: list[str] = []

    def embed(texts: Any) -> Any:
        import numpy as np

        seen.extend(texts)
        return np.eye(len(texts), 4, dtype=np.float32)

    with KVBoost(tiny_model("llama"), encoding=EncodingConfig(embedder=embed)) as engine:
        assert len(KVBoostEmbeddings(engine).embed_documents(TEXTS)) == 3
    assert seen == [TEXTS[0], HALF.replace("\ud83d", "?"), TEXTS[2]]


# Parameters.


@pytest.mark.parametrize("stop", [[""], "", ["x", ""]])
def test_an_empty_stop_string_is_refused_by_name(make: Any, stop: Any) -> None:
    with pytest.raises(ValueError, match="stop="):
        make().invoke("hi", stop=stop)
    with pytest.raises(ValueError, match="stop="):
        make().bind(stop=stop).invoke("hi")
    with pytest.raises(ValueError, match="stop="):
        make(stop=stop)


def test_the_profile_of_a_loaded_model(chat: Any) -> None:
    profile = chat(max_tokens=40).profile
    assert (profile["max_input_tokens"], profile["max_output_tokens"]) == (2048 - 40, 40)
    assert profile["tool_calling"] is profile["structured_output"] is profile["text_inputs"] is True
    assert profile["image_inputs"] is False
    assert chat(profile={"max_input_tokens": 7}).profile == {"max_input_tokens": 7}


def test_the_profile_is_found_without_loading_weights(fresh: Any, tmp_path: Path, recwarn: Any) -> None:
    fresh.model.config.save_pretrained(tmp_path / "model")
    model = ChatKVBoost(model=str(tmp_path / "model"))
    assert model._spec.peek() is None
    assert model.profile["max_input_tokens"] == 2048 - 256
    assert "max_input_tokens" not in ChatKVBoost(model="nobody/has-this").profile
    assert "max_input_tokens" not in ChatKVBoost(model=str(tmp_path / "nothing.gguf")).profile
    assert not [w for w in recwarn if "profile" in str(w.message).lower()]


# Composition.


def test_chains_of_every_form(make: Any) -> None:
    model = make()
    prompt = ChatPromptTemplate.from_messages([("system", "Short."), ("human", "{question} {context}")])
    retrieve = RunnableLambda(lambda _: TEXTS[0])
    chain = {"context": retrieve, "question": RunnablePassthrough()} | prompt | model | StrOutputParser()
    expected = chain.invoke("Who?")
    assert chain.with_config(tags=["a"], run_name="b").invoke("Who?") == expected
    assert chain.with_retry(stop_after_attempt=2).invoke("Who?") == expected
    both = RunnableParallel(left=chain, right=chain).invoke("Who?")
    assert both == {"left": expected, "right": expected}
    assert "".join(chain.stream("Who?")) == expected
    assert asyncio.run(chain.ainvoke("Who?")) == expected
    assert list(dict(chain.batch_as_completed(["Who?", "Who?"])).values()) == [expected, expected]


def test_a_fallback_takes_over(make: Any, chat: Any) -> None:
    broken = make(repair="none").bind(adapter="nobody")
    expected = said(chat().invoke("Who?"))
    assert said(broken.with_fallbacks([chat()]).invoke("Who?")) == expected
    streamed = [said(chunk) for chunk in broken.with_fallbacks([chat()]).stream("Who?")]
    assert "".join(streamed) == expected


def test_alternatives_and_fields_are_chosen_per_call(chat: Any) -> None:
    model = chat(strict=True).configurable_fields(
        reuse=ConfigurableField("reuse"), max_new_tokens=ConfigurableField("tokens")
    )
    assert model.invoke("Who?", {"configurable": {"tokens": 3}}).usage_metadata["output_tokens"] <= 8
    answer = model.invoke(TEXTS[0], {"configurable": {"reuse": "off"}})
    assert answer.response_metadata["kvboost"]["reuse"] == "off"


def test_events_name_the_model_and_carry_its_tokens(make: Any) -> None:
    model = make()

    async def events() -> list[Any]:
        chain = RunnableLambda(lambda text: text) | model
        return [event async for event in chain.astream_events("Who?", version="v2")]

    found = asyncio.run(events())
    kind = "chat_model" if isinstance(model, ChatKVBoost) else "llm"
    streamed = "".join(said(e["data"]["chunk"]) for e in found if e["event"] == f"on_{kind}_stream")
    (end,) = [e for e in found if e["event"] == f"on_{kind}_end"]
    assert streamed == said(model.invoke("Who?"))
    assert end["data"]["output"]


class Counting(BaseCallbackHandler):
    def __init__(self) -> None:
        self.starts = self.ends = self.errors = 0

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.starts += 1

    def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        self.starts += 1

    def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends += 1

    def on_llm_error(self, *args: Any, **kwargs: Any) -> None:
        self.errors += 1


def test_callbacks_see_every_start_end_and_error(make: Any) -> None:
    seen = Counting()
    model = make()
    model.batch(["One.", HALF, "Two."], {"callbacks": [seen]}, return_exceptions=True)
    assert (seen.starts, seen.ends, seen.errors) == (3, 2, 1)


@pytest.mark.parametrize("path", ["invoke", "ainvoke", "generate"])
def test_the_global_cache_knows_what_a_call_asked_for(make: Any, path: str) -> None:
    model = make()
    calls: tuple[dict[str, Any], ...] = (
        {"max_new_tokens": 3},
        {"max_new_tokens": 6},
        {"max_new_tokens": 6, "repetition_penalty": 5.0},
        {"max_new_tokens": 6, "stop": ["e", "o", "a"]},
    )

    def ask(call: dict[str, Any]) -> str:
        own = {"min_new_tokens": 1, **call}
        if path == "generate" and isinstance(model, KVBoostLLM):
            return model.generate(["Who was it?"], **own).generations[0][0].text
        return said(
            asyncio.run(model.ainvoke("Who was it?", **own))
            if path == "ainvoke"
            else model.invoke("Who was it?", **own)
        )

    plain = [ask(call) for call in calls]
    try:
        set_llm_cache(InMemoryCache())
        assert [ask(call) for call in calls] == plain
        requests = model.engine.stats().requests
        assert [ask(call) for call in calls] == plain
        assert model.engine.stats().requests == requests
        # A hint adds no text: the answer is the same one.
        assert said(model.invoke("Who was it?", documents=[TEXTS[0]], min_new_tokens=1, max_new_tokens=3)) == plain[0]
        if isinstance(model, KVBoostLLM):
            assert model.engine.stats().requests == requests
    finally:
        set_llm_cache(None)


def test_bound_models_and_chains_are_pickled(make: Any) -> None:
    model = make()
    chain = ChatPromptTemplate.from_template("{q}") | model.bind(max_new_tokens=4) | StrOutputParser()
    copied = pickle.loads(pickle.dumps(chain))
    assert copied.invoke({"q": "Who?"}) == chain.invoke({"q": "Who?"})
    assert isinstance(pickle.loads(pickle.dumps(model)), ChatKVBoost | KVBoostLLM)


# Agents.


class Report(BaseModel):
    """What was found."""

    town: str


@tool
def look_up(name: str) -> str:
    """Find a person."""
    return f"{name} lives in Oslo."


CALL = '{"name": "look_up", "arguments": {"name": "Ada"}}'


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_agent_with_tools_and_a_response_format(chat: Any, saying: Any, asynchronous: bool) -> None:
    """The profile says `structured_output`, so the answer's form is the model's own work: and it may call tools yet."""
    agents = pytest.importorskip("langchain.agents")
    pytest.importorskip("llguidance")
    model = Scripted(model=chat()._spec.model, tokenizer=chat()._spec.load["tokenizer"], max_tokens=80)
    model._script = [saying(CALL), saying('{"town": "Oslo"}')]
    agent = agents.create_agent(model, tools=[look_up], response_format=Report)
    asked = {"messages": [("human", "Where does Ada live?")]}
    state = asyncio.run(agent.ainvoke(asked)) if asynchronous else agent.invoke(asked)
    assert state["structured_response"] == Report(town="Oslo")
    assert [type(m) for m in state["messages"][1:]] == [AIMessage, ToolMessage, AIMessage]
    assert state["messages"][2].content == "Ada lives in Oslo."


class Scripted(ChatKVBoost):
    """Writes, call by call, what a script says."""

    _script: list[Any] = []  # noqa: RUF012 - a private attribute, copied for each object

    def _chat_events(self, messages: Any, stop: Any, kwargs: Any, cancelled: Any = None) -> Any:
        return super()._chat_events(messages, stop, kwargs | self._script.pop(0), cancelled)
