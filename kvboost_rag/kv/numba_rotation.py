"""Rotation of stored keys on a CPU through the loop that numba compiles, where numba is installed.

Compiling (once a machine: numba keeps the result) and importing numba are left to a thread; until it is done, torch
rotates. Both give the same bits, or the loop is not used: unlike the GPU kernels it takes over in the middle of a
process, and an answer must not depend on when.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec

import torch

from kvboost_kernels.place_chunk import Rotation as KernelRotation
from kvboost_kernels.place_chunk.layout import Pairing, fits_loop
from kvboost_rag.kv.checked_kernel import CheckedKernel
from kvboost_rag.kv.rope import Rotation

Tables = tuple[torch.Tensor, torch.Tensor]
Kind = tuple[torch.dtype, Pairing, int, int, int]
"""Dtype, pairing, offset and half the size of the rotation, head size."""
Loop = Callable[[torch.Tensor, torch.Tensor, KernelRotation, int], None]

KERNEL = CheckedKernel("rotation (numba)", "cpu", exact=True)
COMPILED: dict[Kind, Future[Loop]] = {}
"""Loops, compiled or being compiled."""


def rotate_into(out: torch.Tensor, keys: torch.Tensor, rotation: Rotation, tables: Tables) -> bool:
    """`Rotation.rotate_into`. False: plain torch has to do it (what is written is then undefined)."""
    if not (KERNEL.wanted(out.device) and numba_is_installed() and fits_loop(out, keys)):
        return False
    kind = keys.dtype, rotation.pairing, rotation.offset, rotation.rotary_dim // 2, keys.shape[-1]
    if kind not in COMPILED:
        COMPILED[kind] = _compiler().submit(_compile, kind)
    loop = COMPILED[kind]
    if not loop.done():
        return False

    def ours() -> bool:
        turn = KernelRotation(*tables, pairing=rotation.pairing, offset=rotation.offset)
        loop.result()(out, keys, turn, torch.get_num_threads())
        return True

    def twin(_: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        expected = torch.empty_like(keys)
        rotation.rotate_into(expected, keys, tables)
        return [(out, expected)]

    return KERNEL.run(kind, ours, twin) is not None


def wait_until_compiled() -> None:
    """Return when everything asked for so far is compiled, or could not be."""
    for loop in tuple(COMPILED.values()):
        loop.exception()


@cache
def _compiler() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="kvboost-compile")


def _compile(kind: Kind) -> Loop:
    from kvboost_kernels.place_chunk import cpu

    cpu.compiled_loop(*kind)
    return cpu.rotate_into


@cache
def numba_is_installed() -> bool:
    """Known without importing it."""
    return find_spec("numba") is not None
