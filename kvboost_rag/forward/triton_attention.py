"""Row attention through the Triton kernel, on a GPU, where the mask is one that the kernel knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from kvboost_rag.forward.attention_call import AttentionCall
from kvboost_rag.kv.checked_kernel import CheckedKernel, check_agrees


@dataclass(frozen=True)
class CausalRows:
    """A mask in the kernel's terms: row `i` sees keys `j ≤ rows[i]`, of them the last `window` (None: all)."""

    rows: torch.Tensor
    window: int | None
    _tiles: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)

    def tiles(self, start: int) -> Any:
        """Rows from index `start` on as the CPU's kernel takes them (`RowTiles`), made once."""
        if start not in self._tiles:
            from kvboost_kernels.row_attention.cpu import RowTiles

            self._tiles[start] = RowTiles(self.rows[start:], self.window)
        return self._tiles[start]


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


class KernelAttention(CheckedKernel):
    """Calls the kernel. A kind of call is: dtype, head sizes, soft cap, sinks, window."""

    name: ClassVar[str] = "row attention"

    def attend(self, call: AttentionCall, value: torch.Tensor, causal: CausalRows) -> torch.Tensor | None:
        """Output `[1, num_rows, num_heads, value_head_dim]`, or None where plain torch has to do it."""
        try:
            output = self._run(call, value, causal)
            kind = self._kind(call, value, causal)
            if kind not in self.checked:
                check_agrees(output, call.mixed(value).transpose(1, 2))
                self.checked.add(kind)
        except Exception as error:
            self.refuse(error)
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


KERNEL = KernelAttention()
