"""Row attention through the Triton kernel, on a GPU, where the mask is one that the kernel knows."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from kvboost_rag.config import KernelSetting, kernel_setting
from kvboost_rag.models.attention_call import AttentionCall

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest difference to plain torch, relative to the largest output, that a kernel may show when it is first used."""


@dataclass(frozen=True)
class CausalRows:
    """A mask in the kernel's terms: row `i` sees keys `j ≤ rows[i]`, of them the last `window` (None: all)."""

    rows: torch.Tensor
    window: int | None


def causal_rows(mask: torch.Tensor, rows: torch.Tensor) -> CausalRows | None:
    """What a mask `[num_rows, kv_len]` amounts to at these positions, or None for any other rule."""
    rows = rows.to(mask.device)
    columns = torch.arange(mask.shape[1], device=mask.device)[None]
    causal = columns <= rows[:, None]
    if torch.equal(mask, causal):
        return CausalRows(rows, None)
    window = int(mask.sum(1).amax()) if len(mask) else 0
    if window and torch.equal(mask, causal & (columns > rows[:, None] - window)):
        return CausalRows(rows, window)
    return None


@dataclass
class KernelAttention:
    """Calls the kernel, and believes it only after a comparison with plain torch.

    The first call of each kind (dtype, head sizes, soft cap, sinks, window) computes both; a kernel that raises or
    differs is not used again in this process, which is logged once.
    """

    checked: set[tuple[object, ...]] = field(default_factory=set)
    refused: bool = False

    def wanted(self, device: torch.device) -> bool:
        """Whether to try: on GPUs, or wherever `KVBOOST_KERNELS=on` says so (Triton's interpreter runs on a CPU)."""
        setting: KernelSetting = kernel_setting()
        return not self.refused and (setting == "on" or (setting == "auto" and device.type == "cuda"))

    def attend(self, call: AttentionCall, value: torch.Tensor, causal: CausalRows) -> torch.Tensor | None:
        """Output `[1, num_rows, num_heads, value_head_dim]`, or None where plain torch has to do it."""
        try:
            output = self._run(call, value, causal)
            kind = self._kind(call, value, causal)
            if kind not in self.checked:
                self._compare(output, call, value)
                self.checked.add(kind)
        except Exception as error:
            self.refused = True
            logger.warning("the row attention kernel is not used, plain torch is: %s: %s", type(error).__name__, error)
            return None
        return output

    @staticmethod
    def _run(call: AttentionCall, value: torch.Tensor, causal: CausalRows) -> torch.Tensor:
        from kvboost_kernels.row_attention import row_attention

        done = row_attention(
            call.query,
            call.key,
            value,
            causal.rows,
            scaling=call.scaling,
            sliding_window=causal.window,
            softcap=call.softcap,
            sinks=call.sinks,
            backend="triton",
        )
        return done.output.transpose(1, 2)

    @staticmethod
    def _kind(call: AttentionCall, value: torch.Tensor, causal: CausalRows) -> tuple[object, ...]:
        shapes = call.query.shape[1], call.key.shape[1], call.query.shape[3], value.shape[3]
        return (*shapes, call.query.dtype, call.softcap, call.sinks is None, causal.window)

    @staticmethod
    def _compare(output: torch.Tensor, call: AttentionCall, value: torch.Tensor) -> None:
        expected = call.mixed(value).transpose(1, 2).float()
        error = float((output.float() - expected).abs().amax() / expected.abs().amax().clamp(min=1e-6))
        if not error <= TOLERANCE[call.query.dtype]:
            raise ArithmeticError(f"its output differs from plain torch's by {error:.2g} of the largest value")


KERNEL = KernelAttention()
