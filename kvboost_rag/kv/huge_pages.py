"""Pages of 2 MB for the prompt's KV on a CPU, where Linux gives them on request (`madvise`, its usual setting).

A pass reads tens of thousands of ordinary pages of keys and values, more than a core can remember the places of.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch

PAGE_BYTES = 1 << 21
_MADV_HUGEPAGE = 14


def ask_for_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for the whole pages inside a fresh tensor; a system that has none leaves it as it is."""
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // PAGE_BYTES * PAGE_BYTES
    if end > start:
        _madvise()(start, end - start, _MADV_HUGEPAGE)


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function
