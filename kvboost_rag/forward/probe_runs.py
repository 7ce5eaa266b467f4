"""Runs of a model on a short prompt, and what they are compared by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_rag.forward.not_reusable import NotReusable
from kvboost_rag.forward.row_check import relative_l2
from kvboost_rag.forward.row_forward import decoder_layers
from kvboost_rag.forward.tolerance import LARGEST, Tolerance
from kvboost_rag.kv.rope import RotarySource
from kvboost_rag.models import hf_cache
from kvboost_rag.models.unwrap import input_device

PROMPT_TOKENS = 23
"""Odd, so that nothing fits by accident."""


class TooFar(NotReusable):
    """Two runs differ by more than the tolerance."""


@dataclass(frozen=True)
class Runs:
    """What two runs of the prompt `ids` gave, at 0 and `shift` positions on: logits and KV, and KV."""

    ids: torch.Tensor
    shift: int
    base: tuple[torch.Tensor, list[hf_cache.LayerKV]]
    shifted: list[hf_cache.LayerKV]
    sources: list[RotarySource]


def with_noise(model: PreTrainedModel, runs: Runs, tolerance: Tolerance) -> Tolerance:
    """The tolerance with the model's own noise: embeddings are moved by what rounding moves angles by."""
    half = tolerance.floor == LARGEST
    size = torch.finfo(model.dtype if half else torch.float32).eps * (1 if half else runs.shift)
    generator = torch.Generator().manual_seed(11)

    def move(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        factors = 1 + size * torch.randn(output.shape, generator=generator)
        return (output.float() * factors.to(output.device)).to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(move)
    try:
        logits, layers = forward_at(model, runs.ids, 0)
    finally:
        handle.remove()
    pairs = list(zip(layers, runs.base[1], strict=True))
    keys = tuple(relative_l2(a, b) for (a, _), (b, _) in pairs)
    values = tuple(relative_l2(a, b) for (_, a), (_, b) in pairs)
    return tolerance.with_noise(values, keys, relative_l2(logits, runs.base[0]))


def difference(error: float, noise: float) -> str:
    own = f", the model's own noise is {noise:.2g}" if noise else ""
    return f"relative difference {error:.2g}{own}"


def probe_ids(model: PreTrainedModel) -> torch.Tensor:
    vocab = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(7)
    device = input_device(model)
    return torch.randint(vocab // 4, vocab, (PROMPT_TOKENS,), generator=generator).to(device)


@contextmanager
def rotary_calls(model: PreTrainedModel) -> Iterator[list[RotarySource]]:
    """Collects how the model calls its rotary modules while the context is open."""
    found: list[RotarySource] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            source = RotarySource.from_call(module, args, kwargs)
        except TypeError:
            return  # rotates something that is not text
        if not any(s.module is module and s.kwargs == source.kwargs for s in found):
            found.append(source)

    rotary = [m for m in model.modules() if "rotary" in type(m).__name__.lower()]
    handles = [m.register_forward_pre_hook(record, with_kwargs=True) for m in rotary]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def forward_at(model: PreTrainedModel, ids: torch.Tensor, start: int) -> tuple[torch.Tensor, list[hf_cache.LayerKV]]:
    positions = torch.arange(start, start + len(ids), device=ids.device)[None]
    cache = hf_cache.full_length_cache()
    kwargs: dict[str, Any] = {hf_cache.cache_argument(model): cache}
    output = model(input_ids=ids[None], position_ids=positions, use_cache=True, **kwargs)
    try:
        layers = hf_cache.layers_of(hf_cache.output_cache(output))
        count = len(decoder_layers(model))
    except ValueError as error:
        raise NotReusable(str(error)) from None
    if len(layers) != count:
        raise NotReusable(f"{count} decoder layers keep KV for {len(layers)} (shared or missing)")
    return output.logits[0, -1], layers
