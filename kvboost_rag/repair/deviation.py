"""Measuring, in the first layers of a pass over all rows, how far stored KV is from fresh KV."""

from __future__ import annotations

import torch

from kvboost_rag.forward.attention_call import AttentionCall, AttentionResult
from kvboost_rag.models.hf_cache import LayerKV

KL_BLOCK_ROWS = 128


def relative_deviation(fresh: LayerKV, stored: LayerKV) -> torch.Tensor:
    """Deviation of each row, `[num_rows]`, float32: √((δ_k² + δ_v²) / 2) with δ = ‖fresh − stored‖₂ / ‖stored‖₂.

    Norms run over heads and head dimensions of one token. CacheBlend ranks by the summed squared difference without
    the denominator; relative distances let one threshold serve all tokens.
    """
    parts = []
    for new, old in zip(fresh, stored, strict=True):
        difference = (new.float() - old.float()).square().sum((0, 1, 3))
        parts.append(difference / old.float().square().sum((0, 1, 3)).clamp_min(1e-12))
    return ((parts[0] + parts[1]) / 2).sqrt()


def attention_kl(call: AttentionCall, stored_keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """KL(fresh ‖ stored) of each row's attention, `[num_rows]`, nats, mean over heads.

    Args:
        call: the layer's attention; its keys are fresh at `rows`.
        stored_keys: what stood there before, `[1, num_kv_heads, num_rows, key_head_dim]`.
        rows: positions of the rows, `[num_rows]`.
    """
    old_keys = call.key.clone()
    old_keys.index_copy_(2, rows.to(old_keys.device), stored_keys)
    result = []
    for start in range(0, call.query.shape[2], KL_BLOCK_ROWS):
        end = min(start + KL_BLOCK_ROWS, call.query.shape[2])
        fresh = call.logits(start, end).log_softmax(-1)
        stored = call.logits(start, end, old_keys).log_softmax(-1)
        terms = (fresh.exp() * (fresh - stored)).nan_to_num(nan=0.0)  # masked: 0 · (−inf − −inf)
        result.append(terms.sum(-1).mean((0, 1)))
    return torch.cat(result)


class DeviationProbe:
    """Observer that measures deviation at one layer; use alone or as part of a narrowing."""

    def __init__(self, layer: int, score: str = "l2") -> None:
        self.layer = layer
        self.score = score
        self.rows: torch.Tensor | None = None
        self.deviation: torch.Tensor | None = None
        self.kl: torch.Tensor | None = None
        self._stored_keys: torch.Tensor | None = None

    def on_kv(self, layer: int, fresh: LayerKV, stored: LayerKV) -> None:
        if layer == self.layer:
            self.deviation = relative_deviation(fresh, stored)
            self._stored_keys = stored[0] if self.score == "kl" else None

    def wants_attention(self, layer: int) -> bool:
        return self.score == "kl" and layer == self.layer

    def on_attention(self, layer: int, call: AttentionCall, result: AttentionResult) -> None:
        if self._stored_keys is None or self.rows is None:
            raise RuntimeError("attention came before keys and values")
        self.kl = attention_kl(call, self._stored_keys, self.rows)
        self._stored_keys = None
