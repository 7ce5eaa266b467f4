"""One tiny engine for all tests that need any model; shared engines are closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvboost_rag.adapters.registry import close_all

Make = Callable[..., Any]


@pytest.fixture(scope="session")
def tiny(tiny_model: Any) -> Any:
    """Model and tokenizer; every class made from them shares one engine."""
    return tiny_model("llama")


@pytest.fixture
def fresh(tiny_model: Any) -> Any:
    """The same model as another object: an engine and a store of its own."""
    return tiny_model("llama")


@pytest.fixture(scope="session", autouse=True)
def _close_engines() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture
def chat(fresh: Any) -> Make:
    """`chat(**fields)`: a ChatKVBoost on the fresh tiny model, eight tokens an answer."""
    from langchain_kvboost import ChatKVBoost

    def make(**fields: Any) -> Any:
        defaults: dict[str, Any] = {"max_tokens": 8, "min_new_tokens": 8}
        return ChatKVBoost(**({"model": fresh.model, "tokenizer": fresh.tokenizer} | defaults | fields))

    return make


@pytest.fixture
def llm(fresh: Any) -> Make:
    """`llm(**fields)`: a KVBoostLLM on the fresh tiny model, eight tokens an answer."""
    from langchain_kvboost import KVBoostLLM

    def make(**fields: Any) -> Any:
        defaults: dict[str, Any] = {"max_tokens": 8, "min_new_tokens": 8}
        return KVBoostLLM(**({"model": fresh.model, "tokenizer": fresh.tokenizer} | defaults | fields))

    return make


@pytest.fixture
def saying(fresh: Any) -> Make:
    """`saying(text)`: keywords of a call that make the model answer `text`, by allowing one token a step."""
    tokenizer = fresh.tokenizer

    def make(text: str) -> dict[str, Any]:
        script = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        start: list[int] = []

        def allowed(batch: int, input_ids: Any) -> list[int]:
            if not start:
                start.append(len(input_ids))
            return [script[min(len(input_ids) - start[0], len(script) - 1)]]

        return {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": len(script) + 1, "min_new_tokens": 1}

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is the model's own choice in these tests, a model of 135 million parameters does not make."""
    for item in items:
        if "TestChatIntegration::test_agent_loop" in item.nodeid:
            item.add_marker(pytest.mark.xfail(reason="the bundled model calls no tool of its own accord", strict=True))
        if "TestChatIntegration::test_unicode_tool_call" in item.nodeid:
            reason = "the bundled model cannot copy Japanese (its calls are in form), and takes minutes over it"
            item.add_marker(pytest.mark.xfail(reason=reason, run=False))
