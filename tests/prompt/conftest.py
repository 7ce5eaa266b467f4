"""One tokenizer of each kind for all tests of this package."""

from collections.abc import Callable

import pytest
from tokenizer_kinds import BUILDERS

from kvboost_rag.prompt.tokens import PromptTokens


@pytest.fixture(scope="session")
def tokens_of() -> Callable[[str], PromptTokens]:
    built: dict[str, PromptTokens] = {}

    def get(name: str) -> PromptTokens:
        if name not in built:
            built[name] = PromptTokens(BUILDERS[name]())
        return built[name]

    return get
