"""From what people wrap models in to the model itself, or the reason why KV cannot be reused through the wrapper."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

DYNAMIC_ADAPTERS = frozenset(("XLORA", "POLY"))
"""Adapters that are mixed anew for each prompt: KV of a chunk would depend on what the whole prompt is."""


def unwrap(model: Any) -> Any:
    """The transformers model inside `torch.compile(model)`, `DataParallel`, `DistributedDataParallel` and `PeftModel`.

    What a wrapper adds is not lost: adapters live in the model's own layers, one device serves one prompt, and
    `model.compile()` (in place, no wrapper) stays as it is. A `PeftModel` whose adapter is not in the layers (learned
    prompts, mixtures) is returned as it is; `wrapper_refusal` then says why it cannot be reused.
    """
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            logger.info("torch.compile's wrapper is set aside: use model.compile(), which keeps the model itself")
            model = model._orig_mod
        elif _is_peft_model(model) and wrapper_refusal(model) is None:
            model = model.get_base_model()
        else:
            return model


def wrapper_refusal(model: Any) -> str | None:
    """Why KV cannot be reused through this wrapper, or None for a model or a wrapper that `unwrap` removes."""
    if not _is_peft_model(model):
        return None
    kinds = dict(model.peft_config)
    if prompts := sorted(name for name, c in kinds.items() if c.is_prompt_learning):
        return f"its adapter {', '.join(prompts)} puts learned tokens in front of every prompt"
    if mixed := sorted(str(c.peft_type) for c in kinds.values() if str(c.peft_type).split(".")[-1] in DYNAMIC_ADAPTERS):
        return f"its adapters are mixed anew for each prompt ({', '.join(mixed)})"
    return None


def _is_peft_model(model: Any) -> bool:
    """Without importing peft, which may not be installed."""
    return any(
        t.__name__ in ("PeftModel", "PeftMixedModel") and t.__module__.startswith("peft.") for t in type(model).__mro__
    )


def input_device(model: Any) -> torch.device:
    """Where a model expects token ids: its embedding's device, or the one that accelerate brings it to."""
    embedding = model.get_input_embeddings()
    device: torch.device = embedding.weight.device
    if device.type != "meta":
        return device
    hook = getattr(embedding, "_hf_hook", None)
    for candidate in (hook, *getattr(hook, "hooks", ())):
        found = getattr(candidate, "execution_device", None)
        if found is not None:
            return torch.device("cuda", found) if isinstance(found, int) else torch.device(found)
    return torch.device("cpu")
