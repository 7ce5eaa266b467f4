"""Looking at what an engine would do with a prompt."""

from __future__ import annotations

from typing import Any

from kvboost_rag import KVBoost
from kvboost_rag.chunks.served import ServedPrompt


def located(engine: KVBoost, prompt: Any, **options: Any) -> ServedPrompt:
    """The prompt's ids and segments as `engine.generate(prompt, **options)` finds them."""
    parts = engine._parts
    return parts.variants.resting.server.locate(parts.requests.make(prompt, **options))
