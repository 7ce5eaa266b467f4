"""LangChain and LlamaIndex fill the store with our classes and ask vLLM's server with their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_kvboost.conftest import document
from tests.vllm_kvboost.server_process import running_server
from vllm_kvboost import cache_salt

pytest.importorskip("langchain_openai")
pytest.importorskip("llama_index.llms.openai_like")

FROM_LANGCHAIN, FROM_LLAMA_INDEX = [document(n) for n in range(3)], [document(n) for n in range(3, 6)]
QUESTION = "What does the keeper say?"


@pytest.fixture(scope="module")
def store(vllm_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents 0 to 2 indexed by LangChain's vector store, 3 to 5 by a LlamaIndex pipeline."""
    from langchain_core.documents import Document
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.vectorstores import InMemoryVectorStore
    from llama_index.core.ingestion import IngestionPipeline
    from llama_index.core.schema import TextNode
    from llama_index.llms.kvboost import KVBoostLLM, KVWarm

    from langchain_kvboost import ChatKVBoost, KVBoostVectorStore

    folder = tmp_path_factory.mktemp("frameworks")
    chat = ChatKVBoost(model=vllm_model, store=str(folder), dtype="float32")
    wrapped = KVBoostVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=8)), chat, name="docs")
    wrapped.add_documents([Document(text) for text in FROM_LANGCHAIN])
    llm = KVBoostLLM(model_name=vllm_model, tokenizer_name=vllm_model, store=str(folder), dtype="float32")
    nodes = [TextNode(text=text) for text in FROM_LLAMA_INDEX]
    IngestionPipeline(transformations=[KVWarm(llm=llm)], disable_cache=True).run(nodes=nodes)
    return folder


@pytest.fixture(scope="module")
def address(vllm_model: str, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server(vllm_model, store, tmp_path_factory.mktemp("log") / "server.log") as address:
        yield f"{address}/v1"


def num_tokens(model: str, texts: list[str]) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return sum(len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts)


@pytest.mark.parametrize("texts", [FROM_LANGCHAIN, FROM_LLAMA_INDEX, [FROM_LLAMA_INDEX[2], FROM_LANGCHAIN[1]]])
def test_a_langchain_chain_over_the_server(address: str, vllm_model: str, texts: list[str]) -> None:
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI

    prompt = ChatPromptTemplate([("human", "{context}\n\n{question}")])
    asked = {"context": "\n\n".join(texts), "question": QUESTION}

    def ask(salt: str) -> Any:
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "extra_body": {"cache_salt": salt}}
        answer = (prompt | ChatOpenAI(model="m", base_url=address, api_key="none", **options)).invoke(asked)
        return answer.content, answer.usage_metadata["input_token_details"].get("cache_read", 0)

    full, cached = ask("exact")
    assert cached == 0
    blend, cached = ask(cache_salt())
    assert cached >= 0.9 * num_tokens(vllm_model, texts)
    assert full
    assert blend


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completions"])
def test_a_llama_index_engine_over_the_server(address: str, vllm_model: str, is_chat: bool) -> None:
    from llama_index.core.response_synthesizers import get_response_synthesizer
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.llms.openai_like import OpenAILike

    seen: list[Any] = []
    llm = OpenAILike(
        model="m",
        api_base=address,
        api_key="none",
        is_chat_model=is_chat,
        context_window=4096,
        max_tokens=6,
        temperature=0,
        additional_kwargs={"extra_body": {"cache_salt": cache_salt()}},
    )
    ask = type(llm).chat if is_chat else type(llm).complete

    def listen(*args: Any, **kwargs: Any) -> Any:
        seen.append(ask(llm, *args, **kwargs))
        return seen[-1]

    object.__setattr__(llm, "chat" if is_chat else "complete", listen)
    texts = [FROM_LLAMA_INDEX[1], FROM_LANGCHAIN[2]]
    nodes = [NodeWithScore(node=TextNode(text=text), score=1.0) for text in texts]
    answer = get_response_synthesizer(llm=llm, response_mode="compact").synthesize(QUESTION, nodes)
    assert str(answer)
    usage = seen[-1].raw.usage
    assert usage.prompt_tokens_details.cached_tokens >= 0.9 * num_tokens(vllm_model, texts)
