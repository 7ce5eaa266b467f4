"""Row attention on a CPU through the loops that numba compiles, where the processor has matrix tiles (Intel's AMX)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType
from typing import ClassVar

import torch

from kvboost_rag.forward.amx_tiles import TileKernel, say_what_takes_time
from kvboost_rag.forward.attention_call import AttentionCall
from kvboost_rag.forward.triton_attention import CausalRows
from kvboost_rag.kv.checked_kernel import check_agrees

CHECKED_ROWS = 32
"""As many are compared with plain torch, which needs float32 numbers for each of them and each key."""
ONE_BLOCK = 128
"""Keys that the loops take in one piece."""


@dataclass
class CompiledAttention(TileKernel):
    """Calls the loops. A kind of call is: head counts and sizes, window, more keys than a block or not, and whether
    attention mass is measured.

    The first call of a process waits until numba has loaded or, once a machine, compiled them: their sums round
    otherwise than torch's, and an answer must not depend on how far a thread has come.
    """

    name: ClassVar[str] = "row attention (numba)"

    def takes(self, call: AttentionCall, value: torch.Tensor) -> bool:
        """Whether it can do this call."""
        if call.softcap is not None or call.sinks is not None or not self.wanted(call.query.device):
            return False
        from kvboost_kernels.row_attention.request import fits_tiles

        return fits_tiles(call.query, call.key, value, call.scaling)

    def attend(
        self, call: AttentionCall, value: torch.Tensor, causal: CausalRows
    ) -> tuple[torch.Tensor, AttentionCall] | None:
        """Output `[1, num_rows, num_heads, value_head_dim]` and the call with what else came of it.

        For calls that it `takes`. None: plain torch has to do it.
        """
        try:
            return self._attend(call, value, causal)
        except Exception as error:
            self.refuse(error)
            return None

    def _attend(
        self, call: AttentionCall, value: torch.Tensor, causal: CausalRows
    ) -> tuple[torch.Tensor, AttentionCall]:
        output, lse = _loops().attend_rows(
            call.query, call.key, value, causal.tiles(0), scaling=call.scaling, threads=torch.get_num_threads()
        )
        kind = "attention", *self._kind(call, causal), value.shape[3]
        if kind not in self.checked:
            last = max(0, output.shape[1] - CHECKED_ROWS)
            check_agrees(output[:, last:], _precise(call, last).mixed(value.float()).transpose(1, 2))
            self.checked.add(kind)
        return output, replace(call, log_sum_exp=lse, mass_from=partial(self._mass, call, lse, causal))

    def _mass(self, call: AttentionCall, lse: torch.Tensor, causal: CausalRows, start: int) -> torch.Tensor:
        """`AttentionCall.mass`."""
        if not self.refused:
            try:
                return self._measured(call, lse[:, :, start:], causal, start)
            except Exception as error:
                self.refuse(error)
        return call.mass(start)

    def _measured(self, call: AttentionCall, lse: torch.Tensor, causal: CausalRows, start: int) -> torch.Tensor:
        mass: torch.Tensor = _loops().attention_mass(
            call.query[:, :, start:],
            call.key,
            causal.tiles(start),
            lse,
            scaling=call.scaling,
            threads=torch.get_num_threads(),
        )
        kind = "mass", *self._kind(call, causal)
        if kind not in self.checked:
            check_agrees(mass, _precise(call, start).mass_by_weights(0))
            self.checked.add(kind)
        return mass

    @staticmethod
    def _kind(call: AttentionCall, causal: CausalRows) -> tuple[object, ...]:
        _, heads, _, dim = call.query.shape
        _, kv_heads, kv_len, _ = call.key.shape
        return heads, kv_heads, dim, causal.window, kv_len > ONE_BLOCK


def _precise(call: AttentionCall, start: int) -> AttentionCall:
    """Rows from `start` on in float32: in the model's dtype torch rounds the logits, and large ones beyond use."""
    query, mask = call.query[:, :, start:].float(), call.mask[:, :, start:]
    return replace(call, query=query, key=call.key.float(), mask=mask, log_sum_exp=None)


@cache
def _loops() -> ModuleType:
    """The module of the loops, compiled."""
    say_what_takes_time()
    from kvboost_kernels.row_attention import cpu, tile_loops

    tile_loops.entry()
    return cpu


COMPILED = CompiledAttention()
