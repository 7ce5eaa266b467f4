"""The checked arguments of one attention over rows, shared by the kernels and their references."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvboost_kernels.dispatch import FLOAT_DTYPES

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Request:
    """Arguments of `row_attention`; see there. Raises `ValueError` where they do not fit together."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rows: torch.Tensor
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    mass_rows: torch.Tensor | None = None
    entropy: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.query.shape[1] // self.key.shape[1]

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Tensor arguments by name."""
        names = ("query", "key", "value", "rows", "sinks", "mass_rows")
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        for name, tensor in (("query", self.query), ("key", self.key), ("value", self.value)):
            if tensor.dim() != 4 or tensor.shape[0] != 1 or tensor.dtype not in FLOAT_DTYPES:
                raise ValueError(f"{name}: expected float [1, heads, length, head_dim], got {_describe(tensor)}")
            if tensor.dtype != self.query.dtype:
                raise ValueError(f"{name} is {tensor.dtype} but query is {self.query.dtype}; attention needs one dtype")
            if not 1 <= tensor.shape[3] <= MAX_HEAD_DIM:
                raise ValueError(f"{name}: head dimension {tensor.shape[3]}, expected 1 to {MAX_HEAD_DIM}")
        if self.key.shape[:3] != self.value.shape[:3] or self.key.shape[3] != self.query.shape[3]:
            shapes = f"query {tuple(self.query.shape)}, key {tuple(self.key.shape)}, value {tuple(self.value.shape)}"
            raise ValueError(f"{shapes}: key and value must agree in heads and length, key and query in head_dim")
        if self.key.shape[1] == 0 or self.query.shape[1] % self.key.shape[1]:
            raise ValueError(f"{self.query.shape[1]} query heads are not a multiple of {self.key.shape[1]} key heads")
        self._check_rows()
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window}: expected 1 or more, or None")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap}: expected a positive number, or None")

    def _check_rows(self) -> None:
        heads, num_rows = self.query.shape[1:3]
        if self.rows.dtype != torch.int64 or self.rows.shape != (num_rows,):
            raise ValueError(f"rows: expected int64 [{num_rows}], got {_describe(self.rows)}")
        if self.sinks is not None and self.sinks.shape != (heads,):
            raise ValueError(f"sinks: expected one logit for each of {heads} heads, got {_describe(self.sinks)}")
        if self.mass_rows is not None and (self.mass_rows.dtype != torch.int64 or self.mass_rows.dim() != 1):
            raise ValueError(f"mass_rows: expected int64 indices into rows, got {_describe(self.mass_rows)}")


def fits_tiles(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> bool:
    """Whether the matrix tiles of a CPU (`cpu.py`) take them.

    That is bfloat16, one sequence, whole tiles of channels that lie side by side in memory, and a positive scaling.
    """
    tensors = (query, key, value)
    return (
        all(t.dim() == 4 and t.shape[0] == 1 and t.numel() for t in tensors)
        and query.shape[3] == key.shape[3]
        and all(t.device.type == "cpu" and t.dtype == torch.bfloat16 and t.stride(3) == 1 for t in tensors)
        and query.shape[3] % 32 == value.shape[3] % 16 == 0
        and max(query.shape[3], value.shape[3]) <= MAX_HEAD_DIM
        and scaling > 0
    )


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
