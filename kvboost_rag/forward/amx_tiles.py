"""Kernels that numba compiles for matrix tiles (Intel's AMX), and whether they can run in this process."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from kvboost_rag.config import kernel_setting
from kvboost_rag.kv.checked_kernel import CheckedKernel

logger = logging.getLogger(__name__)


class TileKernel(CheckedKernel):
    """A kernel on matrix tiles."""

    def wanted(self, device: torch.device) -> bool:
        """Whether to try: on a CPU with matrix tiles and numba, unless `KVBOOST_KERNELS=off`."""
        return not self.refused and device.type == "cpu" and can_compile() and kernel_setting() != "off"


@cache
def can_compile() -> bool:
    """Whether numba is installed and the processor has tiles for bfloat16: known without importing numba."""
    try:
        return find_spec("numba") is not None and "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def say_what_takes_time() -> None:
    """To the log, before a loop is compiled."""
    logger.info("loading code for this processor's matrix tiles; once a machine it is compiled, in some seconds")
