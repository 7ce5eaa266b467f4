"""Prompts that write documents in all sorts of forms: the answer is that of LangChain's own class on the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from corpus_texts import document
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
from transformers import pipeline

from kvboost_rag import KVBoost
from langchain_kvboost import ChatKVBoost, KVBoostWarmer

TEXTS = [document(n, 4) for n in range(3)]
DECODING: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
PROMPT = ChatPromptTemplate.from_messages([("system", "Be {how}."), ("human", "{context}\nWhich store?")]).partial(
    how="kind"
)
FORMS: dict[str, Callable[[Sequence[str]], str]] = {
    "xml": lambda texts: "".join(
        f'<document index="{n}"><source>s{n}</source>{t}</document>' for n, t in enumerate(texts)
    ),
    "numbered": lambda texts: "\n".join(f"{n}. {t}" for n, t in enumerate(texts, 1)),
    "markdown": lambda texts: "\n\n".join(f"## Source {n}\n\n> {t}\n\n---" for n, t in enumerate(texts)),
    "fenced": lambda texts: "\n".join(f"```\n{t}\n```" for t in texts),
    "CRLF": "\r\n\r\n".join,
    "glued": "".join,
    "twice": lambda texts: "\n\n".join([*texts, *texts]),
}


@pytest.fixture
def engine(tiny_model: Any) -> Iterator[KVBoost]:
    with KVBoost(tiny_model("llama"), profile=None) as made:
        KVBoostWarmer(made).transform_documents([Document(text) for text in TEXTS])
        yield made


def _stock(engine: KVBoost) -> Any:
    # The class takes some of its settings from the pipeline and some from the call.
    settings = DECODING | {"return_full_text": False}
    pipe = pipeline("text-generation", model=engine.model, tokenizer=engine.tokenizer, **settings)
    return ChatHuggingFace(llm=HuggingFacePipeline(pipeline=pipe, pipeline_kwargs=settings), tokenizer=engine.tokenizer)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_answers_are_those_of_the_stock_class(engine: KVBoost, form: Callable[[Sequence[str]], str]) -> None:
    given = {"context": form(TEXTS)}
    expected = (PROMPT | _stock(engine)).invoke(given).text
    for settings in ({"reuse": "off"}, {"reuse": "exact"}, {"reuse": "exact"}, {"repair": "full"}):
        answer = (PROMPT | ChatKVBoost(model=engine, strict=True, **DECODING, **settings)).invoke(given)
        assert answer.text == expected, settings
        reused = answer.response_metadata["kvboost"]
        assert reused["fallback_reason"] is None
    assert reused["hits"] == {"approximate": form(TEXTS).count(TEXTS[0]) * len(TEXTS)}
