"""Stock chains, unchanged, end to end: on a tiny model and on the real bundled one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import pytest
import torch
from corpus_texts import document
from langchain.agents import create_agent
from langchain_classic.chains import RetrievalQA, create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers.multi_query import MultiQueryRetriever
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore

from kvboost_rag import KVBoost
from langchain_kvboost import ChatKVBoost, KVBoostLLM, KVBoostRetriever, KVBoostVectorStore, KVBoostWarmer

DOCUMENTS = [Document(document(n, 4), id=str(n), metadata={"source": f"s{n}"}) for n in range(8)]
QUESTION = "How many entries does the index hold?"
PROMPT = ChatPromptTemplate.from_messages([("system", "Answer from the documents.\n\n{context}"), ("human", "{input}")])
Chain = Callable[[Any, Any], Any]


class Seen(BaseCallbackHandler):
    """What models of a run were given and what they answered."""

    def __init__(self) -> None:
        self.prompts: list[Any] = []
        self.answers: list[Any] = []
        self.documents: list[Document] = []

    def on_chat_model_start(self, serialized: Any, messages: list[list[BaseMessage]], **kwargs: Any) -> None:
        self.prompts.extend(messages)

    def on_llm_start(self, serialized: Any, prompts: list[str], **kwargs: Any) -> None:
        self.prompts.extend(prompts)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.answers.append(response.generations[0][0])

    def on_retriever_end(self, documents: list[Document], **kwargs: Any) -> None:
        self.documents.extend(documents)

    @property
    def kvboost(self) -> dict[str, Any]:
        """What the last answer says about reuse."""
        answer = self.answers[-1]
        info = answer.message.response_metadata if hasattr(answer, "message") else answer.generation_info
        return info["kvboost"]


@pytest.fixture(scope="module")
def real_engine(request: pytest.FixtureRequest) -> Iterator[KVBoost]:
    with KVBoost(request.getfixturevalue("smollm2"), profile=None) as made:
        yield made


@pytest.fixture
def tiny_engine(tiny_model: Any) -> Iterator[KVBoost]:
    with KVBoost(tiny_model("llama"), profile=None) as made:
        yield made


@pytest.fixture(params=["tiny_engine", pytest.param("real_engine", marks=pytest.mark.model)])
def engine(request: pytest.FixtureRequest) -> Iterator[KVBoost]:
    """A tiny model, then the bundled one; neither knows a document yet."""
    made: KVBoost = request.getfixturevalue(request.param)
    yield made
    made.evict(DOCUMENTS)


def _chat(engine: KVBoost, **fields: Any) -> ChatKVBoost:
    return ChatKVBoost(**({"model": engine, "max_tokens": 6, "min_new_tokens": 3, "strict": True} | fields))


def _vectors() -> InMemoryVectorStore:
    return InMemoryVectorStore(DeterministicFakeEmbedding(size=8))


@pytest.fixture
def retriever() -> Any:
    store = _vectors()
    store.add_documents(DOCUMENTS)
    return store.as_retriever(search_kwargs={"k": 4})


def _retrieval_chain(model: Any, retriever: Any) -> Any:
    return create_retrieval_chain(retriever, create_stuff_documents_chain(model, PROMPT)) | itemgetter("answer")


def _prompted_chain(model: Any, retriever: Any) -> Any:
    """A document prompt of the user's own: the header is computed afresh, the text below it is reused."""
    header = ChatPromptTemplate.from_template("Source {source}:\n{page_content}")
    stuff = create_stuff_documents_chain(model, PROMPT, document_prompt=header, document_separator="\n---\n")
    return create_retrieval_chain(retriever, stuff) | itemgetter("answer")


def _hand_written_chain(model: Any, retriever: Any) -> Any:
    def join(documents: list[Document]) -> str:
        return "\n\n".join(d.page_content for d in documents)

    given = {"context": itemgetter("input") | retriever | join, "input": itemgetter("input")}
    return given | RunnablePassthrough() | PROMPT | model | StrOutputParser()


CHAINS = {"retrieval": _retrieval_chain, "by hand": _hand_written_chain}


def _run(chain: Any) -> tuple[str, Seen]:
    seen = Seen()
    return chain.invoke({"input": QUESTION}, {"callbacks": [seen]}), seen


def _document_tokens(engine: KVBoost, documents: list[Document]) -> int:
    return sum(engine.tokens.count(d.page_content) for d in documents)


@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)
def test_documents_are_hit_and_prompts_and_answers_stay_the_same(engine: KVBoost, retriever: Any, make: Chain) -> None:
    chain = make(_chat(engine), retriever)
    KVBoostWarmer(engine).transform_documents(DOCUMENTS)
    answer, seen = _run(chain)
    assert answer
    assert len(seen.documents) == 4
    assert seen.kvboost["hits"] == {"approximate": 4}
    assert seen.kvboost["document_tokens"] > 0.8 * _document_tokens(engine, seen.documents)
    assert seen.kvboost["cached_tokens"] > 0.8 * _document_tokens(engine, seen.documents)
    # Another model is given the very same messages.
    _, theirs = _run(make(FakeListChatModel(responses=["x"]), retriever))
    assert theirs.prompts == seen.prompts
    # The same again after eviction: documents are encoded on the way, and the answer is the same.
    for key in list(engine.store.keys()):
        engine.store.delete(key)
    cold, seen_cold = _run(chain)
    assert seen_cold.kvboost["hits"] == {"encoded": 4}
    warm, seen_warm = _run(chain)
    assert seen_warm.kvboost["hits"] == {"approximate": 4}
    assert answer == cold == warm


@pytest.mark.parametrize("make", [*CHAINS.values(), _prompted_chain])
def test_all_ways_to_run_a_chain_agree(tiny_engine: KVBoost, retriever: Any, make: Chain) -> None:
    chain = make(_chat(tiny_engine), retriever)
    KVBoostWarmer(tiny_engine).transform_documents(DOCUMENTS)
    answer, seen = _run(chain)
    assert seen.kvboost["hits"] == {"approximate": 4}
    assert asyncio.run(chain.ainvoke({"input": QUESTION})) == answer
    assert "".join(chain.stream({"input": QUESTION})) == answer
    assert chain.batch([{"input": QUESTION}] * 2) == [answer] * 2


def _ids_seen(engine: KVBoost, call: Callable[[], Any]) -> tuple[Any, list[int]]:
    ids: list[int] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        if not ids:
            ids.extend(kwargs["input_ids"][0].tolist())

    handle = engine.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        return call(), ids
    finally:
        handle.remove()


def test_without_reuse_a_chain_says_what_plain_transformers_says(engine: KVBoost, retriever: Any) -> None:
    chain = _retrieval_chain(_chat(engine, reuse="off"), retriever)
    (answer, seen), ids = _ids_seen(engine, lambda: _run(chain))
    roles = {"system": "system", "human": "user"}
    plain = [{"role": roles[m.type], "content": m.content} for m in seen.prompts[0]]
    text = engine.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert engine.tokenizer.decode(ids) == text
    with torch.no_grad():
        output = engine.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=6,
            min_new_tokens=3,
            do_sample=False,
        )
    assert engine.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True) == answer


def test_a_conversation_with_a_retriever_that_reads_the_history(tiny_engine: KVBoost, retriever: Any) -> None:
    model = _chat(tiny_engine)
    KVBoostWarmer(tiny_engine).transform_documents(DOCUMENTS)
    history = MessagesPlaceholder("chat_history")
    rephrase = ChatPromptTemplate.from_messages([("system", "Rephrase."), history, ("human", "{input}")])
    answer = ChatPromptTemplate.from_messages([("system", "Answer from:\n\n{context}"), history, ("human", "{input}")])
    chain = create_retrieval_chain(
        create_history_aware_retriever(model, retriever, rephrase), create_stuff_documents_chain(model, answer)
    )
    past: list[BaseMessage] = []
    for turn in (1, 2):
        seen = Seen()
        said = chain.invoke({"input": QUESTION, "chat_history": past}, {"callbacks": [seen]})["answer"]
        assert len(seen.answers) == turn  # the first question is not rephrased
        assert seen.kvboost["hits"] == {"approximate": 4}
        past += [HumanMessage(QUESTION), AIMessage(said)]


@pytest.mark.parametrize(("kind", "calls"), [("stuff", 1), ("map_reduce", 4 + 1), ("refine", 4)])
def test_summaries_and_question_chains_that_ask_several_times(
    tiny_engine: KVBoost, retriever: Any, kind: str, calls: int
) -> None:
    KVBoostWarmer(tiny_engine).transform_documents(DOCUMENTS)
    seen = Seen()
    chain = RetrievalQA.from_chain_type(_chat(tiny_engine), chain_type=kind, retriever=retriever)
    assert chain.invoke({"query": QUESTION}, {"callbacks": [seen]})["result"]
    assert len(seen.answers) == calls
    hits = [answer.message.response_metadata["kvboost"]["hits"].get("approximate", 0) for answer in seen.answers]
    assert sum(hits) == 4


def test_a_retriever_that_asks_the_model_for_queries(tiny_engine: KVBoost, retriever: Any) -> None:
    many = MultiQueryRetriever.from_llm(retriever=retriever, llm=_chat(tiny_engine), include_original=True)
    found = KVBoostRetriever(retriever=many, llm=tiny_engine).invoke(QUESTION)
    assert len(found) >= 4
    known = tiny_engine.registry.known_texts("")
    assert all(known.key_of(d.page_content) for d in found)


def test_a_string_model_in_a_chain(tiny_engine: KVBoost, retriever: Any) -> None:
    KVBoostWarmer(tiny_engine).transform_documents(DOCUMENTS)
    model = KVBoostLLM(model=tiny_engine, max_tokens=6, min_new_tokens=3, strict=True)
    answer, seen = _run(_hand_written_chain(model, retriever))
    assert seen.kvboost["hits"] == {"approximate": 4}
    assert all(d.page_content in seen.prompts[0] for d in seen.documents)
    assert answer == _run(_hand_written_chain(model, retriever))[0]


@pytest.mark.parametrize("way", ["keyword", "bound", "message"])
def test_explicit_documents_are_reused_and_add_nothing(tiny_engine: KVBoost, way: str) -> None:
    model, context = _chat(tiny_engine), DOCUMENTS[:3]
    text = "\n\n".join([*(d.page_content for d in context), QUESTION])
    extra = {"documents": context} if way == "message" else {}
    messages = [HumanMessage(text, additional_kwargs=extra)]
    call = {"documents": [*context, Document("a text that does not stand in the prompt")]} if way == "keyword" else {}
    runnable = model.bind(documents=context) if way == "bound" else model
    answer = runnable.invoke(messages, **call)
    assert answer.response_metadata["kvboost"]["hits"] == {"encoded": 3}
    assert answer.usage_metadata["input_tokens"] == len(_ids_of(tiny_engine, text))
    again = runnable.invoke(messages, **call)
    assert again.response_metadata["kvboost"]["hits"] == {"approximate": 3}
    assert again.text == answer.text
    assert model.invoke([HumanMessage(text)]).response_metadata["kvboost"]["hits"] == {}


def _ids_of(engine: KVBoost, text: str) -> list[int]:
    """Token ids of the chat prompt, each document tokenised apart."""
    rendered = engine.tokens.render([{"role": "user", "content": text}])
    ids: list[int] = []
    for doc in DOCUMENTS[:3]:
        before, _, rendered = rendered.partition(doc.page_content)
        ids += [*engine.tokens.ids(before), *engine.tokens.ids(doc.page_content)]
    return [*ids, *engine.tokens.ids(rendered)]


def test_an_agent_with_a_retriever_tool(engine: KVBoost) -> None:
    store = KVBoostVectorStore(_vectors(), engine)
    store.add_documents(DOCUMENTS)
    tool = create_retriever_tool(
        store.as_retriever(search_kwargs={"k": 4}),
        "search",
        "Search the handbook.",
        response_format="content_and_artifact",
    )
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "entries"}}\n</tool_call>'
    length = engine.tokens.count(call) + 1
    agent = create_agent(_chat(engine, prefix_allowed_tokens_fn=_first_says(engine, call), max_tokens=length), [tool])
    seen = Seen()
    messages = agent.invoke({"messages": [HumanMessage(QUESTION)]}, {"callbacks": [seen]})["messages"]
    assert [type(m) for m in messages] == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    assert messages[1].tool_calls[0]["args"] == {"query": "entries"}
    documents = messages[2].artifact
    assert len(documents) == 4
    kvboost = messages[3].response_metadata["kvboost"]
    assert kvboost["hits"] == {"approximate": 4}
    assert kvboost["cached_tokens"] > 0.8 * _document_tokens(engine, documents)
    assert messages[3].text


def _first_says(engine: KVBoost, text: str) -> Callable[[int, Any], list[int]]:
    """Makes the first answer `text`; later ones are the model's own, but for the signs that a call needs: a small
    model repeats the call before it, for ever."""
    script = [*engine.tokens.ids(text), engine.tokenizer.eos_token_id]
    spelled = ((i, engine.tokens.decode([i])) for i in range(engine.model.config.vocab_size))
    plain = [i for i, spelling in spelled if not set(spelling) & set("<{[`")]

    def allowed(batch: int, input_ids: Any) -> list[int]:
        return [script.pop(0)] if script else plain

    return allowed


def test_a_list_of_documents_in_a_prompt_is_no_error(tiny_engine: KVBoost, caplog: pytest.LogCaptureFixture) -> None:
    """`{context}` with a list of Documents renders their repr: nothing matches, the answer is by plain prefill."""
    odd = [Document(f"Line one of {n}.\nLine two: {document(n, 4)}") for n in range(4)]
    KVBoostWarmer(tiny_engine).transform_documents(odd)
    answer = (PROMPT | _chat(tiny_engine)).invoke({"context": odd, "input": QUESTION})
    assert answer.text
    assert answer.response_metadata["kvboost"]["hits"] == {}
