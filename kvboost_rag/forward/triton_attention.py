"""Row attention through the Triton kernel, on a GPU, where the mask is one that the kernel knows."""

from __future__ import annotations

from functools import partial

import torch

from kvboost_rag.forward.attention_call import AttentionCall, AttentionResult
from kvboost_rag.forward.attention_mass import attention_mass
from kvboost_rag.forward.causal_rows import CausalRows
from kvboost_rag.kv.checked_kernel import CheckedKernel

KERNEL = CheckedKernel("row attention", "gpu")


def takes(call: AttentionCall) -> bool:
    """Whether to try."""
    return KERNEL.wanted(call.query.device)


def attend(call: AttentionCall, causal: CausalRows) -> AttentionResult | None:
    """The result of a call that it `takes`; None where plain torch has to do it."""
    shapes = call.query.shape[1], call.key.shape[1], call.query.shape[3], call.value.shape[3]
    output = KERNEL.run(
        (*shapes, call.query.dtype, call.softcap, call.sinks is None, causal.window),
        lambda: _output(call, causal),
        lambda output: [(output, call.mixed().transpose(1, 2))],
    )
    return None if output is None else AttentionResult(output, None, partial(attention_mass, call, None))


def _output(call: AttentionCall, causal: CausalRows) -> torch.Tensor:
    from kvboost_kernels.row_attention import row_attention

    done = row_attention(
        call.query,
        call.key,
        call.value,
        causal.rows,
        scaling=call.scaling,
        sliding_window=causal.window,
        softcap=call.softcap,
        sinks=call.sinks,
        backend="triton",
    )
    return done.output.transpose(1, 2)
