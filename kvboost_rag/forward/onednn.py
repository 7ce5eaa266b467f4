"""Float32 products of partial forwards and of encoding by oneDNN, on processors other than Intel's.

torch gives float32 products to MKL, which is slow on AMD's processors; oneDNN, which is part of torch as well, takes
half the time there (`benchmarks/onednn.py`). `torch.overrides.TorchFunctionMode` is torch's way to give a
function another implementation inside a `with`: nothing of the model or of torch is changed.
"""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from kvboost_rag.kv.checked_kernel import CheckedKernel

KERNEL = CheckedKernel("oneDNN product", "cpu")
CACHED_LOGITS = 1 << 19
"""Logits of one block of rows: 2 MB, what two cores' second caches hold."""


def wanted(device: torch.device) -> bool:
    """Whether oneDNN is to do the products on this device."""
    return KERNEL.wanted(device) and is_faster()


def attends(query: torch.Tensor) -> bool:
    """Whether `attention` is to be used: with one thread. torch's flash attention gives each head to a thread; the
    products of one head are too small to be shared by several (`benchmarks/onednn.py`)."""
    return query.dtype == torch.float32 and torch.get_num_threads() == 1 and wanted(query.device)


@cache
def is_faster() -> bool:
    """Whether the processor is AMD's, with AVX2, and torch has both libraries. By name, not by a measurement: every
    process must decide alike, as both round differently."""
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:
        processor = platform.processor()
    vectors = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return "AuthenticAMD" in processor and vectors and torch.backends.mkl.is_available() and available()


def available() -> bool:
    """Whether torch has oneDNN and its product."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` by oneDNN: rows `[..., in]`, weight `[out, in]`, bias `[out]`, all float32."""
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return output


class Products(TorchFunctionMode):
    """Inside it `torch.nn.functional.linear` of two rows or more goes through oneDNN where that takes it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is linear and len(args) > 1 and options.keys() <= {"bias"} and _takes(*args, **options):
            output = KERNEL.run(
                ("linear", args[1].shape),
                lambda: product(*args, **options),
                lambda output: [(output, linear(*args, **options))],
            )
            if output is not None:
                return output
        return func(*args, **options)


def products(device: torch.device) -> AbstractContextManager[Any]:
    """`Products` where they are wanted on this device, else nothing."""
    return Products() if wanted(device) else nullcontext()


def _takes(rows: Any, weight: Any, bias: Any = None) -> bool:
    """Plain float32 in inference; one row is a product of a matrix and a vector, which memory bounds."""
    operands = (rows, weight) if bias is None else (rows, weight, bias)
    return (
        all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in operands)  # none that packs or shards
        and all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in operands)
        and weight.dim() == 2 <= rows.dim()
        and rows.shape[-1] == weight.shape[1]
        and rows.numel() > rows.shape[-1] > 0
        and weight.is_contiguous()
        and (bias is None or bias.shape == weight.shape[:1])
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by two products and a softmax, whose logits stay in the caches: a block of rows of one head at a time.

    Args:
        query: float32 `[1, num_kv_heads, rows, head_dim]`.
        key, value: `[1, num_kv_heads, kv_len, head_dim]`.
        bias: `[1, 1, rows, kv_len]`, added to the logits, or None; no row may see nothing.

    Returns:
        Output, of `query`'s shape, and log-sum-exp `[1, num_kv_heads, rows]`.
    """
    output, log_sum_exp = torch.empty_like(query), query.new_empty(query.shape[:3])
    block_rows = max(1, CACHED_LOGITS // key.shape[2])
    scaled = query * scaling
    for head in range(query.shape[1]):
        for start in range(0, query.shape[2], block_rows):
            rows = slice(start, start + block_rows)
            logits = product(scaled[0, head, rows], key[0, head])
            if bias is not None:
                logits += bias[0, 0, rows]
            peak = logits.amax(-1)
            weights = torch.softmax(logits, -1, out=logits)
            output[0, head, rows] = product(weights, value[0, head].T)
            log_sum_exp[0, head, rows] = peak - weights.amax(-1).log()  # the largest weight is exp(peak - it)
    return output, log_sum_exp
