"""How much attention rows give each key: mean over heads, sum over rows, float32 `[kv_len]`."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from kvboost_rag.forward import onednn
from kvboost_rag.forward.attention_call import AttentionCall

SAFE_EXPONENT = 80.0
"""exp(±80) is a normal number in float32 and bfloat16, with room for sums."""
BLOCK_ROWS = 64


def attention_mass(call: AttentionCall, log_sum_exp: torch.Tensor | None, start: int) -> torch.Tensor:
    """Mass of the rows from `start` on.

    Where the log-sum-exp of the rows is known, `[num_kv_heads, group, num_rows]`, Σ exp(logit - lse) takes one product
    with the keys and one with exp(-lse); the logits are rounded to the model's dtype on the way.
    """
    lse = None if log_sum_exp is None else log_sum_exp[:, :, start:]
    wide = call.query.dtype in (torch.float32, torch.bfloat16)
    if lse is not None and wide and lse.numel() and bool(lse.abs().amax() < SAFE_EXPONENT):
        return _by_log_sum_exp(call, lse, start)
    return mass_by_weights(call, start)


def mass_by_weights(call: AttentionCall, start: int) -> torch.Tensor:
    """`attention_mass` by way of every single weight."""
    rows = call.query.shape[2]
    total = torch.zeros(call.key.shape[2], device=call.key.device)
    for first in range(start, rows, BLOCK_ROWS):
        total += call.weights(first, min(first + BLOCK_ROWS, rows)).mean((0, 1)).sum(0)
    return total


def _by_log_sum_exp(call: AttentionCall, lse: torch.Tensor, start: int) -> torch.Tensor:
    kv_heads, group, rows = lse.shape
    query = (call.query[0, :, start:] * call.scaling).reshape(kv_heads, group * rows, -1)
    weights = (-lse).exp().to(query.dtype).view(kv_heads, 1, -1)
    mask = call.mask[0, 0, start:]
    hidden = torch.nonzero(~mask.all(0)).flatten()  # after a row of a causal mask, in front of a sliding window
    total = torch.zeros(call.key.shape[2], device=call.key.device)
    multiply = onednn.product if onednn.attends(query) else linear
    for head in range(kv_heads):  # one at a time: the batched product would copy the keys first
        exponentials = multiply(query[head], call.key[0, head]).exp_()
        if len(hidden):
            first, last = int(hidden[0]), int(hidden[-1]) + 1
            part = exponentials.view(group, rows, -1)[..., first:last]
            part.masked_fill_(~mask[:, first:last], 0)
        total += torch.mm(weights[head], exponentials)[0]
    return total / (kv_heads * group)
