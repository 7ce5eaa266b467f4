"""`deviation` and `attention_kl`: how far freshly computed keys and values are from stored ones.

`deviation` compares the tensors, in one pass over them; CacheBlend (arXiv 2405.16444) chooses the tokens to recompute
by such a distance. `attention_kl` compares what attention makes of the keys, without materialising any logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvboost_kernels.deviation.reference import attention_kl_reference, deviation_reference
from kvboost_kernels.dispatch import FLOAT_DTYPES, Backend, uses_triton
from kvboost_kernels.row_attention.request import Request

__all__ = ["Deviation", "attention_kl", "deviation"]


@dataclass(frozen=True)
class Deviation:
    """Per-token relative L2 distance over all heads, float32 `[num_layers, num_tokens]`; `inf` where the stored
    vector is zero and the fresh one is not, 0 where both are."""

    keys: torch.Tensor
    values: torch.Tensor


def deviation(
    fresh_keys: torch.Tensor,
    fresh_values: torch.Tensor,
    stored_keys: torch.Tensor,
    stored_values: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> Deviation:
    """`‖fresh − stored‖₂ / ‖stored‖₂` of each token, in float32, for keys and for values.

    CacheBlend ranks tokens by the absolute L2 distance of values; this one is relative, so that one threshold serves
    layers of different scale, and gives keys and values apart.

    Args:
        fresh_keys, fresh_values: `[num_layers, num_kv_heads, num_tokens, head_dim]`, float, any strides. A layer's
            tensor with its batch axis of 1 is the case `num_layers = 1`.
        stored_keys, stored_values: the same, or with `rows`: `[num_layers, num_kv_heads, capacity, head_dim]`.
            Keys must be rotated to the same positions as the fresh ones.
        rows: int64 `[num_tokens]`; fresh token `i` is compared with stored token `rows[i]`, without a gathered copy.
            Each must lie in `[0, capacity)`; on a GPU this is not checked, to avoid a synchronisation.
        backend: see `Backend`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _check_pair("keys", fresh_keys, stored_keys, rows)
    _check_pair("values", fresh_values, stored_values, rows)
    if fresh_keys.shape[:3] != fresh_values.shape[:3]:
        raise ValueError(f"keys {tuple(fresh_keys.shape)} and values {tuple(fresh_values.shape)} differ in tokens")
    tensors = {
        "fresh_keys": fresh_keys,
        "fresh_values": fresh_values,
        "stored_keys": stored_keys,
        "stored_values": stored_values,
        "rows": rows,
    }
    if uses_triton(backend, tensors):
        from kvboost_kernels.deviation.plan import plan_deviation

        launch, keys, values = plan_deviation(fresh_keys, fresh_values, stored_keys, stored_values, rows)
        launch.run()
        return Deviation(keys, values)
    return Deviation(
        deviation_reference(fresh_keys, stored_keys, rows), deviation_reference(fresh_values, stored_values, rows)
    )


def attention_kl(
    query: torch.Tensor,
    fresh_key: torch.Tensor,
    stored_key: torch.Tensor,
    rows: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """`KL(softmax(q · fresh) ‖ softmax(q · stored))` of each row, in nats, float32 `[num_heads, num_rows]`.

    Both distributions run over the keys that the row sees (see `row_attention`, whose arguments these are; sinks take
    no part). A row that sees no key has 0. Both softmaxes and the divergence are accumulated in one pass over the keys.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    if fresh_key.shape != stored_key.shape:
        raise ValueError(f"fresh_key {tuple(fresh_key.shape)} and stored_key {tuple(stored_key.shape)} differ in shape")
    request = Request(query, fresh_key, stored_key, rows, scaling, sliding_window, softcap)
    if uses_triton(backend, {"query": query, "fresh_key": fresh_key, "stored_key": stored_key, "rows": rows}):
        from kvboost_kernels.deviation.plan import plan_attention_kl

        launch, divergence = plan_attention_kl(request)
        launch.run()
        return divergence
    return attention_kl_reference(request)


def _check_pair(name: str, fresh: torch.Tensor, stored: torch.Tensor, rows: torch.Tensor | None) -> None:
    for which, tensor in (("fresh", fresh), ("stored", stored)):
        if tensor.dim() != 4 or tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{which}_{name}: expected float [num_layers, num_kv_heads, num_tokens, head_dim], "
                f"got {tensor.dtype} {tuple(tensor.shape)}"
            )
    wanted = list(fresh.shape)
    if rows is not None:
        if rows.dtype != torch.int64 or rows.shape != (fresh.shape[2],):
            raise ValueError(f"rows: expected int64 [{fresh.shape[2]}], got {rows.dtype} {tuple(rows.shape)}")
        wanted[2] = stored.shape[2]
    if list(stored.shape) != wanted:
        raise ValueError(f"fresh_{name} {tuple(fresh.shape)} and stored_{name} {tuple(stored.shape)} do not match")
