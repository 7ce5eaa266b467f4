"""`row_attention`: attention of selected rows against a whole buffer of keys and values.

Repair recomputes a few token positions while everything before them stands in the buffer, so the queries are rows at
scattered positions and each sees the keys up to its own. A general attention call needs an explicit mask
`[num_rows, kv_len]` for that and, with grouped heads, often repeated keys and values; here positions are enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvboost_kernels.dispatch import Backend, uses_triton
from kvboost_kernels.row_attention.reference import row_attention_reference
from kvboost_kernels.row_attention.request import Request

__all__ = ["RowAttention", "row_attention"]


@dataclass(frozen=True)
class RowAttention:
    """What `row_attention` computed.

    Attributes:
        output: `[1, num_heads, num_rows, value_head_dim]` in the query's dtype. Laid out so that
            `output.transpose(1, 2)` is contiguous, which is what transformers' attention functions return.
        mass: float32 `[kv_len]`, the attention weight of each key averaged over all heads and the `mass_rows`
            (all zeros where `mass_rows` is empty); None unless `mass_rows` was given.
        entropy: float32 `[num_heads, num_rows]`, in nats, of each row's attention distribution over the keys
            (a sink takes no part in it); None unless asked for.
    """

    output: torch.Tensor
    mass: torch.Tensor | None
    entropy: torch.Tensor | None


def row_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    mass_rows: torch.Tensor | None = None,
    return_entropy: bool = False,
    backend: Backend = "auto",
) -> RowAttention:
    """Softmax attention where row `i` stands at position `rows[i]` and sees the keys `j <= rows[i]`.

    Online softmax over key tiles as in FlashAttention-2 (arXiv 2307.08691), with three differences: visibility comes
    from `rows`, the query heads of one key head are packed into one tile (keys and values are read once, not once a
    query head), and the attention mass is summed in a fixed order in a second pass over the keys, so that equal inputs
    give equal bits. Accumulation is float32. A row that sees no key gets zeros.

    Args:
        query: `[1, num_heads, num_rows, head_dim]`; float32, float16 or bfloat16; head dimensions up to 256.
        key: `[1, num_kv_heads, kv_len, head_dim]`, `num_heads` a multiple of `num_kv_heads`.
        value: `[1, num_kv_heads, kv_len, value_head_dim]`.
        rows: int64 `[num_rows]`, positions in the buffer. Any order is right; ascending is fastest.
        scaling: factor on the dot products, usually `head_dim ** -0.5`.
        sliding_window: row `i` sees only `rows[i] - sliding_window < j <= rows[i]`.
        softcap: logits become `softcap * tanh(logit / softcap)` (Gemma 2).
        sinks: `[num_heads]`, a logit per head that takes weight but has no value (gpt-oss).
        mass_rows: int64 indices into `rows`; asks for `mass`, averaged over these rows. Each must lie in
            `[0, num_rows)`; on a GPU this is not checked, to avoid a synchronisation, and others count as rows
            without weight.
        return_entropy: asks for `entropy`.
        backend: see `Backend`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together; the message names the argument.
    """
    request = Request(
        query, key, value, rows, scaling, sliding_window, softcap, sinks, mass_rows, entropy=return_entropy
    )
    if uses_triton(backend, request.tensors()):
        from kvboost_kernels.row_attention.plan import row_attention_triton

        return RowAttention(*row_attention_triton(request))
    return RowAttention(*row_attention_reference(request))
