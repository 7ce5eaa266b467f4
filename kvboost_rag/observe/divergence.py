"""How far one distribution over the next token is from another."""

from __future__ import annotations

import torch


def kl_per_token(reference: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """KL(reference ‖ ours) of each row of logits `[num_tokens, vocab_size]`, nats, float64 `[num_tokens]`."""
    p, q = reference.double().log_softmax(-1), ours.double().log_softmax(-1)
    return (p.exp() * (p - q)).nan_to_num(nan=0.0).sum(-1).clamp_min(0)
