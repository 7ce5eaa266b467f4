"""Kernels are believed only after a comparison with plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch

from kvboost_rag.config import kernel_setting

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest difference to plain torch, relative to the largest output, that a kernel may show when it is first used."""

Done = TypeVar("Done")


@dataclass
class CheckedKernel:
    """One kernel in this process. The first call of each kind is also computed by plain torch; a kernel that raises
    or differs is not used again, which is logged once.

    Attributes:
        name: for the log.
        processor: what it is written for: `gpu`, or `cpu`.
        exact: whether it must give plain torch's bits.
        checked: kinds of calls that agreed with plain torch.
        refused: whether the kernel is out of use.
    """

    name: str
    processor: Literal["gpu", "cpu"]
    exact: bool = False
    checked: set[object] = field(default_factory=set)
    refused: bool = False

    def wanted(self, device: torch.device) -> bool:
        """Whether to try. `KVBOOST_KERNELS=off` forbids all kernels, `on` runs those for GPUs on any device (Triton's
        interpreter runs on a CPU)."""
        setting = kernel_setting()
        if self.refused or setting == "off":
            return False
        if self.processor == "cpu":
            return device.type == "cpu"
        return setting == "on" or device.type == "cuda"

    def run(
        self,
        kind: object,
        ours: Callable[[], Done],
        twin: Callable[[Done], Iterable[tuple[torch.Tensor, torch.Tensor]]],
    ) -> Done | None:
        """`ours()`, or None where plain torch has to do it (what `ours` has written is then undefined).

        Args:
            kind: hashable; calls of one kind are compared once.
            twin: pairs of tensors, what `ours` computed and the same by plain torch; given what `ours` returned.
        """
        if self.refused:
            return None
        try:
            done = ours()
            if kind not in self.checked:
                for found, expected in twin(done):
                    self._compare(found, expected)
                self.checked.add(kind)
        except Exception as error:
            self.refused = True
            logger.warning("the %s kernel is not used, plain torch is: %s: %s", self.name, type(error).__name__, error)
            return None
        return done

    def _compare(self, output: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise `ArithmeticError` where `output` differs from plain torch's by more than its dtype's `TOLERANCE`, or at
        all where `exact`.

        Numbers that are not finite must be so in both: a model that overflows is no fault of the kernel.
        """
        if self.exact:
            differ = (output != expected) & ~(output.isnan() & expected.isnan())
            if bool(differ.any()):
                raise ArithmeticError(f"{int(differ.sum())} of {output.numel()} numbers are not plain torch's")
            return
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
