"""Notices, before each request, that a live model computes something else than before.

Looked at each time, in about five microseconds a tensor: the objects that are the parameters and buffers, torch's
version counters (they count in-place edits, `load_state_dict`, optimizer steps), places in memory, a few sampled values
of each (edits through `.data` are not counted), and which adapters are active, with what scaling. Nothing is read whole
unless one of these changed. What slips through, a few values changed through `.data`, needs `KVBoost.refresh`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvboost_rag.models.adapters import is_adapter_layer, layer_state
from kvboost_rag.models.digest import TensorMark, WeightDigests
from kvboost_rag.models.fingerprint import model_fingerprint, unknown_fingerprint
from kvboost_rag.models.tensors import UnreadableWeights, registered

SAMPLES = 16
"""Values of each tensor that are compared."""
MAX_STATES = 64
"""Combinations of adapters whose fingerprint is remembered."""


@dataclass(frozen=True)
class ModelState:
    """What a model computes.

    Attributes:
        fingerprint: of model and tokenizer.
        reason: why its KV cannot be kept, None if it can.
        weights: counts changes of the weights themselves; 0 until the first.
    """

    fingerprint: str
    reason: str | None
    weights: int


@dataclass(frozen=True)
class _Glance:
    """What a look at a model shows: adapters, tensors, and sampled values by dtype and device."""

    adapters: tuple[Hashable, ...]
    tensors: tuple[tuple[int, TensorMark], ...]
    samples: tuple[bytes, ...]


class ModelWatch:
    """Knows the fingerprint of a model as it is now. Not thread-safe: asked in the engine's worker.

    Args:
        digests: of weights that nobody could change since they were read; None: everything is read.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, digests: WeightDigests | None = None
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._digests = digests or WeightDigests()
        self._seen: _Glance | None = None
        self._changes = 0
        self._states: dict[Hashable, ModelState] = {}

    def state(self) -> ModelState:
        """The state the model is in. Costs a glance where it did not change, and reading what changed where it did."""
        glance = look_at(self.model)
        if self._seen is not None and (glance.tensors, glance.samples) != (self._seen.tensors, self._seen.samples):
            self._weights_changed(glance, self._seen)
        self._seen = glance
        known = self._states.get(glance.adapters)
        if known is None:
            while len(self._states) >= MAX_STATES:
                del self._states[next(iter(self._states))]
            known = self._states[glance.adapters] = self._read()
        return known

    def refresh(self) -> ModelState:
        """As `state`, after reading everything again."""
        self._forget()
        self._seen = None
        return self.state()

    def _weights_changed(self, now: _Glance, before: _Glance) -> None:
        if now.samples != before.samples and now.tensors == before.tensors:
            self._digests.forget()  # the marks did not show which
        self._forget_states()

    def _forget(self) -> None:
        self._digests.forget()
        self._forget_states()

    def _forget_states(self) -> None:
        self._states.clear()
        self._changes += 1

    def _read(self) -> ModelState:
        try:
            fingerprint, reason = model_fingerprint(self.model, self.tokenizer, self._digests), None
        except UnreadableWeights as error:
            fingerprint, reason = unknown_fingerprint(), str(error)
        return ModelState(fingerprint, reason, self._changes)


@torch.no_grad()
def look_at(model: nn.Module) -> _Glance:
    """A glance at every adapter and tensor of a model."""
    adapters: list[Hashable] = []
    tensors: list[tuple[int, TensorMark]] = []
    samples: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for module in model.modules():
        if is_adapter_layer(module):
            adapters.append(layer_state(module))
        for _, tensor in registered(module):
            if tensor.device.type == "meta":  # offloaded: another object after each forward
                continue
            tensors.append((id(tensor), TensorMark.of(tensor)))
            if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.numel() and tensor.is_contiguous():
                step = max(1, tensor.numel() // SAMPLES)
                some = tensor.as_strided((min(SAMPLES, tensor.numel()),), (step,))
                samples.setdefault((tensor.dtype, tensor.device), []).append(some)
    values = tuple(torch.cat(group).view(torch.uint8).cpu().numpy().tobytes() for group in samples.values())
    return _Glance(tuple(adapters), tuple(tensors), values)
