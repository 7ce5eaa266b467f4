"""How long prompt and answer may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvboost_rag.stores.budget import UNLIMITED, host_memory_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvboost_rag.config import GenerationParams
    from kvboost_rag.forward.probe import ProbeReport


class ContextOverflowError(ValueError):
    """The prompt leaves no room for an answer.

    Attributes:
        prompt_tokens, context_tokens: what was asked for and what the model takes.
    """

    def __init__(self, prompt_tokens: int, context_tokens: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and the model's context holds {context_tokens}, answer included: "
            "use fewer or shorter documents, or a model with a longer context"
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


def context_tokens(model: PreTrainedModel) -> int | None:
    """Tokens that prompt and answer may have together, or None where the model does not say: one whose frequencies
    stretch with the prompt (dynamic NTK) answers at any length.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {p.get("rope_type") for p in (rope, *rope.values()) if isinstance(p, dict)}
    if "dynamic" in kinds:
        return None
    limit = getattr(config, "max_position_embeddings", None)
    return int(limit) if limit and limit > 0 else None  # XLNet says -1


def reuse_limit(model: PreTrainedModel, report: ProbeReport) -> int | None:
    """Longest prompt, answer included, whose KV can be reused, or None."""
    limits = [n for n in (context_tokens(model), report.max_positions) if n is not None]
    return min(limits, default=None)


def answer_room(model: PreTrainedModel, prompt_tokens: int, params: GenerationParams) -> int:
    """Tokens that the answer may have.

    Raises:
        ContextOverflowError: none.
    """
    limit = context_tokens(model)
    if limit is None:
        return params.max_new_tokens
    if prompt_tokens >= limit:
        raise ContextOverflowError(prompt_tokens, limit)
    return min(params.max_new_tokens, limit - prompt_tokens)


BATCH_MEMORY_RATIO = 0.25
"""Of this machine's memory, for the buffers of all requests under way."""


def batch_tokens(report: ProbeReport) -> int:
    """Positions that the requests under way may have together, prompts and answers."""
    if report.layout is None:
        return UNLIMITED
    return int(host_memory_bytes() * BATCH_MEMORY_RATIO) // report.layout.bytes_per_token
