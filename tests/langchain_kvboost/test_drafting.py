"""Tokens guessed ahead: fields, keywords of a call, and what a pipeline was made with."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_huggingface import HuggingFacePipeline
from transformers import pipeline

from kvboost_rag.config import ConfigError
from langchain_kvboost import ChatKVBoost, KVBoostLLM

TEXT = "The store holds keys and values. The store holds"


def accepted(message: Any) -> int:
    return message.response_metadata["kvboost"]["accepted_tokens"]


@pytest.fixture
def assistant(tiny_model: Any) -> Any:
    return tiny_model("llama", num_hidden_layers=4).model


def test_fields_and_keywords_of_a_call(chat: Any, assistant: Any) -> None:
    plain = chat(max_tokens=24, min_new_tokens=24)
    expected = plain.invoke(TEXT)
    assert accepted(expected) == 0
    by_field = chat(max_tokens=24, min_new_tokens=24, prompt_lookup_num_tokens=5)
    by_kwargs = chat(max_tokens=24, min_new_tokens=24, pipeline_kwargs={"prompt_lookup_num_tokens": 5})
    asked = [
        by_field.invoke(TEXT),
        by_kwargs.invoke(TEXT),
        plain.invoke(TEXT, prompt_lookup_num_tokens=5),
        plain.bind(prompt_lookup_num_tokens=5).invoke(TEXT),
    ]
    for message in asked:
        assert message.content == expected.content
        assert accepted(message) > 0
    for message in (plain.invoke(TEXT, assistant_model=assistant), chat(assistant_model=assistant).invoke(TEXT)):
        assert expected.content.startswith(message.content)
    assert accepted(by_field.invoke(TEXT, prompt_lookup_num_tokens=0)) == 0
    with pytest.raises(ConfigError, match="alternatives"):
        by_field.invoke(TEXT, assistant_model=assistant, prompt_lookup_num_tokens=3)


def test_a_form_is_kept_and_decoded_plainly(chat: Any) -> None:
    pytest.importorskip("llguidance")
    schema = {"title": "Yes", "type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    model = chat(max_tokens=24, min_new_tokens=0, prompt_lookup_num_tokens=5)
    message = model.with_structured_output(schema, method="json_schema", include_raw=True).invoke(TEXT)["raw"]
    assert message.content.startswith("{")
    assert accepted(message) == 0


def test_an_assistant_is_shared_named_and_never_pickled(chat: Any, assistant: Any) -> None:
    model = chat(assistant_model=assistant)
    assert copy.deepcopy(model).assistant_model is assistant
    assert len(json.dumps(model._identifying_params)) < 5_000
    assert "Linear" not in repr(model)
    again = pickle.loads(pickle.dumps(model))
    assert again.assistant_model is None
    assert again.invoke(TEXT).content == model.invoke(TEXT).content


def test_what_a_pipeline_drafts_with_is_taken_over(fresh: Any, assistant: Any) -> None:
    source = pipeline(
        "text-generation", model=fresh.model, tokenizer=fresh.tokenizer, assistant_model=assistant, max_new_tokens=24
    )
    expected = source(TEXT, do_sample=False, return_full_text=False)[0]["generated_text"]
    for made in (KVBoostLLM.from_pipeline(source), KVBoostLLM.from_pipeline(HuggingFacePipeline(pipeline=source))):
        assert made.pipeline_kwargs["assistant_model"] is assistant
        assert made.invoke(TEXT) == expected
    assert isinstance(ChatKVBoost.from_pipeline(source).invoke([HumanMessage(TEXT)]).content, str)
