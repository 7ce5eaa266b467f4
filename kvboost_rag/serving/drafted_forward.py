"""Assisted generation from a cache that is filled already.

transformers' own hands the whole prompt to the model with the first draft, whatever the cache holds; here that forward
takes only what is missing.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_rag.models.hf_cache import cache_argument, causal_output


def continuing(model: PreTrainedModel, prompt_pass: Callable[[], torch.Tensor] | None = None) -> PreTrainedModel:
    """The model for one call of assisted `generate`. Shares weights, modules and hooks with the model, in which
    nothing is changed.

    Args:
        prompt_pass: computes the prompt's missing rows and gives the logits after its last one, `[1, 1, vocab_size]`;
            None: all after the cache's length is missing.
    """
    name = cache_argument(model)
    shared, forward, begun = copy.copy(model), model.forward, False

    def first(kwargs: dict[str, Any]) -> Any:
        head = prompt_pass() if prompt_pass is not None else None
        cache, total = kwargs[name], kwargs["input_ids"].shape[1]
        num_missing = total - int(cache.get_seq_length())
        if head is not None and not num_missing:  # nothing was drafted
            return causal_output(head, cache)
        output = forward(**_last(kwargs, total, num_missing))
        if head is not None:
            output.logits = torch.cat([head, output.logits[:, -num_missing:]], dim=1)
        return output

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        if begun:
            return forward(*args, **kwargs)
        begun = True
        return first(kwargs)

    step.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    shared.forward = step
    return shared


def _last(kwargs: Mapping[str, Any], total: int, num_rows: int) -> dict[str, Any]:
    """Arguments of a forward for its last rows only: what has one entry a row is cut, masks over all are left."""
    per_row = ("input_ids", "position_ids", "cache_position", "token_type_ids")
    return {
        key: value[..., -num_rows:] if key in per_row and value is not None and value.shape[-1] == total else value
        for key, value in kwargs.items()
    }
