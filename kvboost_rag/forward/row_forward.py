"""Partial forward: the model's own forward over chosen rows (token positions) of a prompt whose KV is assembled.

Works on stock transformers models: a pre-hook on the model replaces the inputs by the rows', pre-hooks on the decoder
layers narrow what they are given to the rows a strategy keeps, and the cache scatters fresh K and V into the buffer.
Hooks live inside `row_pass` and are gone when it ends.

CacheBlend (Yao et al., EuroSys 2025) showed that recomputing few tokens is enough; it changes the modelling code, we
do not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from kvboost_rag.forward import onednn
from kvboost_rag.forward.attention_call import AttentionObserver
from kvboost_rag.forward.row_arguments import Path, describe, map_tensors, recall
from kvboost_rag.forward.row_attention import ACTIVE, IMPLEMENTATION, ActiveRows, register
from kvboost_rag.kv.buffer import KVBuffer
from kvboost_rag.models.hf_cache import BufferCache, KVObserver, cache_argument, kv_module

_HIDDEN_STATES = ((0,), ("hidden_states",))


class Narrowing(AttentionObserver, KVObserver, Protocol):
    """Chooses rows in the middle of a pass, from what it saw in the layers before."""

    before_layer: int
    """Rows are dropped in front of this decoder layer (≥ 1)."""

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        """Bool `[num_rows]`: which of the rows (positions, ascending) go on. The last row must."""


@dataclass(frozen=True)
class RowPlan:
    """Which rows a pass computes.

    Attributes:
        rows: positions, `[num_rows]`, int64, ascending; the last one gives the logits.
        narrowing: drops rows on the way, or None.
        observer: sees keys, values and attention; defaults to `narrowing`.
    """

    rows: torch.Tensor
    narrowing: Narrowing | None = None
    observer: Any = None

    @property
    def watcher(self) -> Any:
        return self.observer if self.observer is not None else self.narrowing


def decoder_layers(model: Any) -> nn.ModuleList:
    """The list of decoder layers of a model or of its decoder.

    Raises:
        ValueError: no list of as many layers as the config says.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for root in (decoder, model):
        for module in root.modules() if root is not None else ():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
    raise ValueError(f"{type(model).__name__} has no list of {count} decoder layers")


class RowPass:
    """State of one partial forward. Use through `row_pass`."""

    def __init__(self, model: nn.Module, cache: BufferCache, token_ids: torch.Tensor, plan: RowPlan) -> None:
        self.model, self.cache, self.token_ids, self.plan = model, cache, token_ids, plan
        self.rows = plan.rows
        self.kept: torch.Tensor | None = None
        self.done = False
        self._active = ActiveRows(plan.rows, plan.watcher)
        self._narrowed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._first_narrowed = 0
        if plan.narrowing is not None:
            self._arguments = recall(decoder_layers(model))
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        self._stack = ExitStack()

    @property
    def _is_one_stretch(self) -> bool:
        """Whether the rows follow one another: as in blocks of the exact path, settling and `full`, which are to agree
        with full prefill to the rounding of its own products. Scattered rows belong to an approximation."""
        return int(self.rows[-1]) - int(self.rows[0]) + 1 == len(self.rows)

    @torch.compiler.disable
    def before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the inputs of the first forward inside the pass by the rows."""
        if self.done:
            return None
        device = self.token_ids.device
        kwargs = {k: v for k, v in kwargs.items() if k not in ("inputs_embeds", "cache_position")}
        kwargs["input_ids"] = self.token_ids[self.plan.rows.to(device)][None]
        kwargs["position_ids"] = self.plan.rows.to(device)[None]
        kwargs["attention_mask"] = None
        kwargs["use_cache"] = True
        kwargs[cache_argument(self.model)] = self.cache
        if "logits_to_keep" in self._accepted:
            kwargs["logits_to_keep"] = 1
        self.cache.begin_rows(self.plan.rows, len(self.token_ids), self.plan.watcher)
        self._stack.enter_context(attention_implementation(self.model, IMPLEMENTATION))
        token = ACTIVE.set(self._active)
        self._stack.callback(ACTIVE.reset, token)
        if onednn.wanted(device) and not self._is_one_stretch:
            self._stack.enter_context(onednn.Products())
        return (), kwargs

    def after_model(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Also called when the forward raised."""
        if not self.done:
            self.finish()
            self.cache.buffer.length = len(self.token_ids)

    def finish(self) -> None:
        """Undo everything the pass set up. Safe to call twice."""
        self.done = True
        self.cache.end_rows()
        self._stack.close()

    def before_layer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        narrowing = self.plan.narrowing
        if self.done or narrowing is None or index < narrowing.before_layer:
            return None
        if self.kept is None:
            self._first_narrowed = index
            keep = narrowing.keep(self.rows)
            self.kept = torch.nonzero(keep.to(self.rows.device)).flatten()
            self.rows = self.rows[self.kept]
            self._active.rows = self.rows
            self.cache.narrow_rows(self.rows)
        narrowed: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(partial(self._narrow, index), (args, kwargs))
        return narrowed

    def _narrow(self, index: int, path: Path, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor argument of layer `index` for the kept rows only.

        Hidden states are another tensor in every layer, and narrow already after the first such layer; everything else
        is mostly the same and narrowed once.
        """
        assert self.kept is not None
        dim = self._arguments.row_dim(index, path, tensor)
        if dim is None:
            return tensor
        before, after = len(self.plan.rows), len(self.kept)
        if tensor.shape[dim] != before:
            if tensor.shape[dim] == after and index > self._first_narrowed:
                return tensor
            raise RuntimeError(
                f"decoder layer {index} was given {describe(path, tensor)}: expected {before} rows in dimension {dim}"
            )
        known = self._narrowed.get(id(tensor))
        if known is None:
            known = tensor, tensor.index_select(dim, self.kept.to(tensor.device))
            if path[1:] not in _HIDDEN_STATES:  # the original is kept as well, so that its id stays its own
                self._narrowed[id(tensor)] = known
        return known[1]


@contextmanager
def row_pass(model: nn.Module, buffer_cache: BufferCache, token_ids: torch.Tensor, plan: RowPlan) -> Iterator[RowPass]:
    """Inside this context the model's next forward is a partial one, whoever calls it (`generate` included).

    Args:
        model: a model that passed the probe, or its `kv_module`; the one whose forward will be called.
        buffer_cache: over the assembled buffer; the fresh rows are written into it.
        token_ids: the whole prompt, `[prompt_len]`.
        plan: the rows.

    Yields:
        The pass; `rows` are the positions that were computed to the end.
    """
    register()
    state = RowPass(model, buffer_cache, token_ids, plan)
    layers = decoder_layers(model)
    handles = [
        model.register_forward_pre_hook(state.before_model, with_kwargs=True, prepend=True),
        model.register_forward_hook(state.after_model, always_call=True),
        layers[0].register_forward_pre_hook(lambda *_: buffer_cache.enter_layers()),
    ]
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if head is not None:
        handles.append(head.register_forward_pre_hook(_plain_strides))
    if plan.narrowing is not None:
        for index, layer in enumerate(layers):
            hook = _layer_hook(state, index)
            handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield state
    finally:
        for handle in handles:
            handle.remove()
        state.finish()


def _plain_strides(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Give the last row, sliced out of all rows, the strides of a tensor of its own.

    With those of the slice torch's `matmul` takes its batched path, which copies the vocabulary matrix first: on a CPU
    a third of the time to first token with `none`.
    """
    if not args or not isinstance(args[0], torch.Tensor):
        return None
    states, *rest = args
    return (states.reshape(-1, states.shape[-1]).view(states.shape), *rest)


def _layer_hook(state: RowPass, index: int) -> Callable[..., Any]:
    return lambda module, args, kwargs: state.before_layer(index, args, kwargs)


@torch.no_grad()
def row_forward(model: PreTrainedModel, buffer: KVBuffer, token_ids: torch.Tensor, plan: RowPlan) -> RowOutput:
    """Run one partial forward.

    Args:
        buffer: the assembled prompt; rows are overwritten in place.
        token_ids: the whole prompt, `[prompt_len]`.

    Returns:
        Logits of the last row, `[vocab_size]`, the rows computed to the end and the rows per layer.
    """
    cache = BufferCache(buffer)
    with row_pass(model, cache, token_ids, plan) as state:
        output = model(input_ids=token_ids[-1:][None], use_cache=True)
    return RowOutput(output.logits[0, -1], state.rows, tuple(cache.rows_per_layer))


@dataclass(frozen=True)
class RowOutput:
    """Result of `row_forward`."""

    logits: torch.Tensor
    rows: torch.Tensor
    rows_per_layer: tuple[int, ...]


@torch.no_grad()
def observe_rows(model: PreTrainedModel, buffer: KVBuffer, token_ids: torch.Tensor, plan: RowPlan) -> None:
    """`row_forward` for what the plan's observer sees and the buffer receives; computes no logits."""
    module = kv_module(model)
    with row_pass(module, BufferCache(buffer), token_ids, plan):
        module(input_ids=token_ids[-1:][None], use_cache=True)


@contextmanager
def attention_implementation(model: nn.Module, name: str) -> Iterator[None]:
    """An attention implementation in every attention module's config, for the time of one forward."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    saved = [(c, c._attn_implementation) for c in configs.values() if hasattr(c, "_attn_implementation")]
    try:
        for config, _ in saved:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in saved:
            config._attn_implementation = implementation
