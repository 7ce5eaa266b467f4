"""Products of a partial forward's rows with the model's weights, on a CPU with matrix tiles (Intel's AMX).

`torch.overrides.TorchFunctionMode` is torch's way to give a function another implementation inside a `with`: nothing of
the model or of torch is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from kvboost_rag.forward.amx_tiles import TileKernel, say_what_takes_time
from kvboost_rag.kv.checked_kernel import check_agrees

MAX_ROWS = 384
"""With more rows torch's product is as fast: laying the weights out is a smaller part of it."""

ONE_BLOCK = 32
"""Rows that the loops take in one piece."""


@dataclass
class CompiledLinear(TileKernel):
    """Calls the loops. A kind of call is: sizes of the weights, with a bias or not, more rows than a block or not."""

    name: ClassVar[str] = "product (numba)"

    @torch.compiler.disable  # compiled loops are given addresses, which a tracer cannot follow
    def product(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """`torch.nn.functional.linear`, or None where torch has to do it."""
        if self.refused or not _fits(rows, weight, bias):
            return None
        try:
            flat = rows.reshape(-1, rows.shape[-1]).contiguous()
            output = _loops().row_linear(flat, weight, bias, threads=torch.get_num_threads())
            output = output.view(*rows.shape[:-1], -1)
            kind = weight.shape, bias is None, len(flat) > ONE_BLOCK
            if kind not in self.checked:
                check_agrees(output, linear(rows, weight, bias))
                self.checked.add(kind)
        except Exception as error:
            self.refuse(error)
            return None
        return output


class RowProducts(TorchFunctionMode):
    """Inside it `torch.nn.functional.linear` goes through `COMPILED` where that takes it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        free = func is linear and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if free and len(args) > 1 and options.keys() <= {"bias"}:
            output = COMPILED.product(*args, **options)
            if output is not None:
                return output
        return func(*args, **options)


def _fits(rows: Any, weight: Any, bias: Any) -> bool:
    """Whether the loops take them; whatever else torch accepts, or refuses, is left to it."""
    plain = torch.Tensor, torch.nn.Parameter
    return (
        type(rows) in plain
        and type(weight) in plain
        and rows.dtype == weight.dtype == torch.bfloat16
        and rows.device.type == weight.device.type == "cpu"
        and weight.dim() == 2
        and rows.dim() > 1
        and rows.shape[-1] == weight.shape[1] > 0
        and rows.shape[-1] % 32 == weight.shape[0] % 16 == 0
        and weight.shape[0] > 0
        and weight.is_contiguous()
        and 1 < rows.numel() // rows.shape[-1] <= MAX_ROWS
        and (bias is None or (type(bias) in plain and bias.shape == weight.shape[:1] and bias.dtype == weight.dtype))
    )


@cache
def _loops() -> ModuleType:
    say_what_takes_time()
    from kvboost_kernels.row_linear import cpu, tile_loops

    tile_loops.entry()
    return cpu


COMPILED = CompiledLinear()
