"""Rotation of stored keys on a CPU through the loop that numba compiles, where numba is installed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from kvboost_rag.config import kernel_setting
from kvboost_rag.kv.checked_kernel import CheckedKernel
from kvboost_rag.kv.rope import Rotation

Tables = tuple[torch.Tensor, torch.Tensor]
RotateInto = Callable[..., None]


def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="kvboost-compile")


@dataclass
class CompiledRotation(CheckedKernel):
    """Calls the loop. A kind of call is: dtype, pairing, offset and sizes of the rotation, head size.

    Compiling (once a machine: numba keeps the result) and importing numba are left to a thread; until it is done, torch
    rotates. Both give the same bits, or the loop is not used: unlike the GPU kernels it takes over in
    the middle of a process, and an answer must not depend on when.
    """

    name: ClassVar[str] = "rotation (numba)"
    _compiled: dict[tuple[object, ...], Future[RotateInto]] = field(default_factory=dict, repr=False)
    _compiler: ThreadPoolExecutor = field(default_factory=_worker, repr=False)

    def wanted(self, device: torch.device) -> bool:
        """Whether to try: on a CPU with numba, unless `KVBOOST_KERNELS=off`."""
        return not self.refused and device.type == "cpu" and _numba_is_installed() and kernel_setting() != "off"

    def rotate_into(self, out: torch.Tensor, keys: torch.Tensor, rotation: Rotation, tables: Tables) -> bool:
        """`Rotation.rotate_into`. False: plain torch has to do it (what is written is then undefined)."""
        if not self.wanted(out.device) or keys.dtype not in (torch.bfloat16, torch.float32):
            return False
        kind = keys.dtype, rotation.pairing, rotation.offset, rotation.rotary_dim // 2, keys.shape[-1]
        if kind not in self._compiled:
            self._compiled[kind] = self._compiler.submit(_compile, *kind)
        if not self._compiled[kind].done():
            return False
        try:
            return self._rotate(self._compiled[kind].result(), kind, out, keys, rotation, tables)
        except Exception as error:
            self.refuse(error)
            return False

    def wait(self) -> None:
        """Return when everything asked for so far is compiled, or could not be."""
        for compiled in tuple(self._compiled.values()):
            compiled.exception()

    def _rotate(
        self, run: RotateInto, kind: Any, out: torch.Tensor, keys: torch.Tensor, rotation: Rotation, tables: Tables
    ) -> bool:
        from kvboost_kernels.place_chunk import Rotation as KernelRotation
        from kvboost_kernels.place_chunk.cpu import fits

        if not fits(out, keys):
            return False
        turn = KernelRotation(*tables, pairing=rotation.pairing, offset=rotation.offset)
        run(out, keys, turn, torch.get_num_threads())
        if kind not in self.checked:
            expected = torch.empty_like(keys)
            rotation.rotate_into(expected, keys, tables)
            differ = (out != expected) & ~(out.isnan() & expected.isnan())
            if bool(differ.any()):
                raise ArithmeticError(f"{int(differ.sum())} of {keys.numel()} numbers are not plain torch's")
            self.checked.add(kind)
        return True


def _compile(*kind: Any) -> RotateInto:
    from kvboost_kernels.place_chunk import cpu

    cpu.compiled_loop(*kind)
    return cpu.rotate_into


@cache
def _numba_is_installed() -> bool:
    return find_spec("numba") is not None


COMPILED = CompiledRotation()
