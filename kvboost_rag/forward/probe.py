"""Decides by running a model whether its KV can be reused at other positions, and how its keys are rotated.

The same short prompt runs at positions 0…n and p…p+n. Values must agree for every layer, and the keys of one run must
be a rotation of the other's, by angles of the model's own rotary module. Then a partial forward from exact KV must
give the plain forward's logits. Whatever cannot be shown is refused with the reason; such models still generate.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvboost_rag.forward.not_reusable import NotReusable
from kvboost_rag.forward.probe_runs import Runs, TooFar, difference, forward_at, probe_ids, rotary_calls, with_noise
from kvboost_rag.forward.rope_range import constant_range, context_lengths
from kvboost_rag.forward.rotation_search import find_rotations
from kvboost_rag.forward.row_check import partial_forward_error, relative_l2
from kvboost_rag.forward.tolerance import Tolerance
from kvboost_rag.kv.buffer import KVLayout, LayerGroup
from kvboost_rag.kv.rope import Rotation
from kvboost_rag.models import hf_cache
from kvboost_rag.models.ranks import Ranks
from kvboost_rag.models.unwrap import wrapper_refusal


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
        failed = f"{type(error).__name__}: {error}"
        return ProbeReport(False, _uneven_heads(model, failed) or f"the probe failed: {failed}")


def _uneven_heads(model: PreTrainedModel, failed: str) -> str | None:
    """What an error of a model on several ranks comes from, if its heads cannot be dealt out to them."""
    config, ranks = model.config.get_text_config(decoder=True), Ranks.count(model)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None) or 0
    if heads % ranks == 0:
        return None
    return f"its {heads} key-value heads cannot be split over {ranks} ranks: transformers cannot run it so ({failed})"


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
    """Compare with what rounding explains; a model beyond that is measured by its own noise before it is refused."""
    tolerance = Tolerance.of(model.dtype)
    ids = probe_ids(model)
    shift = min(1013, max(1, min(context_lengths(model)) - len(ids)))
    with rotary_calls(model) as sources:
        base = forward_at(model, ids, 0)
    both_ways = [*sources, *(replace(source, backwards=True) for source in sources)]
    runs = Runs(ids, shift, base, forward_at(model, ids, shift)[1], both_ways)
    try:
        return _compare(model, runs, tolerance)
    except TooFar:
        return _compare(model, runs, with_noise(model, runs, tolerance))


def _compare(model: PreTrainedModel, runs: Runs, tolerance: Tolerance) -> ProbeReport:
    base = runs.base[1]
    pairs = enumerate(zip(base, runs.shifted, strict=True))
    exchanged = [_are_exchanged(*pair, layer, tolerance) for layer, pair in pairs]
    ours, moved = _ordered(base, exchanged), _ordered(runs.shifted, exchanged)
    value_error = _check_values(ours, moved, tolerance)
    rotations, key_error = find_rotations(runs, ours, moved, tolerance)
    layout = _layout(ours, rotations, exchanged, model.dtype)
    logit_error = _partial_error(model, layout, runs)
    if not logit_error <= tolerance.for_logits:
        raise TooFar(
            f"a partial forward does not give the full one's logits ({difference(logit_error, tolerance.logits)})"
        )
    max_positions = constant_range(model, rotations)
    return ProbeReport(True, None, layout, max_positions, value_error, key_error, logit_error)


def _partial_error(model: PreTrainedModel, layout: KVLayout, runs: Runs) -> float:
    try:
        return partial_forward_error(model, layout, runs.ids, runs.base)
    except NotReusable:
        raise
    except Exception as error:
        raise NotReusable(f"its layers cannot be run for some rows only ({type(error).__name__}: {error})") from error


def _are_exchanged(base: hf_cache.LayerKV, shifted: hf_cache.LayerKV, layer: int, tolerance: Tolerance) -> bool:
    """Whether the position is in what a layer caches as values, and not in what it caches as keys."""
    (keys, values), (moved_keys, moved_values) = base, shifted
    keys_stay = relative_l2(moved_keys, keys) <= tolerance.for_keys(layer)
    return keys_stay and relative_l2(moved_values, values) > tolerance.for_values(layer)


def _ordered(layers: Sequence[hf_cache.LayerKV], exchanged: Sequence[bool]) -> list[hf_cache.LayerKV]:
    return [(b, a) if turn else (a, b) for (a, b), turn in zip(layers, exchanged, strict=True)]


def _check_values(base: Sequence[hf_cache.LayerKV], shifted: Sequence[hf_cache.LayerKV], tolerance: Tolerance) -> float:
    worst = 0.0
    for index, ((_, a), (_, b)) in enumerate(zip(base, shifted, strict=True)):
        error = relative_l2(b, a)
        worst = max(worst, error)
        if not error <= tolerance.for_values(index):
            noise = tolerance.values[index] if tolerance.values else 0.0
            # Nothing stands in front of the first layer's values but the embeddings.
            why = "absolute position embeddings or a position-dependent scale" if index == 0 else "those before do not"
            raise TooFar(f"values of layer {index} depend on the absolute position ({difference(error, noise)}): {why}")
    return worst


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
