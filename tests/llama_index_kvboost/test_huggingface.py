"""Programs written for HuggingFaceLLM, and what goes wrong with it.

The faults of llama-index-llms-huggingface 0.8.0 that have tests elsewhere: call parameters and `raw` (test_llm), a
blocked event loop and hanging streams (test_async), pickling, copies, dictionaries (test_serialization).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.kvboost import KVBoostLLM
from llama_index_kvboost.helpers import TEXTS, USER, MakeLLM, WordEmbedding, documents, own_settings
from tokenizers import processors

from kvboost_rag import KVBoost
from kvboost_rag.adapters.registry import close_all
from kvboost_rag.models.load import load_model


class PromptIds:
    """A logits processor that keeps the token ids of the prompt."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.ids = self.ids or input_ids[0].tolist()
        return scores


@pytest.fixture
def bos_llm(tiny_loaded: Any, make_llm: MakeLLM) -> Iterator[KVBoostLLM]:
    """A tokenizer that puts BOS before each text, and a chat template that writes it too."""
    tokenizer = copy.deepcopy(tiny_loaded.tokenizer)
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    with KVBoost(load_model(tiny_loaded.model, tokenizer=tokenizer)) as engine:
        assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
        yield make_llm(engine=engine)


def test_prompts_begin_with_one_bos(bos_llm: KVBoostLLM) -> None:
    for call in (
        lambda **k: bos_llm.chat(USER, **k),
        lambda **k: list(bos_llm.stream_chat(USER, **k)),
        lambda **k: bos_llm.complete(bos_llm.messages_to_prompt(USER), formatted=True, **k),
        lambda **k: bos_llm.complete("Which store is full?", **k),
    ):
        seen = PromptIds()
        call(logits_processor=[seen], max_new_tokens=1)
        assert seen.ids.count(bos_llm.engine.tokenizer.bos_token_id) == 1
        assert seen.ids[0] == bos_llm.engine.tokenizer.bos_token_id


async def test_completion_to_prompt_holds_in_streams_too(make_llm: MakeLLM) -> None:
    plain = make_llm()
    llm = make_llm(engine=plain.engine, completion_to_prompt=lambda text: f"User: {text}\nAssistant:")
    expected = plain.complete("User: Hi\nAssistant:").text
    assert llm.complete("Hi").text == expected
    assert list(llm.stream_complete("Hi"))[-1].text == expected
    assert (await llm.acomplete("Hi")).text == expected
    assert [r async for r in await llm.astream_complete("Hi")][-1].text == expected


def program(llm_class: Any, model: str) -> list[str]:
    """What people write for HuggingFaceLLM; only the class differs."""
    llm = llm_class(
        context_window=2048,
        max_new_tokens=8,
        model_name=model,
        tokenizer_name=model,
        device_map="cpu",
        tokenizer_kwargs={"max_length": 2048},
        model_kwargs={"torch_dtype": "float32"},
        generate_kwargs={"do_sample": False, "repetition_penalty": 1.2},
        system_prompt="Answer from the documents.",
        query_wrapper_prompt=PromptTemplate("<|im_start|>user\n{query_str}<|im_end|>\n<|im_start|>assistant\n"),
        stopping_ids=[5, 6],
        tokenizer_outputs_to_remove=["token_type_ids"],
        is_chat_model=False,
    )
    Settings.llm = llm
    Settings.embed_model = WordEmbedding()
    index = VectorStoreIndex.from_documents(documents())
    answers = [
        llm.complete("Which store is full?", formatted=True).text,
        "".join(r.delta for r in llm.stream_complete("Which store is full?", formatted=True)),
        llm.chat([ChatMessage(role="user", content="Which store is full?")]).message.content,
        str(index.as_query_engine(similarity_top_k=1).query(TEXTS[1])),  # one that is nearest without a tie
        "".join(index.as_query_engine(similarity_top_k=1, streaming=True).query(TEXTS[1]).response_gen),
    ]
    assert llm.metadata.context_window == 2048
    assert llm.metadata.num_output == 8
    return answers


@pytest.fixture
def saved(tiny_loaded: Any, tmp_path: Path) -> Iterator[str]:
    tiny_loaded.model.save_pretrained(tmp_path)
    tiny_loaded.tokenizer.save_pretrained(tmp_path)
    with own_settings() as settings:
        settings.tokenizer = lambda text: tiny_loaded.tokenizer(text)["input_ids"]
        yield str(tmp_path)
    close_all()


def test_a_program_for_the_other_class_runs_unchanged(saved: str) -> None:
    answers = program(KVBoostLLM, saved)
    assert all(answers)
    assert answers[0] == answers[1]
    assert answers[3] == answers[4]


def test_it_gives_the_same_answers_as_with_the_other_class(saved: str) -> None:
    peer = pytest.importorskip("llama_index.llms.huggingface")
    assert program(KVBoostLLM, saved) == program(peer.HuggingFaceLLM, saved)
