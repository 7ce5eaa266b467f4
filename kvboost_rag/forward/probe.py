"""Decides by running a model whether its KV can be reused at other positions, and how its keys are rotated.

The same short prompt runs at positions 0…n and p…p+n. Values must agree for every layer, and the keys of one run must
be a rotation of the other's, by angles of the model's own rotary module. Then a partial forward from exact KV must
give the plain forward's logits. Whatever cannot be shown is refused with the reason; such models still generate.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvboost_rag.forward.not_reusable import NotReusable
from kvboost_rag.forward.rope_range import constant_range, context_lengths
from kvboost_rag.forward.row_check import partial_forward_error, relative_l2
from kvboost_rag.forward.row_forward import decoder_layers
from kvboost_rag.kv.buffer import KVLayout, LayerGroup
from kvboost_rag.kv.rope import Pairing, RotarySource, Rotation
from kvboost_rag.models import hf_cache
from kvboost_rag.models.unwrap import input_device, wrapper_refusal

PROMPT_TOKENS = 23
"""Odd, so that nothing fits by accident."""


@dataclass(frozen=True)
class Tolerance:
    """Largest relative L2 distances that rounding explains, by dtype."""

    values: float
    keys: float
    logits: float

    @staticmethod
    def of(dtype: torch.dtype) -> Tolerance:
        if dtype in (torch.float32, torch.float64):
            return Tolerance(values=1e-3, keys=1e-3, logits=1e-3)
        return Tolerance(values=0.15, keys=0.15, logits=0.15)


@dataclass(frozen=True)
class ProbeReport:
    """What the probe found.

    Attributes:
        reusable: whether chunk KV can be reused.
        reason: why not, as one sentence; None if reusable.
        layout: shapes, groups and rotation of the model's KV; None if it keeps none.
        max_positions: prompts up to this length can be reused (smaller than the context length for models whose
            RoPE changes with length); None = as long as the model allows.
        value_error, key_error, logit_error: largest relative L2 distances seen.
    """

    reusable: bool
    reason: str | None
    layout: KVLayout | None = None
    max_positions: int | None = None
    value_error: float = 0.0
    key_error: float = 0.0
    logit_error: float = 0.0

    @property
    def require_layout(self) -> KVLayout:
        if self.layout is None:
            raise ValueError(self.reason)
        return self.layout


_REPORTS: WeakKeyDictionary[PreTrainedModel, ProbeReport] = WeakKeyDictionary()


def probe(model: PreTrainedModel) -> ProbeReport:
    """Probe a loaded model. Costs six forwards of 23 tokens or fewer; remembered per model object."""
    if model not in _REPORTS:
        _REPORTS[model] = _probe(model)
    return _REPORTS[model]


def forget_probe(model: PreTrainedModel) -> None:
    """Probe the model again when it is next asked for: its weights or layers were changed."""
    _REPORTS.pop(model, None)


@torch.no_grad()
def _probe(model: PreTrainedModel) -> ProbeReport:
    try:
        _refuse_by_architecture(model)
        return _measure(model)
    except NotReusable as reason:
        return ProbeReport(False, str(reason))
    except Exception as error:  # a model that cannot even be probed must still be served
        return ProbeReport(False, f"the probe failed: {type(error).__name__}: {error}")


def _refuse_by_architecture(model: PreTrainedModel) -> None:
    """What no short run can show, or shows only as an obscure error."""
    if refusal := wrapper_refusal(model):
        raise NotReusable(refusal)
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise NotReusable("it is an encoder-decoder model")
    types = set(getattr(config, "layer_types", None) or ())
    if other := {t for t in types if "attention" not in t or "linear" in t}:
        raise NotReusable(f"it has layers that are not attention ({', '.join(sorted(other))})")
    if sparse := {t for t in types if "indexed" in t or "compressed" in t}:  # DeepSeek's V3.2 and V4, and their kin
        raise NotReusable(f"it has layers that cache more than keys and values ({', '.join(sorted(sparse))})")
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        raise NotReusable("it uses ALiBi position biases")
    names = inspect.signature(model.forward).parameters
    if "position_ids" not in names:
        raise NotReusable("its forward takes no position_ids (absolute positions, ALiBi or no attention)")
    try:
        hf_cache.cache_argument(model)
    except ValueError as error:
        raise NotReusable(str(error)) from None


def _measure(model: PreTrainedModel) -> ProbeReport:
    tolerance = Tolerance.of(model.dtype)
    ids = _probe_ids(model)
    limit = min(context_lengths(model))
    shift = min(1013, max(1, limit - len(ids)))
    with _rotary_calls(model) as sources:
        logits, base = _forward(model, ids, 0)
    shifted = _forward(model, ids, shift)[1]
    exchanged = [_are_exchanged(*pair, tolerance) for pair in zip(base, shifted, strict=True)]
    ours, moved = _ordered(base, exchanged), _ordered(shifted, exchanged)
    value_error = _check_values(ours, moved, tolerance)
    rotations, key_error = _find_rotations(sources, ours, moved, shift, tolerance)
    layout = _layout(ours, rotations, exchanged, model.dtype)
    logit_error = partial_forward_error(model, layout, ids, (logits, base))
    if not logit_error <= tolerance.logits:
        raise NotReusable(
            f"a partial forward does not give the full one's logits (relative difference {logit_error:.2g})"
        )
    max_positions = constant_range(model, rotations)
    return ProbeReport(True, None, layout, max_positions, value_error, key_error, logit_error)


def _probe_ids(model: PreTrainedModel) -> torch.Tensor:
    vocab = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(7)
    device = input_device(model)
    return torch.randint(vocab // 4, vocab, (PROMPT_TOKENS,), generator=generator).to(device)


@contextmanager
def _rotary_calls(model: PreTrainedModel) -> Iterator[list[RotarySource]]:
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


def _forward(model: PreTrainedModel, ids: torch.Tensor, start: int) -> tuple[torch.Tensor, list[hf_cache.LayerKV]]:
    positions = torch.arange(start, start + len(ids), device=ids.device)[None]
    cache = hf_cache.full_length_cache()
    kwargs: dict[str, Any] = {hf_cache.cache_argument(model): cache}
    output = model(input_ids=ids[None], position_ids=positions, use_cache=True, **kwargs)
    try:
        layers = hf_cache.layers_of(hf_cache.output_cache(output))
    except ValueError as error:
        raise NotReusable(str(error)) from None
    if len(layers) != len(decoder_layers(model)):
        raise NotReusable(f"{len(decoder_layers(model))} decoder layers keep KV for {len(layers)} (shared or missing)")
    return output.logits[0, -1], layers


def _are_exchanged(base: hf_cache.LayerKV, shifted: hf_cache.LayerKV, tolerance: Tolerance) -> bool:
    """Whether the position is in what a layer caches as values, and not in what it caches as keys."""
    (keys, values), (moved_keys, moved_values) = base, shifted
    return relative_l2(moved_values, values) > tolerance.values >= relative_l2(moved_keys, keys)


def _ordered(layers: Sequence[hf_cache.LayerKV], exchanged: Sequence[bool]) -> list[hf_cache.LayerKV]:
    return [(b, a) if turn else (a, b) for (a, b), turn in zip(layers, exchanged, strict=True)]


def _check_values(base: Sequence[hf_cache.LayerKV], shifted: Sequence[hf_cache.LayerKV], tolerance: Tolerance) -> float:
    worst = 0.0
    for index, ((_, a), (_, b)) in enumerate(zip(base, shifted, strict=True)):
        error = relative_l2(b, a)
        worst = max(worst, error)
        if not error <= tolerance.values:
            raise NotReusable(
                f"values of layer {index} depend on the absolute position (relative difference {error:.2g}): "
                "absolute position embeddings or a position-dependent scale"
            )
    return worst


def _find_rotations(
    sources: Sequence[RotarySource],
    base: Sequence[hf_cache.LayerKV],
    shifted: Sequence[hf_cache.LayerKV],
    shift: int,
    tolerance: Tolerance,
) -> tuple[list[Rotation | None], float]:
    rotations: list[Rotation | None] = []
    worst = 0.0
    for index, ((keys, _), (moved, _)) in enumerate(zip(base, shifted, strict=True)):
        candidates: list[Rotation | None] = [None, *_candidates(sources, keys)]
        errors = [_rotation_error(c, keys, moved, shift) for c in candidates]
        best = min(range(len(errors)), key=errors.__getitem__)
        if not errors[best] <= tolerance.keys:
            raise NotReusable(
                f"keys of layer {index} are not a known rotation of each other at other positions "
                f"(best relative difference {errors[best]:.2g})"
            )
        worst = max(worst, errors[best])
        rotations.append(candidates[best])
    return rotations, worst


def _candidates(sources: Sequence[RotarySource], keys: torch.Tensor) -> Iterator[Rotation]:
    head_dim = keys.shape[-1]
    for source in sources:
        try:
            width = source.tables(torch.arange(2, device=keys.device))[0].shape[-1] * 2
        except (TypeError, ValueError):
            continue  # a vision or audio module that the text path does not use
        if width > head_dim:
            continue
        pairings: tuple[Pairing, ...] = ("half", "interleaved")
        for offset in sorted({0, head_dim - width}):
            for pairing in pairings:
                yield Rotation(source, pairing, offset, width)


def _rotation_error(rotation: Rotation | None, keys: torch.Tensor, moved: torch.Tensor, shift: int) -> float:
    if rotation is None:
        return relative_l2(moved, keys)
    positions = torch.arange(keys.shape[2], device=keys.device)
    free = rotation.undo(keys.float(), rotation.source.tables(positions))
    expected = torch.empty_like(free)
    rotation.rotate_into(expected, free, rotation.source.tables(positions + shift))
    return relative_l2(moved, expected)


def _layout(
    base: Sequence[hf_cache.LayerKV],
    rotations: Sequence[Rotation | None],
    exchanged: Sequence[bool],
    dtype: torch.dtype,
) -> KVLayout:
    groups: list[LayerGroup] = []
    for index, ((keys, values), rotation, turn) in enumerate(zip(base, rotations, exchanged, strict=True)):
        shape = (keys.shape[1], keys.shape[3], values.shape[3], keys.device)
        for i, group in enumerate(groups):
            same = shape == (group.num_kv_heads, group.key_head_dim, group.value_head_dim, group.device)
            if same and turn == group.exchanged and _same_rotation(group.rotation, rotation):
                groups[i] = replace(group, layers=(*group.layers, index))
                break
        else:
            groups.append(LayerGroup((index,), *shape, rotation, turn))
    return KVLayout(tuple(groups), base[0][0].dtype if base else dtype)


def _same_rotation(a: Rotation | None, b: Rotation | None) -> bool:
    return a is b if a is None or b is None else a.same_as(b)
