"""Which implementation an op runs, and how a kernel is launched."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch

logger = logging.getLogger(__name__)

Backend = Literal["auto", "triton", "reference"]
"""`auto`: Triton for tensors on a GPU where Triton is installed, else the reference.
`triton`: Triton or an error; on CPU tensors it needs `TRITON_INTERPRET=1`, set before Triton is first imported.
`reference`: plain torch, on any device."""

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def uses_triton(backend: Backend, tensors: Mapping[str, torch.Tensor | None]) -> bool:
    """Whether the Triton kernel is to run on `tensors` (by argument name; None = not given).

    Raises:
        ValueError: unknown backend, tensors on several devices, or `triton` asked for where it cannot run.
    """
    given = {name: t for name, t in tensors.items() if t is not None}
    devices = {name: t.device for name, t in given.items()}
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all tensors must be on one device, but {places}; move them first")
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in given.values())
    on_gpu = any(t.is_cuda for t in given.values())  # HIP devices are `cuda` to torch
    if backend == "reference":
        return False
    if backend == "auto":
        return on_gpu and not needs_grad and _triton_installed(warn=True)
    if backend != "triton":
        raise ValueError(f"backend={backend!r}: expected auto, triton or reference")
    if needs_grad:
        raise ValueError("the Triton kernels have no backward pass; call them under torch.no_grad() or detach inputs")
    if not _triton_installed(warn=False):
        raise ValueError("backend='triton' needs the package triton: pip install 'kvboost-rag[triton]'")
    if given and not on_gpu and not interpreting():
        raise ValueError("backend='triton' on CPU tensors needs TRITON_INTERPRET=1 before Triton is imported")
    return True


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU (slow; for tests)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


@lru_cache(maxsize=2)
def _triton_installed(warn: bool) -> bool:
    found = importlib.util.find_spec("triton") is not None
    if warn and not found:
        logger.warning("triton is not installed: kernels run as plain torch, slower; pip install 'kvboost-rag[triton]'")
    return found


@dataclass(frozen=True)
class Launch:
    """One kernel launch, as data: what runs is also what the ahead-of-time compiler compiles (`aot.py`).

    Attributes:
        kernel: a `triton.jit` function.
        grid: programs per axis, up to three.
        args: every argument by name; tensors, numbers, None, and the compile-time constants.
        num_warps, num_stages: compile options.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        """Launch on the device of the tensors, on its current stream. An empty grid launches nothing."""
        if 0 in self.grid:
            return
        with self._device():
            self.kernel[self.grid](**self.args, num_warps=self.num_warps, num_stages=self.num_stages)

    def _device(self) -> AbstractContextManager[Any]:
        device = next(a.device for a in self.args.values() if isinstance(a, torch.Tensor))
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
