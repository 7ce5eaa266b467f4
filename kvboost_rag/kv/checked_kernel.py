"""Kernels are believed only after a comparison with plain torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvboost_rag.config import KernelSetting, kernel_setting

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest difference to plain torch, relative to the largest output, that a kernel may show when it is first used."""


@dataclass
class CheckedKernel:
    """One kernel in this process. The first call of each kind is also computed by plain torch; a kernel that raises
    or differs is not used again, which is logged once.

    Attributes:
        checked: kinds of calls that agreed with plain torch.
        refused: whether the kernel is out of use.
    """

    name: ClassVar[str]
    checked: set[tuple[object, ...]] = field(default_factory=set)
    refused: bool = False

    def wanted(self, device: torch.device) -> bool:
        """Whether to try: on GPUs, or wherever `KVBOOST_KERNELS=on` says so (Triton's interpreter runs on a CPU)."""
        setting: KernelSetting = kernel_setting()
        return not self.refused and (setting == "on" or (setting == "auto" and device.type == "cuda"))

    def refuse(self, error: Exception) -> None:
        """Out of use from now on."""
        self.refused = True
        logger.warning("the %s kernel is not used, plain torch is: %s: %s", self.name, type(error).__name__, error)


def check_agrees(output: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise `ArithmeticError` where `output` differs from plain torch's by more than its dtype's `TOLERANCE`.

    Numbers that are not finite must be so in both: a model that overflows is no fault of the kernel.
    """
    found, wanted = output.float(), expected.float()
    finite = wanted.isfinite()
    if not torch.equal(found.isfinite(), finite):
        raise ArithmeticError("its output is finite in other places than plain torch's")
    found, wanted = found[finite], wanted[finite]
    if not wanted.numel():
        return
    error = float((found - wanted).abs().amax() / wanted.abs().amax().clamp(min=1e-6))
    if error > TOLERANCE[output.dtype]:
        raise ArithmeticError(f"its output differs from plain torch's by {error:.2g} of the largest value")
