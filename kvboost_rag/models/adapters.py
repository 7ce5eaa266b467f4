"""Adapters (peft's LoRA and its kin) on a model: which are active, with what scaling, and switching them for a while.

Adapters live in layers of their own inside the model, whoever put them there: peft (`get_peft_model`, `load_adapter`,
`inject_adapter_in_model`) or transformers (`add_adapter`, `load_adapter`). We look at those layers alone, so that it
does not matter through which object they were set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

AdapterNames = tuple[str, ...]

SCALARS = ("scaling", "r", "lora_alpha", "use_dora", "use_rslora", "kasa", "alpha")
"""Attributes of an adapter layer that hold a number for each adapter, besides those it lists itself."""


class AdapterError(ValueError):
    """An adapter that is asked for and cannot be had; the message names those there are."""


def is_adapter_layer(module: nn.Module) -> bool:
    """Whether `module` holds adapters: peft's tuner layers, and its copies of whole modules and tokens."""
    kind = type(module)
    return hasattr(kind, "adapter_layer_names") and hasattr(kind, "active_adapters")


def adapter_layers(model: nn.Module) -> list[nn.Module]:
    """All of them, in the model's order."""
    return [module for module in model.modules() if is_adapter_layer(module)]


def names_in(layer: Any) -> set[str]:
    """Names of the adapters that a layer holds."""
    found: set[str] = set()
    for attribute in (*layer.adapter_layer_names, *layer.other_param_names):
        held: Any = getattr(layer, attribute, None)
        if hasattr(held, "keys"):
            found.update(held.keys())
    return found


def available_adapters(model: nn.Module) -> tuple[str, ...]:
    """Names of all adapters of a model, sorted."""
    return tuple(sorted({name for layer in adapter_layers(model) for name in names_in(layer)}))


def active_in(layer: Any) -> AdapterNames:
    """Adapters that take part in a layer's forward, in order; none where they are disabled."""
    if layer.disable_adapters:
        return ()
    held = names_in(layer)
    return tuple(name for name in layer.active_adapters if name in held)


def layer_state(layer: Any) -> tuple[Any, ...]:
    """What a layer computes besides its tensors: (active adapters, their numbers, merged adapters). Hashable, cheap."""
    active = active_in(layer)
    numbers = []
    for attribute in (*SCALARS, *layer.other_param_names):
        held = getattr(layer, attribute, None)
        if isinstance(held, dict):
            numbers += [(attribute, i, _plain(held[name])) for i, name in enumerate(active) if name in held]
    return active, tuple(numbers), tuple(layer.merged_adapters)


def _plain(value: Any) -> Any:
    """A number as it is; a tensor's numbers (its layer may keep it outside its parameters); of the rest the type."""
    if isinstance(value, torch.Tensor):
        return tuple(value.detach().flatten().tolist())
    return value if isinstance(value, (int, float, bool, str, type(None))) else type(value).__qualname__


def resting_adapters(model: nn.Module) -> AdapterNames:
    """The adapters that are active somewhere in the model, in the order met."""
    return tuple(dict.fromkeys(name for layer in adapter_layers(model) for name in active_in(layer)))


@contextmanager
def with_adapters(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Exactly these adapters are active while the context is open; then everything is as it was.

    Raises:
        AdapterError: the model has no adapter of a name, or cannot use these together.
    """
    layers = adapter_layers(model)
    known = {name for layer in layers for name in names_in(layer)}
    if missing := [name for name in names if name not in known]:
        there = f"it has {', '.join(sorted(known))}" if known else "it has none; load it first (peft's load_adapter)"
        raise AdapterError(f"the model has no adapter {', '.join(missing)}: {there}")
    before = [(layer, list(layer.active_adapters), bool(layer.disable_adapters)) for layer in layers]  # type: ignore[arg-type]
    # peft switches gradients on and off with the adapter, which would stop a training that goes on in between.
    gradients = [(p, p.requires_grad) for layer in layers for p in layer.parameters()]
    try:
        for layer in layers:
            _switch(layer, [name for name in names if name in names_in(layer)], disabled=False)
        yield
    finally:
        for layer, active, disabled in before:
            _switch(layer, active, disabled)
        for parameter, wanted in gradients:
            if parameter.is_floating_point():
                parameter.requires_grad_(wanted)


def _switch(layer: Any, names: list[str], disabled: bool) -> None:
    if list(layer.active_adapters) != names:
        try:
            layer.set_adapter(names)
        except ValueError as error:
            raise AdapterError(f"the adapters {', '.join(names)} cannot be active together: {error}") from error
    if bool(layer.disable_adapters) != disabled:
        layer.enable_adapters(not disabled)
