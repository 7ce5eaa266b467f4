"""Answers of a given form, from models that would never write it of their own."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("llguidance")

from kvboost_rag import GenerationParams, KVBoost
from kvboost_rag.adapters import constrained
from kvboost_rag.adapters.tool_calls import parse_tool_calls
from kvboost_rag.config import ConfigError

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Lima"]},
        "year": {"type": "integer", "minimum": 1900, "maximum": 1999},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "year", "tags"],
    "additionalProperties": False,
}


def answer(engine: KVBoost, form: constrained.Form, tokens: int = 80, **options: Any) -> str:
    limit = constrained.processor(form, engine.tokenizer)
    params = GenerationParams(max_new_tokens=tokens, extra={"logits_processor": [limit]}, **options)
    return engine.generate("The city and the year: ", params=params, strict=True).text


@pytest.fixture
def engine(tiny_model: Any) -> Any:
    with KVBoost(tiny_model("llama")) as engine:
        yield engine


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_random_model_writes_json_of_a_schema(engine: KVBoost, seed: int | None) -> None:
    sampling = {} if seed is None else {"do_sample": True, "temperature": 1.0, "seed": seed}
    written = json.loads(answer(engine, constrained.json_schema(SCHEMA), **sampling))
    assert written["city"] in ("Oslo", "Lima")
    assert 1900 <= written["year"] <= 1999
    assert len(written["tags"]) <= 2


def test_a_pattern(engine: KVBoost) -> None:
    assert re.fullmatch("(yes|no), [0-9]{3}", answer(engine, constrained.regex("(yes|no), [0-9]{3}")))


def test_a_call_of_one_of_two_tools_is_read_as_one(engine: KVBoost) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {**SCHEMA, "title": name}}}
        for name in ("find", "book")
    ]
    parsed = parse_tool_calls(answer(engine, constrained.tool_call(tools), 120), ["find", "book"])
    (call,) = parsed.calls
    assert call.name in ("find", "book")
    assert call.arguments["city"] in ("Oslo", "Lima")
    assert not parsed.text.strip()


def test_two_requests_do_not_share_where_they_are(engine: KVBoost) -> None:
    form = constrained.json_schema(SCHEMA)
    assert answer(engine, form) == answer(engine, form)


def test_an_answer_that_is_cut_off_is_a_beginning(engine: KVBoost) -> None:
    whole = answer(engine, constrained.json_schema(SCHEMA))
    assert whole.startswith(answer(engine, constrained.json_schema(SCHEMA), tokens=3))


def test_openais_response_formats() -> None:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    assert constrained.of_response_format(named) == constrained.json_schema(SCHEMA)
    assert constrained.of_response_format({"type": "json_object"}) == constrained.json_object()
    assert constrained.of_response_format({"type": "text"}) is constrained.of_response_format(None) is None
    for wrong in (
        {"type": "xml"},
        {"type": "json_schema"},
        "json",
        {"type": "json_schema", "json_schema": {"name": "x"}},
    ):
        with pytest.raises(ConfigError, match="response_format"):
            constrained.of_response_format(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lambda: constrained.regex("(?=a)b"), lambda: constrained.json_schema({"type": 5})])
def test_what_cannot_be_enforced_is_said_before_anything_runs(make: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be enforced"):
        make()


def test_without_the_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"kvboost-rag\[structured\]"):
        constrained.json_object()


def test_an_answer_in_form_or_a_call_instead(engine: KVBoost) -> None:
    """What an agent with tools and a response format needs: both, and nothing else."""
    tools = [{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}]
    place = {"$defs": {"Town": {"enum": ["Oslo"]}}, "type": "object", "properties": {"town": {"$ref": "#/$defs/Town"}}}
    place |= {"required": ["town"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": place}}
    form = constrained.of_response_format(wanted, tools)
    call = '{"name": "find", "arguments": {"city": "Oslo", "year": 1999, "tags": []}}'
    for text, fits in ((call, True), ('{"town": "Oslo"}', True), ('{"town": "Rome"}', False), ("Hello", False)):
        assert follows(engine, form, text) is fits, text
    assert not follows(engine, constrained.of_response_format(wanted), call)


def follows(engine: KVBoost, form: Any, text: str) -> bool:
    """Whether a form lets every token of a text pass."""
    import torch

    ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    limit = constrained.processor(form, engine.tokenizer)
    start = torch.tensor([[1]])
    for token in ids:
        scores = limit(start, torch.zeros(1, len(engine.tokenizer)))
        if scores[0, token] == -float("inf"):
            return False
        start = torch.cat([start, torch.tensor([[token]])], 1)
    return True
