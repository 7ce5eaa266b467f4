"""Functions that numba compiles, and threads to run them on. Imported only where numba is installed.

An entry is a C function of one argument, the address of its arguments as int64 numbers; all that it calls is compiled
into it. Parts of a call share a counter from which each takes its next piece of work, so that a part may run anywhere.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from numba.cpython.unsafe.tuple import tuple_setitem

from kvboost_kernels.lanes import read_integer

INTEGER_BYTES = 8
COUNTERS = 2
"""int64 zeros after an entry's arguments, for its parts to count with."""
Function = TypeVar("Function", bound=Callable[..., Any])
_ALIGNMENT = 64
_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def inner(function: Function) -> Function:
    """For calls from compiled code only; without a cache of its own, which would not see what it calls change."""
    compiled: Function = numba.njit(function, error_model="numpy")
    return compiled


def entry(function: Callable[[int], None]) -> Any:
    """Compile (or load from numba's cache on disk) a C function `void f(int64_t arguments)`."""
    signature = numba.types.void(numba.types.int64)
    try:
        return numba.cfunc(signature, cache=True)(function)
    except (RuntimeError, OSError):  # neither the module's folder nor the user's cache can be written
        return numba.cfunc(signature)(function)


def reader_of_fields(count: int) -> Any:
    """For entries: a function of an entry's address that returns its first `count` arguments."""
    zeros = (0,) * count

    def fields(arguments):  # type: ignore[no-untyped-def]
        numbers = zeros
        for field in range(count):
            numbers = tuple_setitem(numbers, field, read_integer(arguments + INTEGER_BYTES * field))
        return numbers

    return inner(fields)


def digest(paths: Sequence[str]) -> str:
    """Of source files: for an entry's closure, which is part of its key in numba's cache as only its own file is."""
    return hashlib.sha256(b"".join(Path(path).read_bytes() for path in paths)).hexdigest()


def run(function: Any, work: Sequence[int], parts: int) -> None:
    """Call an entry `parts` times at once, without the interpreter's lock; the caller takes part.

    Its arguments are the numbers of `work` and `COUNTERS` zeros. The threads are those that torch's own operations run
    on: others would compete with them, as OpenMP's threads keep a core busy for some milliseconds after an operation.
    """
    numbers = np.array([*work, *[0] * COUNTERS], np.int64)
    arguments = numbers.ctypes.data
    if parts < 2:
        _Function(function.address)(arguments)
        return
    team = _team()
    if team is not None:
        team(function.address, arguments, parts, 0)
        return
    call = _Function(function.address)
    waiting = [_helpers(os.getpid(), parts - 1).submit(call, arguments) for _ in range(parts - 1)]
    try:
        call(arguments)
    finally:  # nobody may leave before the others are done with the memory
        wait(waiting)


@cache
def _team() -> Any:
    """`GOMP_parallel` of the OpenMP runtime that torch works with (GNU's, or LLVM's and Intel's, which have it too)."""
    try:  # a name is looked up in a library and in those that it was linked with
        start = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    start.argtypes, start.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return start


@cache
def _helpers(process: int, count: int) -> ThreadPoolExecutor:
    """Threads besides the caller's. They do not survive a fork, hence one pool a process."""
    return ThreadPoolExecutor(count, thread_name_prefix=f"kvboost-compiled-{process}")


_OWN = threading.local()


def memory(size: int) -> int:
    """Address of at least `size` bytes, a multiple of 64, kept for the calling thread's next call."""
    held = getattr(_OWN, "held", None)
    if held is None or len(held) < size + _ALIGNMENT:
        held = _OWN.held = np.empty(size + _ALIGNMENT, np.uint8)
    return int(-(-held.ctypes.data // _ALIGNMENT) * _ALIGNMENT)
