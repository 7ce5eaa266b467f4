"""The tensors that a model computes with, as plain ones with stable names: quantised, packed and offloaded included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kvboost_rag.models.adapters import AdapterNames, active_in, is_adapter_layer

WRAPPERS = frozenset(("base_layer", "original_module"))
"""Names under which adapters keep the layer they stand in for: left out, so that adapters do not rename it."""
SELF_DESCRIBING = ("torch.", "transformers.", "transformers_modules.", "peft.", "accelerate.", "bitsandbytes.")
"""Modules from here keep nothing they compute with outside parameters and buffers, or are known below."""


class UnreadableWeights(ValueError):
    """Weights that cannot be looked at; the message says which and why."""


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model but those of adapters that are not active, `(name, plain tensor)`.

    Names do not depend on wrappers or on what an adapter is called. Offloaded weights are read from where they lie.

    Raises:
        UnreadableWeights: a weight that lies nowhere it can be read.
    """
    for name, tensor in _walk(model, ""):
        yield from _plain_parts(name, tensor)


def _walk(module: nn.Module, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    for own, tensor in _own_tensors(module):
        yield f"{name}.{own}", tensor
    layer: Any = module
    holders = (*layer.adapter_layer_names, *layer.other_param_names) if is_adapter_layer(module) else ()
    for child_name, child in module.named_children():
        below = name if child_name in WRAPPERS else f"{name}.{child_name}"
        if child_name in holders and hasattr(child, "keys"):
            yield from _held(child, below, active_in(module))
        else:
            yield from _walk(child, below)


def _held(holder: Any, name: str, active: AdapterNames) -> Iterator[tuple[str, torch.Tensor]]:
    """What a layer holds for its active adapters, by their place in the order."""
    for place, adapter in enumerate(active):
        if adapter not in holder:
            continue
        value = holder[adapter]
        if isinstance(value, nn.Module):
            yield from _walk(value, f"{name}.{place}")
        else:
            yield f"{name}.{place}", value


def registered(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a module alone, without what it writes itself: frequencies that follow the length of
    the prompt (`dynamic`, `longrope`) say nothing about the model.
    """
    kind = getattr(module, "rope_type", None)
    kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
    follows_length = bool(kinds & {"dynamic", "longrope"})
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and not (follows_length and "inv_freq" in name and "original" not in name):
            yield name, tensor


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers and what quantised modules keep beside them."""
    for name, tensor in registered(module):
        yield name, _present(module, name, tensor)
    if not type(module).__module__.startswith(SELF_DESCRIBING):
        for name, value in vars(module).items():
            for key, tensor in value.items() if isinstance(value, dict) else ((None, value),):
                if isinstance(tensor, torch.Tensor):
                    yield name if key is None else f"{name}.{key}", tensor
    state = getattr(module, "state", None)  # bitsandbytes moves the scales of 8-bit weights here at the first forward
    scales = getattr(state, "SCB", None)
    if isinstance(scales, torch.Tensor):
        yield "weight.SCB", scales


def _present(module: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; one that accelerate put elsewhere is fetched."""
    if tensor.device.type != "meta":
        return tensor
    hook: Any = getattr(module, "_hf_hook", None)
    for candidate in (hook, *getattr(hook, "hooks", ())):
        held = getattr(candidate, "weights_map", None)
        if held is not None:
            try:
                return held[name]
            except KeyError:
                continue
            except Exception as error:
                raise UnreadableWeights(f"{name} was offloaded and cannot be read: {error}") from error
    raise UnreadableWeights(f"the weight {name} of a {type(module).__name__} is on the meta device, without values")


def _plain_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A packed tensor is its parts and what describes them; one that is spread over ranks stays one."""
    if hasattr(tensor, "full_tensor"):
        yield name, tensor
        return
    if type(tensor) not in (torch.Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        parts, _ = tensor.__tensor_flatten__()
        for part in parts:
            yield from _plain_parts(f"{name}.{part}", getattr(tensor, part))
        return
    yield name, tensor
    scales = getattr(tensor, "SCB", None)
    if isinstance(scales, torch.Tensor):
        yield f"{name}.SCB", scales
    yield from _state_tensors(f"{name}.quant_state", getattr(tensor, "quant_state", None))


def _state_tensors(name: str, state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of bitsandbytes' 4-bit state, and of the state inside it."""
    if state is None:
        return
    for key, value in sorted(vars(state).items()):
        if isinstance(value, torch.Tensor):
            yield f"{name}.{key}", value
        elif type(value) is type(state):
            yield from _state_tensors(f"{name}.{key}", value)


def packing(model: nn.Module) -> Iterator[tuple[str, str]]:
    """How packed tensors are packed, `(name, description)`: the same bytes may mean other numbers."""
    for path, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            if (
                type(tensor) is not nn.Parameter
                and hasattr(tensor, "__tensor_flatten__")
                and not hasattr(tensor, "full_tensor")
            ):
                parts, context = tensor.__tensor_flatten__()
                yield f"{path}.{name}", f"{type(tensor).__qualname__} {parts} {context}"
