"""Three hooks that announce retrieved nodes: postprocessor, retriever, event handler."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.kvboost import (
    KVBoostLLM,
    KVPrefetchEventHandler,
    KVPrefetchPostprocessor,
    KVPrefetchRetriever,
    KVWarm,
    prefetch,
)
from llama_index_kvboost.helpers import TEXTS, MakeLLM, documents

from kvboost_rag import KVBoost

NODES = [NodeWithScore(node=TextNode(text=text), score=1.0) for text in TEXTS]


@pytest.fixture
def disk_llm(tiny_loaded: Any, make_llm: MakeLLM, tmp_path: Any) -> Iterator[KVBoostLLM]:
    """An LLM whose warm chunks are on disk only."""
    with KVBoost(tiny_loaded, store=tmp_path) as engine:
        KVWarm(llm=make_llm(engine=engine))([node.node for node in NODES])
    with KVBoost(tiny_loaded, store=tmp_path) as engine:
        yield make_llm(engine=engine)


def _await_reads(llm: KVBoostLLM) -> None:
    for future in list(llm.engine.store._reading.values()):
        future.result(timeout=30)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_postprocessor_brings_chunks_into_memory(disk_llm: KVBoostLLM, asynchronous: bool) -> None:
    store = disk_llm.engine.store
    assert {store.tier_of(key) for key in sorted(store.keys())} == {"disk"}
    post = KVPrefetchPostprocessor(llm=disk_llm)
    if asynchronous:
        assert await post.apostprocess_nodes(NODES[:2], query_str="q") == NODES[:2]
    else:
        assert post.postprocess_nodes(NODES[:2], query_str="q") == NODES[:2]
    _await_reads(disk_llm)
    assert [store.tier_of(key) for key in sorted(store.keys())].count("memory") == 2


def test_unknown_nodes_become_known_and_are_kept_at_first_use(llm: KVBoostLLM) -> None:
    prompt = "\n\n".join(["Answer from this:", TEXTS[0], "Question: which?"])
    assert llm.complete(prompt).raw["kvboost"]["num_documents"] == 0
    assert prefetch(llm, NODES[:1], register=False) == 0
    assert prefetch(llm, NODES[:1]) == 1
    assert llm.complete(prompt).raw["kvboost"]["hits"] == {"encoded": 1}
    assert llm.complete(prompt).raw["kvboost"]["hits"] == {"approximate": 1}


def test_a_fault_does_not_stop_retrieval(llm: KVBoostLLM, caplog: pytest.LogCaptureFixture) -> None:
    post = KVPrefetchPostprocessor(llm=llm)
    llm.engine.store.prefetch = _fail  # type: ignore[method-assign]
    assert post.postprocess_nodes(NODES) == NODES
    assert "not announced" in caplog.text


def _fail(keys: Any) -> None:
    raise OSError("disk gone")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("hook", ["postprocessor", "retriever", "events"])
async def test_an_index_that_was_never_warmed_is_warm_at_the_second_question(
    llm: KVBoostLLM, hook: str, asynchronous: bool
) -> None:
    retriever: Any = VectorStoreIndex.from_documents(documents()).as_retriever(similarity_top_k=2)
    options: dict[str, Any] = {}
    handler = KVPrefetchEventHandler(llm=llm)
    if hook == "postprocessor":
        options["node_postprocessors"] = [KVPrefetchPostprocessor(llm=llm)]
    elif hook == "retriever":
        retriever = KVPrefetchRetriever(retriever, llm)
    else:
        get_dispatcher().add_event_handler(handler)
    try:
        engine = RetrieverQueryEngine.from_args(retriever, llm=llm, **options)
        for _ in range(2):
            await engine.aquery("Which store?") if asynchronous else engine.query("Which store?")
    finally:
        get_dispatcher().event_handlers[:] = [h for h in get_dispatcher().event_handlers if h is not handler]
    stats = llm.engine.stats()
    assert (len(llm.engine.store.catalog), stats.store_hits >= 2) == (2, True)


def test_hooks_can_be_pickled(make_llm: MakeLLM) -> None:
    post = KVPrefetchPostprocessor(llm=make_llm())
    again = pickle.loads(pickle.dumps(post))
    assert again.llm.engine is post.llm.engine
    assert post.llm.complete("Still there").text
