"""Row attention on a CPU through the loops that numba compiles, where the processor has matrix tiles (Intel's AMX).

The first call of a process waits until numba has loaded or, once a machine, compiled them: their sums round otherwise
than torch's, and an answer must not depend on how far a thread has come.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from kvboost_rag.forward.attention_call import AttentionCall, AttentionResult
from kvboost_rag.forward.attention_mass import mass_by_weights
from kvboost_rag.forward.causal_rows import CausalRows
from kvboost_rag.kv.checked_kernel import CheckedKernel

logger = logging.getLogger(__name__)

CHECKED_ROWS = 32
"""As many are compared with plain torch, which needs float32 numbers for each of them and each key."""
ONE_BLOCK = 128
"""Keys that the loops take in one piece."""

KERNEL = CheckedKernel("row attention (numba)", "cpu")


def takes(call: AttentionCall) -> bool:
    """Whether it can do this call."""
    if call.softcap is not None or call.sinks is not None:
        return False
    if not (KERNEL.wanted(call.query.device) and can_compile()):
        return False
    from kvboost_kernels.row_attention.request import fits_tiles

    return fits_tiles(call.query, call.key, call.value, call.scaling)


def attend(call: AttentionCall, causal: CausalRows) -> AttentionResult | None:
    """The result of a call that it `takes`; None where plain torch has to do it."""
    done = KERNEL.run(
        ("attention", *_kind(call, causal), call.value.shape[3]),
        lambda: _loops().attend_rows(
            call.query, call.key, call.value, causal.tiles(0), scaling=call.scaling, threads=torch.get_num_threads()
        ),
        lambda done: _last_rows(call, done[0]),
    )
    if done is None:
        return None
    output, lse = done

    def mass(start: int) -> torch.Tensor:
        measured: torch.Tensor | None = KERNEL.run(
            ("mass", *_kind(call, causal)),
            lambda: _mass(call, lse[:, :, start:], causal, start),
            lambda mass: [(mass, mass_by_weights(_precise(call, start), 0))],
        )
        return mass_by_weights(call, start) if measured is None else measured

    return AttentionResult(output, lse, mass)


def _mass(call: AttentionCall, lse: torch.Tensor, causal: CausalRows, start: int) -> torch.Tensor:
    mass: torch.Tensor = _loops().attention_mass(
        call.query[:, :, start:],
        call.key,
        causal.tiles(start),
        lse,
        scaling=call.scaling,
        threads=torch.get_num_threads(),
    )
    return mass


def _kind(call: AttentionCall, causal: CausalRows) -> tuple[object, ...]:
    """Head counts and sizes, window, more keys than a block or not."""
    _, heads, _, dim = call.query.shape
    _, kv_heads, kv_len, _ = call.key.shape
    return heads, kv_heads, dim, causal.window, kv_len > ONE_BLOCK


def _last_rows(call: AttentionCall, output: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    last = max(0, output.shape[1] - CHECKED_ROWS)
    return [(output[:, last:], _precise(call, last).mixed().transpose(1, 2))]


def _precise(call: AttentionCall, start: int) -> AttentionCall:
    """Rows from `start` on in float32: in the model's dtype torch rounds the logits, and large ones beyond use."""
    query, mask = call.query[:, :, start:].float(), call.mask[:, :, start:]
    return replace(call, query=query, key=call.key.float(), value=call.value.float(), mask=mask)


@cache
def can_compile() -> bool:
    """Whether numba is installed and the processor has tiles for bfloat16: known without importing numba."""
    try:
        return find_spec("numba") is not None and "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@cache
def _loops() -> ModuleType:
    """The module of the loops, compiled."""
    logger.info("loading code for this processor's matrix tiles; once a machine it is compiled, in some seconds")
    from kvboost_kernels.row_attention import cpu, tile_loops

    tile_loops.entry()
    return cpu
